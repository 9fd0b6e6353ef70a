"""One attempt at the head of its instance, from its submission until its home has taken all of it or it was given up."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio

from inference.requests import END_EVENTS, Accepted, Event, Load, Request
from node.records import TaskId
from node.task_credit import Outlet, Sent, pieces
from node.task_protocol import GRACE_SECONDS_HEAD, Submit, Try
from p2p.ids import NodeId

LATE_SECONDS = 5.0  # after its home should have given it up, the head does by itself


class LocalExecutor(Protocol):
    """An instance whose head this node is."""

    @property
    def model_hash(self) -> str:
        """Of the model that it runs."""

    @property
    def epoch(self) -> int:
        """Of its group."""

    @property
    def load(self) -> Load:
        """What it has taken on; `NO_ROOM` while it takes nothing."""

    def generate(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """As `inference.supervisor.Supervisor.generate`."""


class Notes(Protocol):
    """Who is told how an attempt goes."""

    def answered(self, task: "HeadTask") -> None:
        """The runner has said yes or no; see `HeadTask.accepted`."""

    def ended(self, task: "HeadTask", end: Event | None) -> None:
        """An accepted one has given its place back; with no end it was cancelled."""


class HeadTask:
    """See the module. `run` is its life; the other calls are its home's."""

    def __init__(self, home: NodeId, task_id: TaskId, submit: Submit, prompt_bytes: int, say: Callable[[Sent], None]) -> None:
        self.home = home
        self.task_id = task_id
        self.instance_id = submit.instance_id
        self.attempt = submit.attempt
        self.version = submit.version  # how far the home's records were when it was submitted
        self.prompt_bytes = prompt_bytes
        self.answered = False  # the runner has said yes or no
        self.accepted = False
        self.free = trio.Event()  # it holds no place at the runner
        self.outlet = Outlet(submit.window)
        self._request = submit.request
        self._say = say
        self._cancelled = False
        self._deadline = trio.current_time() + submit.seconds_left + LATE_SECONDS
        self._scope = trio.CancelScope(deadline=self._deadline)
        self._more = trio.lowlevel.ParkingLot()  # for credit

    def __repr__(self) -> str:
        return f"HeadTask({self._request.request_id}, {self.outlet.kept_bytes} bytes kept)"

    @property
    def key(self) -> Try:
        """How its home names it."""
        return Try(self.task_id.number, self.attempt)

    @property
    def running(self) -> bool:
        """Whether it holds a place at the runner and nobody has asked for its end."""
        return self.accepted and not self._cancelled and not self.free.is_set()

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self._cancelled = True
        self._scope.cancel()

    def give_grace(self) -> None:
        """Its home's stream has ended: it is given up unless the home comes back in time."""
        self._scope.deadline = min(self._deadline, trio.current_time() + GRACE_SECONDS_HEAD)

    def credit(self, taken: int) -> None:
        """Its client has taken so many events. Raises: ProtocolViolation."""
        self.outlet.credit(taken)
        self._more.unpark_all()

    def resume(self, heard: int, taken: int) -> list[Sent]:
        """Its home is back: what it lacks. Raises: ProtocolViolation."""
        self._scope.deadline = self._deadline
        lacking = self.outlet.resume(heard, taken)
        self._more.unpark_all()
        return lacking

    async def run(self, executor: LocalExecutor, before: "HeadTask | None", notes: Notes) -> None:
        """Run it, after the attempt `before` has given its place back."""
        try:
            if before is not None:
                with trio.CancelScope(shield=True):  # bounded by the runner's bound on a cancelled request
                    await before.free.wait()
            with self._scope:
                await trio.lowlevel.checkpoint_if_cancelled()  # one that was given up meanwhile does not begin
                if await self._relay(executor, notes):
                    self.free.set()
                    while not self.outlet.done:
                        await self._more.park()
        finally:
            self.free.set()

    async def _relay(self, executor: LocalExecutor, notes: Notes) -> bool:
        """Pass on what the runner says; whether that was an answer with an end."""
        outlet, say = self.outlet, self._say
        end: Event | None = None
        try:
            async with executor.generate(self._request) as events:
                async for event in events:
                    if not self.answered:
                        self.answered = True
                        self.accepted = isinstance(event, Accepted)
                        notes.answered(self)
                    for piece in pieces(event):
                        while not outlet.room:
                            await self._more.park()
                        say(outlet.put(piece))
                    if isinstance(event, END_EVENTS):
                        end = event
                        break
        finally:
            if self.accepted:
                notes.ended(self, end)
        return end is not None
