"""A strict HTTP/1.1 client over raw sockets, so that tests see every byte of the framing."""

import functools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import trio
from msgspec import Struct

from api.app import serve
from api.settings import ApiSettings, Draws
from node.service import ClusterService, Service
from tests.api.memory_service import MemoryService

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


class Reply(Struct):
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:  # noqa: ANN401 - of any type
        """The body as a document; it must say that it is one."""
        assert self.headers["content-type"].startswith("application/json"), self.headers
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """The body as an error of exactly OpenAI's shape."""
        document = self.json()
        assert set(document) == {"error"}
        error = document["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"].endswith(".")
        assert isinstance(error["type"], str)
        assert isinstance(error["code"], str)
        assert error["param"] is None or isinstance(error["param"], str)
        return dict(error)


class Connection:
    """One connection; responses are read one after another."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = bytearray()
        self._eof = False

    async def send(self, data: bytes) -> None:
        """Bytes as they are."""
        await self.stream.send_all(data)

    async def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] = {}, host: str | None = "localhost"
    ) -> None:
        """Send a whole request; `body` is JSON's value or bytes."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = {"Content-Length": str(len(data))} if data or method == "POST" else {}
        if host is not None:
            lines["Host"] = host
        if data:
            lines["Content-Type"] = "application/json"
        lines.update(headers)
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        await self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogateescape") + data)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        """Status and headers (lower case) of the next response."""
        head = (await self._until(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")[:-2]
        version, status, _ = first.split(" ", 2)
        assert version in ("HTTP/1.1", "HTTP/1.0")  # the older one answers what is no HTTP
        headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, f"{name} twice"
            headers[name.lower()] = value
        return int(status), headers

    async def read_reply(self, *, method: str = "GET") -> Reply:
        """The next response, whole."""
        status, headers = await self.read_head()
        if method == "HEAD" or status == 204:
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Reply(status, headers, b"".join([chunk async for chunk in self.chunks()]))
        return Reply(status, headers, await self._exactly(int(headers["content-length"])))

    async def chunk(self) -> bytes:
        """The next piece of a chunked body; none at its proper end."""
        size = int((await self._until(b"\r\n"))[:-2], 16)
        data = await self._exactly(size)
        assert await self._exactly(2) == b"\r\n"
        return data

    async def chunks(self) -> AsyncIterator[bytes]:
        """The pieces of a chunked body, up to its proper end."""
        while data := await self.chunk():
            yield data

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events and comments of a chunked body, each without its empty line, up to the body's end."""
        rest = b""
        async for chunk in self.chunks():
            *whole, rest = (rest + chunk).split(b"\n\n")
            for event in whole:
                yield event.decode()
        assert rest == b"", rest

    async def is_closed(self) -> bool:
        """Wait for the other side to end the connection; False where more data came."""
        return not self._buffer and not await self._more()

    async def _more(self) -> bool:
        try:
            data = await self.stream.receive_some(1 << 16)
        except trio.BrokenResourceError:
            return False
        self._buffer += data
        return bool(data)

    async def _until(self, end: bytes) -> bytes:
        while (at := self._buffer.find(end)) < 0:
            assert await self._more(), f"the connection ended within {bytes(self._buffer)!r}"
        return self._take(at + len(end))

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            assert await self._more(), f"the connection ended within {bytes(self._buffer)!r}"
        return self._take(size)

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


class Client:
    """Asks one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port = parts.hostname, parts.port

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """A fresh connection."""
        stream = await trio.open_tcp_stream(self.host, self.port)
        try:
            yield Connection(stream)
        finally:
            await trio.aclose_forcefully(stream)

    async def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] = {}, host: str | None = "localhost"
    ) -> Reply:
        """One request on a connection of its own."""
        async with self.connect() as connection:
            await connection.ask(method, path, body, headers, host)
            return await connection.read_reply(method=method)

    async def chat(self, request_headers: Mapping[str, str] = {}, /, **body: object) -> Reply:
        """A chat completion; messages are a greeting unless given."""
        return await self.ask("POST", CHAT, {"messages": HI, **body}, request_headers)

    @asynccontextmanager
    async def stream(self, **body: object) -> AsyncIterator[Connection]:
        """A connection on which a streamed chat completion was asked for."""
        async with self.connect() as connection:
            await connection.ask("POST", CHAT, {"messages": HI, "stream": True, **body})
            yield connection

    async def streamed_with(self, connection: Connection, **body: object) -> tuple[dict[str, str], list[str]]:
        """Headers and events of a streamed chat completion on an open connection."""
        await connection.ask("POST", CHAT, {"messages": HI, "stream": True, **body})
        status, headers = await connection.read_head()
        assert status == 200
        return headers, [event async for event in connection.events()]

    async def streamed(self, **body: object) -> list[str]:
        """The events of a streamed chat completion that is answered with 200."""
        async with self.connect() as connection:
            return (await self.streamed_with(connection, **body))[1]


@asynccontextmanager
async def serving(
    service: Service,
    draws: Draws | None = None,
    cluster: ClusterService | None = None,
    **settings: Any,  # noqa: ANN401 - of any type
) -> AsyncIterator[Client]:
    """The API over a service, on a port of its own."""
    settings.setdefault("addresses", (("127.0.0.1", 0),))
    async with trio.open_nursery() as nursery:
        run = functools.partial(serve, service, ApiSettings(**settings), cluster=cluster, draws=draws or Draws())
        if isinstance(service, MemoryService):
            nursery.start_soon(service.run)
        urls: tuple[str, ...] = await nursery.start(run)
        yield Client(urls[0])
        nursery.cancel_scope.cancel()


def documents(events: list[str]) -> list[Any]:
    """The documents of a stream's events, comments left out; it must be ended properly."""
    assert events[-1] == "data: [DONE]", events[-1]
    shown = [event for event in events[:-1] if not event.startswith(":")]
    assert all(event.startswith("data: {") and "\n" not in event for event in shown)
    return [json.loads(event.removeprefix("data: ")) for event in shown]


def text_of(chunks: list[Any]) -> str:
    """The text that a client puts together."""
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
