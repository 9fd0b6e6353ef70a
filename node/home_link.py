"""A home's way to one head: the stream that it keeps there, and takes up again where that breaks.

    down ──▶ peer connected ──▶ stream opened ──▶ Resume ──▶ first Batch: up
      ▲                                                         │
      └── stream ended, refused, broken ◀───────────────────────┘

While it is down, each attempt waits GRACE_SECONDS for it and is then lost. A new boot of the head has none of them: they are
lost at once. Attempts that nobody reads any more are forgotten with the stream, since Resume gives up what it doesn't name.
"""

import math
from collections.abc import Callable

import trio
from msgspec import Struct

from inference.requests import Refused
from inference.supervisor import NO_ROOM
from node.home_outbox import HomeOutbox
from node.home_submission import Submission
from node.records import TaskId
from node.task_credit import Sent
from node.task_protocol import (
    GRACE_SECONDS,
    HOME_FRAME_BYTES_MAX,
    SUBMIT,
    TASKS_AT_HOME,
    TASKS_MAX,
    Batch,
    Resume,
    TaskMessage,
    request_id,
)
from p2p.ids import NodeId
from p2p.stream import Peer, Stream, TransportError
from p2p.transport import Transport
from p2p.wire import ProtocolViolation

RETRY_SECONDS_MIN = 0.05  # after a stream that did not come up; doubled each time
RETRY_SECONDS_MAX = 1.0
TRANSFERS_MAX = 2  # large submissions to one head at once, as many as it takes
TRANSFER_SECONDS = 60.0
CANCEL_SECONDS_MAX = 6.0  # for the head to give a place back; it has bounds of its own, and this one is above them

UNREACHABLE = "its node can't be reached"
RESTARTED = "its node was started anew"
UNKNOWN = "its node does not have it any more"
RUDE = "its node broke the protocol"


class Counters(Struct):
    """How it went with heads elsewhere, since the start."""

    submitted: int = 0
    lost: int = 0
    resumed: int = 0  # attempts that outlived their stream
    late: int = 0  # events of attempts that nobody waited for any more
    violations: int = 0


