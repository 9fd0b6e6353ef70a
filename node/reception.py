"""Where requests for one instance wait until its runner takes them on.

Each waits in line (`node.waiting`) until it is its turn, goes to the runner, and has its first event: admitted, or failed for
what it is, or refused for want of room and back in line. Nobody polls: the line moves when the instance changes. Whoever
leaves, by an end, an error or a cancel, gives its place up in the same step.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import msgspec
import trio
from msgspec import Struct

from inference.requests import Event, Failed, Refused, Request
from node.local_runners import Down, LocalInstance, OnItsWay, Phase, Up
from node.service import NoRoute, QueueFull
from node.waiting import RETRY_SECONDS_MAX, Line, remaining_seconds

LOADING_SECONDS_MAX = 30.0  # how long a request waits for a model that is on its way; longer than a restart after a crash
CRASHES_MAX = 1  # how many runners may die over a request that nothing was said about yet, before it is told so


class Ticket(Struct, frozen=True):
    """One request in line: its task, and its life on trio's clock, in seconds."""

    task_id: str
    began: float
    seconds_max: float

    @property
    def deadline(self) -> float:
        """When its time is over."""
        return self.began + self.seconds_max

    def timed_out(self) -> Failed:
        """The end of a request whose time is over."""
        seconds = f"{self.seconds_max:g}"
        message = f"The request was not complete after {seconds} seconds, which is the longest that one may take here."
        return Failed(self.task_id, "timed_out", message)


class Started(Struct, frozen=True):
    """A request with its first event, and the rest to come (none after a Failed). `close` cancels it at the runner, from any
    task; the rest ends then.
    """

    first: Event
    rest: AsyncIterator[Event] | None
    close: Callable[[], Awaitable[None]]


class Seats(Struct):
    """The bound on all who wait at this node, over every line."""

    seats_max: int
    lines: list[Line]

    @property
    def taken(self) -> int:
        """How many wait."""
        return sum(line.waiting for line in self.lines)


class Reception:
    """The line before one instance."""

    def __init__(self, instance: LocalInstance, seats: Seats, retry_after: Callable[[], int]) -> None:
        self._instance = instance
        self._seats = seats
        self._retry_after = retry_after
        self._line = Line()
        self._bell = trio.Event()
        self._last_phase: Phase = instance.phase
        self._on_its_way_since = trio.current_time()
        self._closed: str | None = None
        seats.lines.append(self._line)
        instance.on_change.append(self._on_change)

    def __repr__(self) -> str:
        return f"Reception({self._instance!r}, {self._line!r})"

    def close(self, reason: str) -> None:
        """Send away all who wait, and whoever comes from now on; what was admitted goes on."""
        self._closed = reason
        self._ring()

    def _ring(self) -> None:
        self._bell.set()
        self._bell = trio.Event()

    def _on_change(self) -> None:
        phase, before = self._instance.phase, self._last_phase
        self._last_phase = phase
        if isinstance(phase, OnItsWay) and not isinstance(before, OnItsWay):
            self._on_its_way_since = trio.current_time()
        if opens(before, phase):
            self._line.openings += 1
            self._ring()
        elif type(phase) is not type(before):
            self._ring()

    @asynccontextmanager
    async def admit(self, ticket: Ticket, request: Request) -> AsyncIterator[Started]:
        """Wait for a place and start the request; leaving the block cancels what still runs.

        Raises: QueueFull, NoRoute.
        """
        async with AsyncExitStack() as running:
            with self._in_line(ticket.task_id):
                started = await self._start(ticket, request, running)
            yield started

    @contextmanager
    def _in_line(self, task_id: str) -> Iterator[None]:
        self._line.join(task_id)
        try:
            yield
        finally:
            self._line.leave(task_id)
            self._ring()

    async def _start(self, ticket: Ticket, request: Request, running: AsyncExitStack) -> Started:
        crashes = 0
        attempt_number = 0
        while await self._turn(ticket):
            attempt_number += 1
            attempt_request = msgspec.structs.replace(request, request_id=f"{ticket.task_id}.{attempt_number}")
            openings = self._line.begin_trial(ticket.task_id)
            supervisor = self._instance.supervisor
            assert supervisor is not None
            async with AsyncExitStack() as attempt:
                events = await attempt.enter_async_context(supervisor.generate(attempt_request))
                self._ring()  # it is in the runner's pipe: whoever is next comes after it there
                with trio.move_on_at(ticket.deadline):
                    first = await anext(events)
                    if isinstance(first, Refused) or (_is_crash(first) and crashes < CRASHES_MAX):
                        crashes += not isinstance(first, Refused)
                        self._line.refuse(ticket.task_id, openings)
                        continue
                    running.push_async_exit(attempt.pop_all())
                    return Started(first, None if isinstance(first, Failed) else events, running.aclose)
            break
        return Started(ticket.timed_out(), None, running.aclose)

    async def _turn(self, ticket: Ticket) -> bool:
        """Wait until the request may go to the runner; False when its time is over.

        Raises: QueueFull, NoRoute.
        """
        patience_ends = math.inf
        while True:
            if self._closed is not None:
                raise NoRoute(self._closed, RETRY_SECONDS_MAX)
            phase = self._instance.phase
            if isinstance(phase, Down):
                raise NoRoute(cannot_serve(self._instance.name, phase), RETRY_SECONDS_MAX)
            if isinstance(phase, OnItsWay):
                patience_ends = min(patience_ends, trio.current_time() + LOADING_SECONDS_MAX)
            elif self._line.may_try(ticket.task_id, phase.free):
                return True
            else:
                patience_ends = math.inf
            self._sit_down(ticket)
            with trio.move_on_at(min(ticket.deadline, patience_ends)) as patience:
                await self._bell.wait()
            if patience.cancelled_caught:
                if trio.current_time() >= ticket.deadline:
                    return False
                raise self._still_on_its_way()

    def _sit_down(self, ticket: Ticket) -> None:
        if self._line.seat(ticket.task_id) and self._seats.taken > self._seats.seats_max:
            waiting = self._seats.seats_max
            raise QueueFull(
                f"{waiting} requests wait at this node already, and that is all it lets wait." if waiting
                else "Every place at the runner is taken, and this node lets no request wait.",
                self._retry_after(),
            )  # fmt: skip

    def _still_on_its_way(self) -> NoRoute:
        phase = self._instance.phase
        assert isinstance(phase, OnItsWay)
        elapsed = trio.current_time() - self._on_its_way_since
        return NoRoute(
            f"The model {self._instance.name!r} is still {phase.text}.", remaining_seconds(elapsed, phase.done, phase.total)
        )


def opens(before: Phase, after: Phase) -> bool:
    """Whether a request that was refused before could be taken now."""
    if not isinstance(after, Up):
        return False
    return not isinstance(before, Up) or after.running < before.running or after.kv_bytes < before.kv_bytes


def cannot_serve(name: str, phase: Down) -> str:
    """One sentence for whoever asks for a model that is down."""
    return f"The model {name!r} can't be served: {phase.reason}"


def _is_crash(event: Event) -> bool:
    return isinstance(event, Failed) and event.code == "runner_crashed"
