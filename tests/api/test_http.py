"""The doors: routes, methods, sizes, hosts, keys, origins; every refusal is JSON of OpenAI's shape."""

import gzip
import json

import pytest
import trio

from api import server
from api.app import serve
from api.settings import ApiSettings
from tests.api.http_client import CHAT, HI, Client, serving
from tests.api.memory_service import MODEL, MemoryService
from tests.api.test_listen import has_ipv6


async def test_models_are_listed_and_found() -> None:
    async with serving(MemoryService()) as client:
        listed = (await client.ask("GET", "/v1/models")).json()
        one = (await client.ask("GET", "/v1/models/fake%3A1")).json()
        missing = await client.ask("GET", "/v1/models/org/none")

    assert listed == {"object": "list", "data": [one]}
    assert {"id": MODEL.name, "object": "model", "created": MODEL.created, "owned_by": "shoal"}.items() <= one.items()
    assert (missing.status, missing.error()["code"], missing.error()["param"]) == (404, "model_not_found", "model")


async def test_health_and_readiness() -> None:
    service = MemoryService()
    async with serving(service, api_keys=("k",)) as client:
        ready = await client.ask("GET", "/readyz")
        service.reason = "fake:1 is loading: 3 of 4 GB."
        unready = await client.ask("GET", "/readyz")
        healthy = await client.ask("GET", "/healthz")
        head = await client.ask("HEAD", "/healthz")

    assert (ready.status, healthy.status, head.status) == (200, 200, 200)
    assert (unready.status, unready.error()["message"]) == (503, service.reason)


REFUSED = {
    "no such path": ("GET", "/nope", 404, "not_found"),
    "the root": ("GET", "/", 404, "not_found"),
    "no such path to post to": ("POST", "/v1/nope", 404, "not_found"),
    "the wrong method": ("GET", CHAT, 405, "method_not_allowed"),
    "another wrong method": ("DELETE", "/v1/models", 405, "method_not_allowed"),
    "no body": ("POST", CHAT, 400, "invalid_json"),
}


@pytest.mark.parametrize(("method", "path", "status", "code"), REFUSED.values(), ids=REFUSED)
async def test_refusals_are_json(method: str, path: str, status: int, code: str) -> None:
    async with serving(MemoryService()) as client:
        reply = await client.ask(method, path, headers={"Origin": "https://chat.example"})

    assert (reply.status, reply.error()["code"]) == (status, code)
    assert reply.headers["access-control-allow-origin"] == "https://chat.example"  # 60
    assert reply.headers["x-request-id"]
    assert ("allow" in reply.headers) == (status == 405)


async def test_what_is_no_http_gets_a_refusal_in_json() -> None:
    async with serving(MemoryService()) as client:
        for nonsense in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"):
            async with client.connect() as connection:
                await connection.send(nonsense)
                reply = await connection.read_reply()

                assert (reply.status, reply.error()["code"]) == (400, "bad_http")
                assert await connection.is_closed()


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain", "nonsense"])
async def test_any_content_type_will_do_48(content_type: str | None) -> None:
    body = json.dumps({"messages": HI, "max_tokens": 1}).encode()
    line = f"Content-Type: {content_type}\r\n" if content_type else ""
    async with serving(MemoryService()) as client, client.connect() as connection:
        await connection.send(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{line}Content-Length: {len(body)}\r\n\r\n".encode() + body
        )
        assert (await connection.read_reply()).status == 200


