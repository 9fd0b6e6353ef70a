"""`/cluster/...`: what a node sees of its cluster.

`/cluster/events` is a stream of server-sent events (WHATWG HTML, 9.2). The first is

    event: state
    id: <revision>
    data: {"revision", "digest", "state": {...}}       all of `/cluster/state`

and after it, ten a second at most, come

    event: change
    id: <revision>
    data: {"revision", "digest", "nodes": [...], "instances": [...], "runners": [...], "tasks": [...], "removed": {...}, ...}

with what changed since the event before, each entry whole, and only the lists in which anything did; `removed` holds ids by
list. A reader that was too slow to be told of every removal gets a `state` event again. Comments stand in between where nothing
changes. If the node ends the stream, an `error` event says why.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog
import trio
from aiohttp import web
from msgspec import Struct

from api import sse
from api.bridge import Bridge, BridgeClosed, Stream
from api.errors import ApiError, incomplete, internal, stopping
from api.exchange import Exchange, json_response
from api.settings import ApiSettings
from node.documents import StateDocument, StateEvent, TaskDocument
from node.dump_document import dump_document
from node.replica_dump import ReplicaDump
from node.service import ClusterService

TASK_ID_CHARACTERS_MAX = 64

_log = structlog.get_logger("api")
_json = msgspec.json.Encoder().encode


class Paced(Struct, frozen=True):
    """The changes, and room for as many of them as may be between the two sides."""

    changes: AsyncIterator[StateEvent]
    room: trio.Semaphore


async def one_by_one(paced: Paced) -> AsyncIterator[StateEvent]:
    """trio: the events, the next one only when the reader has taken the last: what it is told then is of that moment."""
    while True:
        await paced.room.acquire()
        try:
            event = await anext(paced.changes)
        except StopAsyncIteration:
            return
        yield event


def event_bytes(event: StateEvent) -> bytes:
    """One event on the wire; JSON has no line ends."""
    name = b"change" if event.state is None else b"state"
    return b"event: %s\nid: %d\ndata: %s\n\n" % (name, event.revision, _json(event))


def error_bytes(error: ApiError) -> bytes:
    """Why no more comes."""
    return b"event: error\ndata: %s\n\n" % error.body()


class ClusterRoutes:
    """The cluster's routes over one service."""

    def __init__(self, bridge: Bridge, service: ClusterService, settings: ApiSettings) -> None:
        self._bridge = bridge
        self._service = service
        self._settings = settings

    async def state(self, exchange: Exchange) -> web.Response:
        """The merged view."""
        return json_response(await self._bridge.call(self._state), exchange.headers)

    async def dump(self, exchange: Exchange) -> web.Response:
        """The raw replica."""
        return json_response(dump_document(await self._bridge.call(self._dump)), exchange.headers)

    async def task(self, exchange: Exchange) -> web.Response:
        """One task.

        Raises: ApiError (404).
        """
        document = await self._bridge.call(self._task, exchange.argument)
        if document is None:
            raise _no_task(exchange.argument)
        return json_response(document, exchange.headers)

    async def cancel(self, exchange: Exchange) -> web.Response:
        """Wish a task to end; harmless when repeated, and for one that has ended.

        Raises: ApiError (404).
        """
        status = await self._bridge.call(self._cancel, exchange.argument)
        if status is None:
            raise _no_task(exchange.argument)
        return json_response({"task_id": exchange.argument, "status": status}, exchange.headers)

    async def events(self, exchange: Exchange) -> web.StreamResponse:
        """The changes, until the client leaves."""
        headers = {**exchange.headers, **sse.HEADERS}
        if exchange.request.method == "HEAD":
            return web.Response(headers=headers)
        async with self._bridge.stream(self._changes, one_by_one) as stream:
            response = web.StreamResponse(headers=headers)
            try:
                await self._relay(exchange.request, response, stream)
            except TimeoutError:
                _log.info("a reader of events that took nothing for too long is cut off")
                if exchange.request.transport is not None:
                    exchange.request.transport.abort()
        return response

    async def _relay(self, request: web.BaseRequest, response: web.StreamResponse, stream: Stream[Paced, StateEvent]) -> None:
        """Raises: TimeoutError where the client takes nothing of what waits for it; ConnectionError where it has gone."""
        async with asyncio.timeout(self._settings.stalled_seconds):
            await response.prepare(request)
        ended = False
        while not ended:
            data, ended = await self._next(stream)
            async with asyncio.timeout(self._settings.stalled_seconds):
                await response.write(data)
            if data is not sse.COMMENT and not ended:
                self._bridge.to_trio(stream.head.room.release)
        await response.write_eof()

    async def _next(self, stream: Stream[Paced, StateEvent]) -> tuple[bytes, bool]:
        """The next bytes to send, and whether they are the last."""
        try:
            async with asyncio.timeout(self._settings.pulse_seconds):
                events = await stream.batch()
        except TimeoutError:
            return sse.COMMENT, False
        except BridgeClosed:
            return error_bytes(stopping()), True
        except Exception:  # noqa: BLE001 - whatever it was, the client hears of it
            _log.exception("a stream of events broke off")
            return error_bytes(internal()), True
        if events is None:
            return error_bytes(incomplete()), True
        return b"".join([event_bytes(event) for event in events]), False

    # The service is asked in its own trio run, never from asyncio's thread.

    async def _state(self) -> StateDocument:
        return self._service.state()

    async def _dump(self) -> ReplicaDump:
        return self._service.dump()

    async def _task(self, task_id: str) -> TaskDocument | None:
        return await self._service.task(task_id)

    async def _cancel(self, task_id: str) -> str | None:
        return await self._service.cancel(task_id)

    @asynccontextmanager
    async def _changes(self) -> AsyncIterator[Paced]:
        async with self._service.changes() as changes:
            yield Paced(changes, trio.Semaphore(1))


def _no_task(task_id: str) -> ApiError:
    shown = task_id[:TASK_ID_CHARACTERS_MAX]
    return ApiError(404, "task_not_found", f"There is no task {shown!r}; of one that has ended nothing is kept for long.")
