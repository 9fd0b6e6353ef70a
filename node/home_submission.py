"""One attempt at a head elsewhere, as its home reads it."""

from collections.abc import Callable
from typing import Self

import trio

from inference.requests import Event
from node.task_credit import Inlet, Sent
from node.task_protocol import Held, Submit, Taken, Try


class HeadLost(Exception):
    """The head of an instance is gone, or knows nothing of the attempt; `str()` completes "it was lost, because ..."."""


class Submission:
    """An async iterator over the attempt's events; raises HeadLost after the last of those that came, if no end is among them.

    Closed while somebody waits for an event, it ends that iteration.
    """

    def __init__(self, submit: Submit, frame_bytes: int, owe: Callable[["Submission"], None]) -> None:
        self.submit = submit
        self.frame_bytes = frame_bytes
        self.key = Try(submit.number, submit.attempt)
        self.since = trio.current_time()
        self.sent_to: bytes | None = None  # the boot of the head that was told of it
        self.transfer: trio.CancelScope | None = None  # while it goes over on a stream of its own
        self.closed = False  # nobody reads it any more
        self.over = trio.Event()  # the head says no more of it
        self._inlet = Inlet(submit.window)
        self._owe = owe
        self._lost: str | None = None
        self._ended = False  # the reader has had the end
        self._readers = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"Submission({self.submit.request.request_id}, {self._inlet.heard} heard, {self._inlet.taken} taken)"

    @property
    def silent(self) -> bool:
        """Whether nothing was heard of it yet."""
        return self._inlet.heard == 0 and not self.over.is_set()

    # What the link to the head does.

    def hear(self, sent: Sent) -> bool:
        """Take an event in; whether it was the end. Raises: ProtocolViolation."""
        self._inlet.hear(sent)
        self._readers.unpark()
        if self._inlet.ended:
            self.over.set()
        return self._inlet.ended

    def lose(self, why: str) -> None:
        """Nothing more will come."""
        if not self.over.is_set():
            self._lost = why
            self.over.set()
            self._readers.unpark_all()

    def close(self) -> None:
        """Nobody reads it any more."""
        self.closed = True
        if self.transfer is not None:
            self.transfer.cancel()
        self._readers.unpark_all()

    def held(self) -> Held:
        """How far it is, for a head that it is taken up at again; what was taken is told with it."""
        taken = self._inlet.credit()
        return Held(self.key.number, self.key.attempt, self._inlet.heard, taken)

    def credit(self) -> Taken:
        """What the head is told next."""
        return Taken(self.key.number, self.key.attempt, self._inlet.credit())

    # What its reader does.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        inlet = self._inlet
        if inlet:
            await trio.lowlevel.checkpoint_if_cancelled()
        while not inlet or self.closed:
            if self.closed or self._ended:
                raise StopAsyncIteration
            if self._lost is not None:
                raise HeadLost(self._lost)
            await self._readers.park()
        event = inlet.take()
        if inlet.owes_credit:
            self._owe(self)
        self._ended = inlet.ended and not inlet
        return event