async def test_bodies_that_are_too_large_50() -> None:
    service = MemoryService()
    async with serving(service, body_bytes_max=1000) as client:
        announced = await client.ask("POST", CHAT, b"x" * 1001)
        async with client.connect() as connection:
            await connection.send(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            await connection.send(b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n")
            unannounced = await connection.read_reply()
        allowed = await client.chat(max_tokens=1)

    assert (announced.status, announced.error()["code"]) == (413, "request_too_large")
    assert (unannounced.status, unannounced.error()["code"]) == (413, "request_too_large")
    assert allowed.status == 200
    assert len(service.requests) == 1


async def test_a_body_beyond_aiohttps_own_limit_is_taken_50() -> None:
    async with serving(MemoryService()) as client:
        reply = await client.chat(messages=[{"role": "user", "content": "x" * (2 << 20)}])

    assert reply.error()["code"] == "context_length_exceeded"


async def test_large_bodies_together_are_bounded() -> None:
    async with serving(MemoryService(), bodies_bytes_max=1000) as client, client.connect() as slow:
        await slow.send(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n".encode() + b" " * 800)
        async with client.connect() as other:
            while True:  # until the first one's bytes have arrived, the second's are welcome
                await other.ask("POST", CHAT, b" " * 300)
                reply = await other.read_reply()
                if reply.status != 400:
                    break
        await slow.send(b" " * 100)
        await slow.read_reply()
        after = await client.ask("POST", CHAT, {"messages": HI, "max_tokens": 1})

    assert (reply.status, reply.error()["code"]) == (503, "overloaded")
    assert reply.headers["retry-after"] == "1"
    assert after.status == 200


@pytest.mark.parametrize("expect", ["100-continue", "100-Continue"])
async def test_a_client_that_holds_its_body_back_is_asked_for_it(expect: str) -> None:
    body = json.dumps({"messages": HI, "max_tokens": 1}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nExpect: {expect}\r\nContent-Length: "
    async with serving(MemoryService(), body_bytes_max=1000) as client:
        async with client.connect() as connection:
            await connection.send(f"{head}{len(body)}\r\n\r\n".encode())
            invited = await connection.read_head()
            await connection.send(body)
            reply = await connection.read_reply()
        async with client.connect() as connection:
            await connection.send(f"{head}1001\r\n\r\n".encode())
            refused = await connection.read_reply()

    assert invited == (100, {})
    assert reply.status == 200
    assert refused.status == 413


@pytest.mark.parametrize(
    ("header", "body"),
    [("Transfer-Encoding: chunked", b"xyz\r\n"), ("Content-Encoding: gzip\r\nContent-Length: 20", b"\x1f\x8b" + b"x" * 18)],
    ids=["chunks", "compression"],
)
async def test_broken_bodies_are_the_clients_fault(header: str, body: bytes) -> None:
    async with serving(MemoryService()) as client, client.connect() as connection:
        await connection.send(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode() + body)
        reply = await connection.read_reply()

    assert (reply.status, reply.error()["code"]) == (400, "bad_http")


async def test_a_compressed_body_counts_as_what_it_is_when_unpacked() -> None:
    small = gzip.compress(json.dumps({"messages": HI, "max_tokens": 1}).encode())
    bomb = gzip.compress(b" " * 10_000_000)
    packed = {"Content-Encoding": "gzip"}
    async with serving(MemoryService(), body_bytes_max=1_000_000) as client:
        assert (await client.ask("POST", CHAT, small, packed)).status == 200
        assert (await client.ask("POST", CHAT, bomb, packed)).status == 413


async def test_more_connections_than_can_be_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 1)
    async with serving(MemoryService()) as client, client.connect() as first:
        await first.ask("GET", "/healthz")
        assert (await first.read_reply()).status == 200
        async with client.connect() as second:
            reply = await second.read_reply()
            assert await second.is_closed()
        await first.ask("GET", "/healthz")
        assert (await first.read_reply()).status == 200

    assert (reply.status, reply.error()["code"]) == (503, "overloaded")


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"])
async def test_connections_on_which_nothing_becomes_of_a_request_are_ended(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS_MAX", 0.05)
    async with serving(MemoryService()) as client, client.connect() as connection:
        await connection.send(sent)
        assert await connection.is_closed()


async def test_a_server_that_is_open_to_others_needs_a_key() -> None:
    with pytest.raises(OSError, match="needs an API key"):
        await serve(MemoryService(), ApiSettings(addresses=(("0.0.0.0", 0),)))


async def test_a_server_that_is_open_to_others_goes_by_any_name() -> None:
    async with serving(MemoryService(), addresses=(("0.0.0.0", 0),), insecure=True) as client:
        local = Client(f"http://127.0.0.1:{client.port}")
        assert (await local.ask("GET", "/v1/models", host="shoal.example")).status == 200


async def test_foreign_hosts_are_refused_on_loopback_62() -> None:
    async with serving(MemoryService(), host_names=("My-Box",)) as client:
        statuses = {
            host: (await client.ask("GET", "/v1/models", host=host)).status
            for host in ("localhost", "127.0.0.1:1", "[::1]", "my-box", "", "evil.example", "evil.example:80")
        }
        preflight = await client.ask("OPTIONS", CHAT, host="evil.example")

    assert {host for host, status in statuses.items() if status == 403} == {"evil.example", "evil.example:80"}
    assert {status for status in statuses.values() if status != 403} == {200}
    assert preflight.status == 403


async def test_keys() -> None:
    async with serving(MemoryService(), api_keys=("one", "two")) as client:
        for authorization in ({}, {"Authorization": "Bearer three"}):
            for path in ("/v1/models", "/nope"):
                reply = await client.ask("GET", path, headers=authorization)
                assert (reply.status, reply.error()["code"]) == (401, "invalid_api_key")
            assert (await client.chat(authorization)).status == 401
        for key in ("one", "two"):
            assert (await client.chat({"Authorization": f"Bearer {key}"}, max_tokens=1)).status == 200


async def test_browsers_may_ask_60() -> None:
    asked = "authorization,content-type,dangerously-allow-browser,x-stainless-os,x-of-tomorrow"
    origin = {"Origin": "https://chat.example"}
    async with serving(MemoryService(), api_keys=("k",)) as client:
        preflight = await client.ask(
            "OPTIONS",
            CHAT,
            headers={**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked},
        )
        error = await client.chat(origin)
        async with client.connect() as connection:
            body = {"messages": HI, "stream": True, "max_tokens": 1}
            await connection.ask("POST", CHAT, body, {**origin, "Authorization": "Bearer k"})
            _, stream_headers = await connection.read_head()

    assert preflight.status == 204
    assert preflight.headers["access-control-allow-headers"] == asked
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for headers in (preflight.headers, error.headers, stream_headers):
        assert headers["access-control-allow-origin"] == "https://chat.example"
        assert "Origin" in headers["vary"]
    for headers in (error.headers, stream_headers):
        assert "X-Request-Id" in headers["access-control-expose-headers"]
        assert "Retry-After" in headers["access-control-expose-headers"]


async def test_request_ids() -> None:
    async with serving(MemoryService()) as client:
        own = await client.chat({"X-Request-Id": "mine-1"}, max_tokens=1)
        odd = await client.chat({"X-Request-Id": "x" * 500}, max_tokens=1)
        refused = await client.chat({"X-Request-Id": "mine-2"}, n=2)

    assert own.headers["x-request-id"] == "mine-1"
    assert len(odd.headers["x-request-id"]) == 32
    assert refused.headers["x-request-id"] == "mine-2"


async def test_a_fault_of_this_program_is_500_in_json() -> None:
    service = MemoryService()

    def fail() -> None:
        raise ZeroDivisionError

    service.not_ready = fail  # type: ignore[method-assign]  # the one call that fails
    async with serving(service) as client:
        reply = await client.ask("GET", "/readyz")

    assert (reply.status, reply.error()["code"]) == (500, "internal_error")
    assert "ZeroDivision" not in reply.body.decode()


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
async def test_both_loopback_addresses_are_served_62() -> None:
    async with trio.open_nursery() as nursery:
        service = MemoryService()
        nursery.start_soon(service.run)
        settings = ApiSettings(addresses=(("127.0.0.1", 0), ("::1", 0)))
        urls: tuple[str, ...] = await nursery.start(lambda *, task_status: serve(service, settings, task_status=task_status))
        replies = [await Client(url).ask("GET", "/healthz") for url in urls]
        nursery.cancel_scope.cancel()

    assert [url.rpartition(":")[0] for url in urls] == ["http://127.0.0.1", "http://[::1]"]
    assert len({url.rpartition(":")[2] for url in urls}) == 1
    assert [reply.status for reply in replies] == [200, 200]


async def test_a_taken_port_is_an_error_of_one_sentence() -> None:
    async with serving(MemoryService()) as client:
        with pytest.raises(OSError, match=r"is already in use; .*\.$"):
            await serve(MemoryService(), ApiSettings(addresses=((client.host, client.port),)))
