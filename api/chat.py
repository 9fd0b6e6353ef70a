"""`POST /v1/chat/completions`: the IO around the pure translations of `api.openai`, `api.completion` and `api.sse`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from aiohttp import web
from msgspec import Struct

from api import sse
from api.body import BodyReader
from api.bridge import Bridge, BridgeClosed, Stream
from api.completion import Identity, WholeAnswer, finish_reason
from api.errors import incomplete, internal, invalid, of_failure, of_generate_error, stopping
from api.exchange import Exchange, json_response
from api.openai import ChatCall, parse_chat
from api.settings import ApiSettings, Draws
from inference.requests import Event, Failed, Finished, Tokens
from node.service import Answer, GenerateError, ServedModel, Service

_log = structlog.get_logger("api")


class Running(Struct, frozen=True):
    """An answer on its way, with what the response says of it."""

    answer: Answer
    identity: Identity
    headers: dict[str, str]


def events(running: Running) -> AsyncIterator[Event]:
    """The events of its answer."""
    return running.answer.events


class Chat:
    """Chat completions over one service."""

    def __init__(self, bridge: Bridge, service: Service, bodies: BodyReader, settings: ApiSettings, draws: Draws) -> None:
        self._bridge = bridge
        self._settings = settings
        self._draws = draws
        self._service = service
        self._bodies = bodies

    async def complete(self, exchange: Exchange) -> web.StreamResponse:
        """Answer one call, whole or as a stream; returns once the response was sent or its client has gone.

        Raises: ApiError for whatever goes wrong before the first byte.
        """
        body = await self._bodies.read(exchange.request)
        call = parse_chat(body, self._draws.identifier(), self._draws.seed)
        del body
        try:
            return await (self._stream(exchange, call) if call.stream else self._whole(exchange, call))
        except GenerateError as error:
            raise of_generate_error(error) from None
        except BridgeClosed:
            raise stopping() from None

    @asynccontextmanager
    async def _run(self, call: ChatCall) -> AsyncIterator[Running]:
        """trio: the call's answer."""
        models = self._service.models()
        if call.model is None and len({model.model_hash for model in models}) > 1:
            names = ", ".join(repr(model.name) for model in models)
            raise invalid(f"Several models are served here, name one of them: {names}.", "model", "model_required")
        async with self._service.generate(call.model, call.request) as answer:
            headers = {
                "x-shoal-task": answer.task_id,
                "x-shoal-accepted-by": self._service.node_id,
                "x-shoal-executed-by": answer.executed_by,
            }
            yield Running(answer, self._identity(call, models), headers)

    def _identity(self, call: ChatCall, models: tuple[ServedModel, ...]) -> Identity:
        served = next((model for model in models if call.model in {None, model.name}), None)
        return Identity(
            completion_id=f"chatcmpl-{call.request.request_id}",
            created=int(self._draws.now()),
            model=call.model or (served.name if served else ""),
            fingerprint=f"fp_{served.model_hash[:12]}" if served else None,
        )

    async def _whole(self, exchange: Exchange, call: ChatCall) -> web.StreamResponse:
        whole = WholeAnswer(call.logprobs)

        async def gather() -> Running:
            async with self._run(call) as running:
                async for event in events(running):
                    whole.add(event)
            return running

        running = await self._bridge.call(gather)
        exchange.headers.update(running.headers)
        return json_response(whole.body(running.identity), exchange.headers)

    async def _stream(self, exchange: Exchange, call: ChatCall) -> web.StreamResponse:
        async with self._bridge.stream(lambda: self._run(call), events) as stream:
            exchange.headers.update(stream.head.headers)
            encoder = sse.ChunkEncoder(stream.head.identity, include_usage=call.include_usage, logprobs=call.logprobs)
            return await _Relay(exchange, stream, encoder, self._settings).run()


class _Relay:
    """Takes one stream's events to its client.

    The response begins with the first token or the first pulse without one: what fails earlier has a status of its own.
    """

    def __init__(
        self, exchange: Exchange, stream: Stream[Running, Event], encoder: sse.ChunkEncoder, settings: ApiSettings
    ) -> None:
        self._request = exchange.request
        self._stream = stream
        self._encoder = encoder
        self._settings = settings
        self._response = web.StreamResponse(headers={**exchange.headers, **sse.HEADERS})
        self._quiet = True  # nothing was written since the last pulse
        self._is_due = False  # nor between the two before: something must be
        self._writing = False
        self._pulses_in_write = 0
        self._loop = asyncio.get_running_loop()
        self._pulse_handle = self._loop.call_later(settings.pulse_seconds, self._pulse)

    async def run(self) -> web.StreamResponse:
        """Until the end.

        Raises: ApiError and BridgeClosed before the first byte; ConnectionError where the client has gone.
        """
        try:
            events = await self._first_events()
            await self._response.prepare(self._request)
            data = self._encoder.opening() + self._encoder.encode(events)
            while True:
                await self._write(data)
                if self._encoder.ended:
                    break
                data = await self._more()
            self._writing = True
            await self._response.write_eof()
        finally:
            self._pulse_handle.cancel()
        return self._response

    async def _first_events(self) -> list[Event]:
        """The events to begin with; none where the client has waited long enough for a sign of life."""
        admitted = False
        while True:
            batch = await self._stream.batch()
            if batch is None:
                raise incomplete()
            visible: list[Event] = [event for event in batch if isinstance(event, Tokens | Finished | Failed)]
            if visible:
                _raise_failure(visible[0])
                return visible
            admitted = admitted or bool(batch)
            if admitted and self._is_due:
                return []

    async def _more(self) -> bytes:
        """The next bytes to send, whatever happens."""
        while True:
            try:
                batch = await self._stream.batch()
            except BridgeClosed:
                return self._encoder.broken(stopping())
            except Exception:  # noqa: BLE001 - whatever it was, the client hears of it
                _log.exception("an answer broke off")
                return self._encoder.broken(internal())
            if batch is None:
                return self._encoder.broken(incomplete())
            data = self._encoder.encode(batch)
            if data:
                return data
            if self._is_due:
                return sse.COMMENT

    async def _write(self, data: bytes) -> None:
        self._writing = True
        await self._response.write(data)
        self._writing = self._quiet = self._is_due = False
        self._pulses_in_write = 0

    def _pulse(self) -> None:
        """Every so often: ask for a sign of life where there was none, give up a client that takes nothing."""
        self._pulse_handle = self._loop.call_later(self._settings.pulse_seconds, self._pulse)
        if self._writing:
            self._pulses_in_write += 1
            if self._pulses_in_write * self._settings.pulse_seconds > self._settings.stalled_seconds:
                _log.info("a client that took nothing for too long is cut off")
                if self._request.transport is not None:
                    self._request.transport.abort()  # which cancels this response as if the client had left
            return
        self._is_due, self._quiet = self._quiet, True
        if self._is_due:
            self._stream.nudge()


def _raise_failure(event: Event) -> None:
    if isinstance(event, Failed):
        raise of_failure(event)
    if isinstance(event, Finished):
        finish_reason(event)
