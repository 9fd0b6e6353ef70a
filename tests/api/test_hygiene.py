"""Who may ask: hosts, keys, origins, ids."""

import pytest

from api import hygiene
from api.errors import ApiError

OWN = frozenset({"my-box", "my-box.local"})

ALLOWED = [
    None,
    "",
    "localhost",
    "localhost:52416",
    "LOCALHOST:1",
    "app.localhost",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:80",
    "192.168.1.5",
    "[::1]",
    "[::1]:52416",
    "[fe80::1]:1",
    "my-box",
    "My-Box.local:52416",
]
FOREIGN = [
    "evil.example",
    "evil.example:52416",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "notlocalhost",
    "[::1",
    "::1",
    "a b",
]


@pytest.mark.parametrize("host", ALLOWED)
def test_own_hosts_62(host: str | None) -> None:
    hygiene.check_host(host, OWN)


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_hosts_62(host: str) -> None:
    with pytest.raises(ApiError) as caught:
        hygiene.check_host(host, OWN)

    assert (caught.value.status, caught.value.code) == (403, "forbidden_host")


@pytest.mark.parametrize("given", ["Bearer one", "bearer two", "BEARER  two "])
def test_right_keys(given: str) -> None:
    hygiene.Keys(["one", "two"]).check(given)


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", "Bearer three", "Basic one", "one", "Bearer one two", "Bearer \udcff"]
)
def test_wrong_keys(given: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        hygiene.Keys(["one", "two"]).check(given)

    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.headers["WWW-Authenticate"] == "Bearer"


def test_without_keys_nobody_needs_one() -> None:
    hygiene.Keys([]).check(None)
    hygiene.Keys([]).check("Bearer x")


def test_sane_request_ids_are_kept() -> None:
    assert hygiene.request_id("req-1", "fresh") == "req-1"
    assert hygiene.request_id("x" * 128, "fresh") == "x" * 128
    for odd in (None, "", "a b", "x" * 129, "é", "a\tb"):
        assert hygiene.request_id(odd, "fresh") == "fresh"


def test_preflight_60() -> None:
    asked = {"Access-Control-Request-Headers": "x-stainless-os, dangerously-allow-browser, x-new"}

    headers = hygiene.preflight_headers(asked)

    assert headers["Access-Control-Allow-Headers"] == asked["Access-Control-Request-Headers"]
    assert "Origin" in headers["Vary"]
    assert "Access-Control-Allow-Private-Network" not in headers
    private = hygiene.preflight_headers({"Access-Control-Request-Private-Network": "true"})
    assert private["Access-Control-Allow-Private-Network"] == "true"


def test_cross_origin_60() -> None:
    headers = hygiene.cross_origin_headers("https://chat.example")

    assert headers["Access-Control-Allow-Origin"] == "https://chat.example"
    assert headers["Vary"] == "Origin"
    assert {"X-Request-Id", "Retry-After"} <= set(headers["Access-Control-Expose-Headers"].split(", "))
    assert hygiene.cross_origin_headers(None) == {"Vary": "Origin"}