class HomeLink:
    """See the module. `run` is its life."""

    def __init__(
        self,
        node_id: NodeId,
        boot: int,
        transport: Transport,
        counters: Counters,
        on_pull: Callable[[NodeId, int, int], None],
    ) -> None:
        self.node_id = node_id
        self._boot = boot  # this home's
        self._transport = transport
        self._counters = counters
        self._on_pull = on_pull
        self._attempts: dict[str, Submission] = {}  # by request id: those that the head may still say something of
        self._outbox = HomeOutbox()
        self._open: Peer | None = None  # the head, while there is a stream to it
        self._down_since: float | None = trio.current_time()
        self._more = trio.lowlevel.ParkingLot()  # to be said
        self._stirred = trio.Event()  # replaced at each change of what `_watch` looks at
        self._transfers = trio.CapacityLimiter(TRANSFERS_MAX)

    def __repr__(self) -> str:
        state = "up" if self._down_since is None else f"down since {self._down_since:.3f}"
        return f"HomeLink({self.node_id[-8:]}, {state}, {len(self._attempts)} attempts)"

    @property
    def needed(self) -> bool:
        """Whether there is anything to say or hear."""
        return bool(self._attempts) or bool(self._outbox.levels)

    @property
    def full(self) -> bool:
        """Whether as many attempts are there as a head takes of one home."""
        return len(self._attempts) >= TASKS_MAX

    # What the home does.

    def add(self, attempt: Submission) -> None:
        """Send an attempt as soon as may be."""
        self._counters.submitted += 1
        self._attempts[attempt.submit.request.request_id] = attempt
        self._outbox.submit(attempt)
        self._more.unpark()
        self._stir()

    async def leave(self, attempt: Submission) -> None:
        """Nobody reads an attempt any more: have it ended, and wait, within a bound, until its place is free."""
        attempt.close()
        if attempt.sent_to is not None and self._open is not None and not attempt.over.is_set():
            self._outbox.cancel(attempt)
            self._more.unpark()
            with trio.move_on_after(CANCEL_SECONDS_MAX, shield=True):
                await attempt.over.wait()
        self._drop(attempt)

    def set_level(self, model_hash: str, count: int, since: float) -> None:
        """So many requests of a model are in line."""
        if self._outbox.set_level(model_hash, count, since):
            self._more.unpark()

    def owe(self, attempt: Submission) -> None:
        """The client has taken so much that the head should hear of it."""
        self._outbox.owe(attempt)
        self._more.unpark()

    def _drop(self, attempt: Submission) -> None:
        self._attempts.pop(attempt.submit.request.request_id, None)
        self._outbox.withdraw(attempt)
        attempt.over.set()

    def _lose(self, attempt: Submission, why: str) -> None:
        self._counters.lost += not attempt.closed
        attempt.lose(why)
        self._drop(attempt)

    # Up and down.

    def _stir(self) -> None:
        self._stirred.set()
        self._stirred = trio.Event()

    async def run(self, on_end: Callable[[], None]) -> None:
        """Keep a stream as long as the head is connected or there is a need; `on_end` is called when neither is so."""
        failures = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            while True:
                revision = self._transport.revision
                peer = self._transport.peers.get(self.node_id)
                if not self.needed and (peer is None or failures):
                    on_end()
                    break
                if peer is None:
                    await self._transport.wait_past(revision)
                    continue
                self._look_at_boot(peer)
                failures = 0 if await self._came_up() else failures + 1
                if failures:
                    await trio.sleep(min(RETRY_SECONDS_MAX, RETRY_SECONDS_MIN * 2.0 ** min(failures, 10)))
            nursery.cancel_scope.cancel()

    async def _came_up(self) -> bool:
        """One stream, from its opening to its end; whether the head answered on it."""
        answered = False
        try:
            async with await self._transport.open(self.node_id, TASKS_AT_HOME) as stream:
                await self._talk(stream)
        except* TransportError:
            pass
        except* ProtocolViolation:
            self._counters.violations += 1
            for attempt in list(self._attempts.values()):
                self._lose(attempt, RUDE)
        finally:
            self._open = None
            answered = self._down_since is None
            if answered:
                self._down_since = trio.current_time()
            for attempt in [attempt for attempt in self._attempts.values() if attempt.closed]:
                self._drop(attempt)
            self._stir()
        return answered

    async def _talk(self, stream: Stream[TaskMessage]) -> None:
        self._look_at_boot(stream.peer)
        self._open = stream.peer
        await stream.send(self._resume())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._say, stream, nursery)
            async for message in stream:
                assert isinstance(message, Batch)
                if self._down_since is not None:
                    self._down_since = None
                    self._stir()
                self._hear(message)
            nursery.cancel_scope.cancel()

    def _look_at_boot(self, peer: Peer) -> None:
        """Another boot of the head has nothing of what was sent to the one before."""
        for attempt in list(self._attempts.values()):
            if attempt.sent_to not in {None, peer.boot}:
                self._lose(attempt, RESTARTED)

    def _resume(self) -> Resume:
        self._outbox.resumed()
        known = [attempt for attempt in self._attempts.values() if attempt.sent_to is not None and not attempt.closed]
        self._counters.resumed += len(known)
        return Resume(tuple(attempt.held() for attempt in known))

    async def _watch(self) -> None:
        """Give up what has waited too long for a stream."""
        while True:
            stirred, due, now = self._stirred, math.inf, trio.current_time()
            if self._down_since is not None:
                for attempt in list(self._attempts.values()):
                    until = max(attempt.since, self._down_since) + GRACE_SECONDS
                    if until > now:
                        due = min(due, until)
                        continue
                    if attempt.sent_to is not None:  # should the head be about to answer after all
                        self._outbox.cancel(attempt)
                    self._lose(attempt, UNREACHABLE)
            with trio.move_on_at(due):
                await stirred.wait()

    # What is said and heard.

    async def _say(self, stream: Stream[TaskMessage], nursery: trio.Nursery) -> None:
        while True:
            message = self._outbox.next(trio.current_time())
            if message is None:
                await self._more.park()
            elif not isinstance(message, Submission):
                await stream.send(message)
            else:
                message.sent_to = stream.peer.boot
                if message.frame_bytes <= HOME_FRAME_BYTES_MAX:
                    await stream.send(message.submit)
                else:
                    nursery.start_soon(self._transfer, message)

    async def _transfer(self, attempt: Submission) -> None:
        """Send a large attempt on a stream of its own, beside those that run."""
        arrived = False
        with trio.CancelScope() as attempt.transfer:
            async with self._transfers:
                with trio.move_on_after(TRANSFER_SECONDS):
                    try:
                        async with await self._transport.open(self.node_id, SUBMIT) as stream:
                            await stream.send(attempt.submit)
                            await stream.close_send()
                            async for _ in stream:
                                pass
                        arrived = True
                    except (TransportError, ProtocolViolation):
                        pass
        attempt.transfer = None
        if not arrived and attempt.silent and not attempt.closed:
            # It was not taken. Should all of it have come in nevertheless, the cancel keeps it from running there.
            self._outbox.cancel(attempt)
            self._more.unpark()
            attempt.hear(Sent(0, Refused(attempt.submit.request.request_id, 0, NO_ROOM)))
            self._drop(attempt)

    def _hear(self, batch: Batch) -> None:
        """Take in a frame. Raises: ProtocolViolation."""
        attempts = self._attempts
        for sent in batch.events:
            attempt = attempts.get(sent.event.request_id)
            if attempt is None:
                self._counters.late += 1
            elif attempt.hear(sent):
                del attempts[sent.event.request_id]
                self.owe(attempt)
        for key in batch.gone:
            attempt = attempts.get(request_id(TaskId(self._boot, key.number), key.attempt))
            if attempt is not None:
                self._lose(attempt, UNKNOWN)
        for pull in batch.pulls:
            self._on_pull(self.node_id, pull.instance_id, pull.free)
