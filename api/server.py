"""aiohttp's HTTP server with what this one needs changed: bounds, errors as JSON, an end that leaves nothing open."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import structlog
from aiohttp import web

from api.errors import ApiError
from api.exchange import error_response
from api.listen import BACKLOG

# A node's file descriptors are also its runners' pipes and its peers; macOS gives a process 256 unless told otherwise.
CONNECTIONS_MAX = 1024

# For a connection that waits for its first or next request, or sends half a head. Longer than most proxies keep theirs idle.
IDLE_SECONDS_MAX = 75.0

# What a head may have; aiohttp's own bounds are in bytes of a line (8 KiB) and of a field (8 KiB).
HEADERS_MAX = 128

# For what is still to be read of a request that was refused, so that its sender gets to read the refusal.
LINGER_SECONDS = 5.0

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_log = structlog.get_logger("api")


class _Connection(web.RequestHandler):
    """One client's connection. What is no HTTP gets its 400 as JSON, and no trace in the log."""

    __slots__ = ("_counted", "_server")

    def __init__(self, server: "HttpServer", loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=IDLE_SECONDS_MAX,
            lingering_time=LINGER_SECONDS,
            max_headers=HEADERS_MAX,
            access_log=None,  # type: ignore[arg-type]  # None switches it off; the stubs are older
        )
        self._server = server
        self._counted: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._counted = transport
        self._server.transports.add(transport)
        if len(self._server.transports) > CONNECTIONS_MAX:
            transport.write(_overloaded())
            transport.close()
            return
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.transport is not None:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._counted is not None:
            self._server.transports.discard(self._counted)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status < 500:  # all others are the application's to tell
            _log.debug("a request that is no HTTP", remote=request.remote, kind=type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        reason = (message or "").strip().splitlines()
        text = f"The request is no valid HTTP: {reason[0].rstrip(':. ')}." if reason else "The request is no valid HTTP."
        return error_response(ApiError(status, "bad_http" if status < 500 else "internal_error", text, headers=_CLOSE))


_CLOSE = {"Connection": "close", "Server": "shoal"}


def _overloaded() -> bytes:
    body = ApiError(503, "overloaded", "Too many connections are open here.").body()
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Retry-After: 1\r\nConnection: close\r\n\r\n" + body


class HttpServer(web.Server):
    """Serves `handle` on sockets; a handler whose client leaves is cancelled."""

    def __init__(self, handle: Handle) -> None:
        super().__init__(handle, handler_cancellation=True)
        self.transports: set[asyncio.Transport] = set()
        self._listeners: list[asyncio.Server] = []

    def __call__(self) -> web.RequestHandler:
        """A protocol for one more connection."""
        return _Connection(self, self._loop)

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections from now on; the sockets are closed with the server."""
        for bound in sockets:
            self._listeners.append(await self._loop.create_server(self, sock=bound, backlog=BACKLOG))

    async def close(self, seconds: float) -> None:
        """Accept nothing more, let the answers under way end within so many seconds, cut off the rest."""
        for listener in self._listeners:
            listener.close()
        self.pre_shutdown()
        await self.shutdown(seconds)
        for transport in tuple(self.transports):
            transport.abort()
        await asyncio.sleep(0)  # transports tell their protocols of their end in the loop's next round
