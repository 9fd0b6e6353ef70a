"""The node: takes requests from any door, finds the instance for each, and follows it to its end."""

import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Self

import structlog
import trio
from msgspec import Struct

from inference.requests import END_EVENTS, Event, Failed, Finished, Request
from node.config import Config
from node.local_runners import Down, LocalInstance, LocalRunners, OnItsWay, Up
from node.names import ServedName, Unknown, resolve
from node.reception import Reception, Seats, Started, Ticket, cannot_serve
from node.service import Answer, ModelNotFound, NoRoute, ServedModel
from node.waiting import RETRY_SECONDS_MAX, retry_seconds

DURATIONS_MAX = 32  # of the requests that ended last; what Retry-After is worked out from

STOPPING = "This node is stopping."
NO_MODEL = "No model runs on this node: start it with --model MODEL."

_log = structlog.get_logger("tasks")


class NodeSettings(Struct, frozen=True, kw_only=True):
    """What of the configuration concerns requests."""

    aliases: dict[str, str]  # alias: model
    waiting_max: int
    task_timeout_seconds: float

    @classmethod
    def of(cls, config: Config) -> "NodeSettings":
        """As configured."""
        return cls(
            aliases=dict(config.aliases),
            waiting_max=config.max_waiting,
            task_timeout_seconds=config.task_timeout_seconds,
        )


class _Events:
    """A request's events to the end. Where the runner's stream breaks off before one, the request's time was over."""

    def __init__(self, ticket: Ticket, started: Started) -> None:
        self.end: Finished | Failed | None = None
        self._ticket = ticket
        self._first: Event | None = started.first
        self._rest = started.rest

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self.end is not None:
            raise StopAsyncIteration
        if self._first is not None:
            event, self._first = self._first, None
        else:
            assert self._rest is not None
            try:
                event = await anext(self._rest)
            except StopAsyncIteration:
                event = self._ticket.timed_out()
        if isinstance(event, END_EVENTS):
            assert isinstance(event, Finished | Failed), "a refusal never leaves the reception"
            self.end = event
        return event


class _Answer(Struct):
    """See `node.service.Answer`."""

    task_id: str
    executed_by: str
    events: AsyncIterator[Event]


