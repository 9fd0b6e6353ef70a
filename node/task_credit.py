"""How the events of one attempt cross a stream that may break at any moment: each once, in order, never too many ahead.

The head keeps what it has said until the home's client has taken it (`Outlet`), the home keeps what the client has not taken
yet (`Inlet`). A window bounds both, in bytes as `weight` counts them alike at both ends: the head says no more while as much
is kept. So a client that reads slowly holds up its own task alone, and a stream that broke goes on where the home stands.

Events are numbered from 0 within an attempt. Pure.
"""

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from inference.requests import END_EVENTS, Event, Tokens
from p2p.wire import ProtocolViolation

EVENT_BYTES = 64  # of any event, beside its text and tokens
TOKEN_BYTES = 5
LOGPROB_BYTES = 24
# About 400 plain events. Credit comes back for half of it at a time: 2,000 tokens/s get through where a round trip takes 0.1 s.
WINDOW_BYTES = 32 << 10
WINDOW_BYTES_MAX = 128 << 10
PIECE_TOKENS_MAX = 256  # of one event: what a lagging reader finds put together is cut up again


class Sent(Struct, frozen=True, array_like=True, gc=False):
    """An event with its number."""

    index: int
    event: Event


def weight(event: Event) -> int:
    """What an event counts for in a window: about its bytes, but for the prompt's ids, which its home brought about itself."""
    if type(event) is Tokens:
        size = EVENT_BYTES + len(event.text) + TOKEN_BYTES * len(event.token_ids)
        for logprob in event.logprobs:
            size += LOGPROB_BYTES * (1 + len(logprob.top))
        return size
    return EVENT_BYTES


def pieces(event: Event) -> Sequence[Event]:
    """The same event in pieces that hold up nobody else for long.

    The text goes with the last piece: text may come after its tokens, never before, or an attempt that goes on from there
    would not know of tokens whose text was given out.
    """
    if type(event) is not Tokens or len(event.token_ids) <= PIECE_TOKENS_MAX:
        return (event,)
    starts = range(0, len(event.token_ids), PIECE_TOKENS_MAX)
    return [
        Tokens(
            event.request_id,
            event.token_ids[start : start + PIECE_TOKENS_MAX],
            event.text if start == starts[-1] else "",
            event.logprobs[start : start + PIECE_TOKENS_MAX],
        )
        for start in starts
    ]


class Outlet:
    """The head's end: what was said and not yet taken."""

    __slots__ = ("_end_put", "_kept", "_kept_bytes", "_taken", "_window")

    def __init__(self, window: int) -> None:
        self._window = window
        self._taken = 0
        self._kept: deque[tuple[Event, int]] = deque()
        self._kept_bytes = 0
        self._end_put = False

    @property
    def room(self) -> bool:
        """Whether one more event may be said."""
        return self._kept_bytes < self._window

    @property
    def kept_bytes(self) -> int:
        """What is kept."""
        return self._kept_bytes

    @property
    def done(self) -> bool:
        """Whether all was said and taken."""
        return self._end_put and not self._kept

    def put(self, event: Event) -> Sent:
        """Say an event; there must be room, and the end not said yet."""
        assert not self._end_put, "nothing follows the end"
        size = weight(event)
        sent = Sent(self._taken + len(self._kept), event)
        self._kept.append((event, size))
        self._kept_bytes += size
        self._end_put = isinstance(event, END_EVENTS)
        return sent

    def credit(self, taken: int) -> None:
        """The first `taken` events were taken; a number that was told before says nothing new.

        Raises: ProtocolViolation where fewer were said.
        """
        if taken > self._taken + len(self._kept):
            raise ProtocolViolation(f"{taken} events were taken of {self._taken + len(self._kept)}")
        while self._taken < taken:
            self._kept_bytes -= self._kept.popleft()[1]
            self._taken += 1

    def resume(self, heard: int, taken: int) -> list[Sent]:
        """What to say again on a new stream: whatever comes after the `heard` events that the home has.

        Raises: ProtocolViolation where these are fewer than were taken, or more than were said.
        """
        if not max(taken, self._taken) <= heard <= self._taken + len(self._kept):
            raise ProtocolViolation(f"{heard} events were heard of {self._taken + len(self._kept)}, {self._taken} taken")
        self.credit(taken)
        skipped = heard - self._taken
        return [Sent(self._taken + place, event) for place, (event, _) in enumerate(self._kept) if place >= skipped]


class Inlet:
    """The home's end: what was heard and not yet taken by the client."""

    __slots__ = ("_heard_bytes", "_owed_bytes", "_queue", "_window", "ended", "heard", "taken")

    def __init__(self, window: int) -> None:
        self.heard = 0
        self.taken = 0
        self.ended = False  # the end event was heard
        self._window = window
        self._queue: deque[tuple[Event, int]] = deque()
        self._heard_bytes = 0  # in the queue
        self._owed_bytes = 0  # taken, and not told to the head yet

    def __len__(self) -> int:
        return len(self._queue)

    def hear(self, sent: Sent) -> None:
        """Take in what the head says.

        Raises: ProtocolViolation where it is not the next event, comes after the end, or has no room.
        """
        if sent.index != self.heard or self.ended:
            raise ProtocolViolation(f"event {sent.index} after {self.heard} events" + (", the end among them" * self.ended))
        if self._heard_bytes >= self._window:
            raise ProtocolViolation("events without credit")
        event = sent.event
        size = weight(event)
        self._queue.append((event, size))
        self._heard_bytes += size
        self.heard += 1
        self.ended = isinstance(event, END_EVENTS)

    def take(self) -> Event:
        """The next event for the client; there must be one."""
        event, size = self._queue.popleft()
        self._heard_bytes -= size
        self._owed_bytes += size
        self.taken += 1
        return event

    @property
    def owes_credit(self) -> bool:
        """Whether so much was taken that the head should hear of it: before it has to wait, and not for every event."""
        return 2 * self._owed_bytes >= self._window and not self.ended

    def credit(self) -> int:
        """How many events the head is now told were taken. With the end here all are: nothing of them is needed again."""
        self._owed_bytes = 0
        return self.heard if self.ended else self.taken
