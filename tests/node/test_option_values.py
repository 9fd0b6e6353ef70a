"""Texts of options become values, or one sentence says why not."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node import option_values as values
from node.option_values import Address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:52416", Address("127.0.0.1", 52416)),
        ("[::1]:52416", Address("::1", 52416)),
        ("[0:0:0:0:0:0:0:1]:0", Address("::1", 0)),
        ("localhost:8080", Address("localhost", 8080)),
        ("my-mac.local:1", Address("my-mac.local", 1)),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert values.address(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", ":80", "80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1", "::1:52416", "[::1]",
     "[127.0.0.1]:1", "1.2.3:4", "300.1.1.1:4", "a b:1", "-x:1", "a..b:1", "http://a:1", "127.0.0.1:٣"],
)  # fmt: skip
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no HOST:PORT|above 65535"):
        values.address(text)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_address_survives_being_written_and_read(host: object, port: int) -> None:
    address = Address(str(host), port)

    assert values.address(str(address)) == address


def test_what_is_loopback() -> None:
    assert all(values.address(text).is_loopback for text in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"))
    assert not any(values.address(text).is_loopback for text in ("0.0.0.0:1", "[::]:1", "192.168.1.2:1", "example.org:1"))


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/192.0.2.7/tcp/4001",
        "/ip6/::1/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp",
        "/dns4/a.example/tcp/1",
        "a.example:1",
        "[::1]:2",
    ],
)
def test_peer_addresses(text: str) -> None:
    assert values.peer_address(text) == text


@pytest.mark.parametrize(
    "text", ["", "/", "/ip4/192.0.2.7", "/ip4/192.0.2.7/tcp/0", "/ip4/1.2.3.4/tcp/70000", "a:0", "/ip4/x/udp/1"]
)
def test_what_is_no_peer_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no|has port 0"):
        values.peer_address(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("4GB", 4 * 10**9), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("10b", 10), ("2kb", 2000), ("1TiB", 1 << 40)],
)
def test_sizes(text: str, expected: int) -> None:
    assert values.size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "4XB", "4 G B", "1e9", "inf", "4GBB", "٤GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        values.size(text)


@given(st.integers(0, 10**12))
def test_plain_bytes_are_taken_as_they_are(number: int) -> None:
    assert values.size(str(number)) == values.size(f"{number}B") == number


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0.0), ("600", 600.0), ("0.5", 0.5), ("250ms", 0.25), ("2h", 7200.0), ("3 m", 180.0)]
)
def test_durations(text: str, expected: float) -> None:
    assert values.duration(text) == expected


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (values.duration, "nan"), (values.duration, "-1"), (values.duration, "1d"), (values.duration, "999999999999"),
        (values.positive_duration, "0"), (values.count, "-1"), (values.count, "1.5"), (values.count, "1_000"),
        (values.count, "9999999999"), (values.positive_count, "0"), (values.switch, "maybe"), (values.name, ""),
        (values.name, "a\nb"), (values.name, "x" * 65), (values.path, ""), (values.path, "a\0b"), (values.model, " "),
        (values.alias, "a"), (values.alias, "=b"), (values.alias, "a="), (values.api_key, "a b"), (values.api_key, "ü"),
        (values.log_format, "xml"), (values.log_level, "loud"), (values.cluster_key, ""), (values.cluster_key, "00" * 65),
    ],
)  # fmt: skip
def test_bad_values_are_refused(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"^(is|has|must) "):
        parse(text)


def test_an_alias_splits_at_its_first_equals_sign() -> None:
    assert values.alias("gpt-4o = /models/a=b") == ("gpt-4o", "/models/a=b")


def test_a_cluster_key_has_at_least_128_bits() -> None:
    assert values.cluster_key("0f" * 16) == b"\x0f" * 16
    with pytest.raises(ValueError, match=r"120 bits.*`node key`"):
        values.cluster_key("0f" * 15)
    with pytest.raises(ValueError, match="`node key`"):
        values.cluster_key("correct horse battery staple and so on")


def test_switches() -> None:
    assert [values.switch(text) for text in ("1", "true", "YES", "on")] == [True] * 4
    assert [values.switch(text) for text in ("0", "false", "No", "off")] == [False] * 4