class Node:
    """The service that this device offers; see `node.service.Service`. Made in trio."""

    def __init__(
        self,
        node_id: str,
        name: str,
        settings: NodeSettings,
        runners: LocalRunners,
        nursery: trio.Nursery,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.node_id = node_id
        self.name = name
        self._settings = settings
        self._runners = runners
        self._nursery = nursery  # for what watches over requests; cancelled with the node
        self._wall_clock = wall_clock
        self._seats = Seats(settings.waiting_max, [])
        self._receptions: dict[str, Reception] = {}
        self._in_flight: dict[str, float] = {}  # task id: its start on trio's clock
        self._durations: deque[float] = deque(maxlen=DURATIONS_MAX)
        self._none_in_flight = trio.Event()
        self._draining = False

    def run_model(self, model: str) -> LocalInstance:
        """Have a model run here; requests for it wait from now on."""
        instance_id = uuid.uuid4().hex
        instance = self._runners.start(instance_id, model, self._wall_clock())
        self._receptions[instance_id] = Reception(instance, self._seats, self._retry_after)
        return instance

    def models(self) -> tuple[ServedModel, ...]:
        """The models that can be asked for here, under their names and aliases; those whose files are not here yet are not."""
        served = []
        for instance in self._instances():
            if instance.model is None:
                continue
            names = [instance.name, *(alias for alias in self._settings.aliases if self._named(alias) == instance.name)]
            for name in dict.fromkeys(names):
                model_hash, created = instance.model.model_hash, int(instance.created)
                served.append(ServedModel(name=name, model_hash=model_hash, created=created, context=instance.context))
        return tuple(served)

    def not_ready(self) -> str | None:
        """None once a model can be served from here, else one sentence why not."""
        if self._draining:
            return STOPPING
        phases = {instance.name: instance.phase for instance in self._runners.instances.values()}
        if any(isinstance(phase, Up) for phase in phases.values()):
            return None
        for name, phase in phases.items():
            if isinstance(phase, OnItsWay):
                return f"The model {name!r} is {phase.text}."
        for name, phase in phases.items():
            if isinstance(phase, Down):
                return cannot_serve(name, phase)
        return NO_MODEL

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        return len(self._in_flight)

    def _instances(self) -> list[LocalInstance]:
        """Those that serve or will."""
        return [instance for instance in self._runners.instances.values() if not isinstance(instance.phase, Down)]

    def _named(self, model: str | None) -> str | Unknown:
        served = [ServedName(instance.name, (instance.asked,)) for instance in self._runners.instances.values()]
        return resolve(model, served, self._settings.aliases)

    def _instance(self, model: str | None) -> LocalInstance:
        """The instance that is meant.

        Raises: ModelNotFound, NoRoute.
        """
        if not self._runners.instances:
            raise NoRoute(NO_MODEL, RETRY_SECONDS_MAX)
        name = self._named(model)
        if isinstance(name, Unknown):
            raise ModelNotFound(name.message)
        meant = [instance for instance in self._runners.instances.values() if instance.name == name]
        return next((instance for instance in meant if not isinstance(instance.phase, Down)), meant[0])

    @asynccontextmanager
    async def generate(self, model: str | None, request: Request) -> AsyncIterator[Answer]:
        """Wait for a place, start the request and yield its answer; leaving the block cancels what still runs.

        A request whose time is over before it was admitted gets a Failed `timed_out` as its only event.

        Raises: GenerateError, before anything was started.
        """
        if self._draining:
            raise NoRoute(STOPPING, RETRY_SECONDS_MAX)
        reception = self._receptions[self._instance(model).instance_id]
        ticket = Ticket(uuid.uuid4().hex, trio.current_time(), self._settings.task_timeout_seconds)
        with self._counted(ticket.task_id):
            async with reception.admit(ticket, request) as started:
                events = _Events(ticket, started)
                with self._watched(ticket, started):
                    try:
                        yield _Answer(ticket.task_id, self.node_id, events)
                    finally:
                        self._log_end(ticket.task_id, events.end)

    @contextmanager
    def _watched(self, ticket: Ticket, started: Started) -> Iterator[None]:
        """End the request at its deadline. A cancel scope around each wait for an event would cost more than the event."""
        watch = trio.CancelScope()

        async def expire() -> None:
            with watch:
                await trio.sleep_until(ticket.deadline)
                await started.close()

        self._nursery.start_soon(expire)
        try:
            yield
        finally:
            watch.cancel()

    @contextmanager
    def _counted(self, task_id: str) -> Iterator[None]:
        self._in_flight[task_id] = started = trio.current_time()
        try:
            yield
        finally:
            del self._in_flight[task_id]
            self._durations.append(trio.current_time() - started)
            if not self._in_flight:
                self._none_in_flight.set()

    def _log_end(self, task_id: str, end: Finished | Failed | None) -> None:
        match end:
            case Finished(reason=reason, usage=usage):
                _log.debug("task ended", task=task_id, reason=reason, tokens=usage.completion_tokens)
            case Failed(code=code):  # its message may quote the prompt
                _log.info("task failed", task=task_id, code=code)
            case None:
                _log.debug("task cancelled", task=task_id)

    def _retry_after(self) -> int:
        """Seconds after which a request that was turned away may find a seat."""
        now = trio.current_time()
        durations = list(self._durations) or [now - started for started in self._in_flight.values()]
        running = len(self._in_flight) - self._seats.taken
        return retry_seconds(durations, running, self._seats.taken)

    async def drain(self) -> None:
        """Refuse new work and send away what waits; returns once nothing runs any more."""
        self._draining = True
        for reception in self._receptions.values():
            reception.close(STOPPING)
        while self._in_flight:
            self._none_in_flight = trio.Event()
            await self._none_in_flight.wait()
