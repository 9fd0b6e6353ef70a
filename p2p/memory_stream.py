"""Links, connections and streams of bytes in one process; see `memory_transport`."""

import math
import random
from collections import deque
from collections.abc import Callable

import trio

from p2p.stream import Peer, StreamBroken
from p2p.transport import ProtocolRefused

WINDOW_BYTES = 256 * 1024  # what a stream's sender may be ahead of its reader

Arrive = Callable[[], None]


class Link:
    """One way from one node to another; what of it can be set is its latency and whether it is cut."""

    def __init__(self) -> None:
        self.latency = 0.0  # seconds
        self.jitter = 0.0  # seconds, up to which is added to each
        self._whole = trio.Event()
        self._whole.set()

    @property
    def cut(self) -> bool:
        """Whether nothing gets through for now."""
        return not self._whole.is_set()

    @cut.setter
    def cut(self, value: bool) -> None:
        if value and self._whole.is_set():
            self._whole = trio.Event()
        elif not value:
            self._whole.set()

    async def wait_whole(self) -> None:
        """Return once the link is not cut."""
        while self.cut:
            await self._whole.wait()


class Wire:
    """What is on its way over a link, in order."""

    def __init__(self, link: Link, randomness: random.Random) -> None:
        self._link = link
        self._random = randomness
        self._things: deque[tuple[float, Arrive]] = deque()
        self._last_due = -math.inf
        self._filled = trio.Event()
        self._closed = False

    def put(self, arrive: Arrive) -> None:
        """Have `arrive` called at the other end after the link's latency, and after what was put before."""
        if self._closed:
            return
        due = trio.current_time() + self._link.latency + self._random.uniform(0, self._link.jitter)
        self._last_due = max(due, self._last_due)
        self._things.append((self._last_due, arrive))
        self._filled.set()

    def close(self, arrive: Arrive | None) -> None:
        """Take no more; `arrive` is the last to go, if given, after what is on its way."""
        if arrive is not None:
            self.put(arrive)
        self._closed = True
        self._filled.set()

    async def run(self) -> None:
        """Deliver until closed."""
        while self._things or not self._closed:
            if not self._things:
                self._filled = trio.Event()
                await self._filled.wait()
                continue
            await trio.sleep_until(self._things[0][0])
            await self._link.wait_whole()
            now = trio.current_time()
            while self._things and self._things[0][0] <= now:
                self._things.popleft()[1]()


class End:
    """One end of a connection. `put` sends something to the other end, `shut` ends the sending; both are the wire's."""

    far: "End"
    owner_lost: Callable[[str], None]
    owner_asked: "Callable[[str, MemoryBytes], bool]"

    def __init__(self, peer: Peer, put: Callable[[Arrive], None], shut: Callable[[Arrive | None], None]) -> None:
        self.peer = peer
        self.inbound = 0
        self.lost_because = ""
        self.put = put
        self._shut = shut
        self._streams: set[MemoryBytes] = set()

    def lose(self, why: str, last: Arrive | None) -> None:
        """Every stream breaks here; `last` still arrives at the other end."""
        self.lost_because = why
        self._shut(last)
        for stream in self._streams:
            stream.wake()
        self._streams.clear()

    def add(self) -> "MemoryBytes":
        """A new stream's end here."""
        stream = MemoryBytes(self)
        self._streams.add(stream)
        return stream

    def remove(self, stream: "MemoryBytes") -> None:
        """The stream is over at this end."""
        self._streams.discard(stream)

    async def open(self, protocol: str) -> "MemoryBytes":
        """A stream that the other end serves.

        Raises: ProtocolRefused; StreamBroken.
        """
        stream = self.add()
        answers: list[bool] = []
        self.put(lambda: self.far.asked(protocol, stream, answers))
        opened = False
        try:
            while not answers:
                if self.lost_because:
                    raise StreamBroken(f"the stream broke: {self.lost_because}")
                await stream.wait()
            if not answers[0]:
                raise ProtocolRefused(f"the peer does not serve {protocol}")
            opened = True
        finally:
            if not opened:
                stream.reset()
        return stream

    async def answers(self, seconds: float) -> bool:
        """Whether the other end answers within so long."""
        answered = trio.Event()
        self.put(lambda: self.far.put(answered.set))
        with trio.move_on_after(seconds):
            await answered.wait()
        return answered.is_set() and not self.lost_because

    def asked(self, protocol: str, theirs: "MemoryBytes", answers: list[bool]) -> None:
        """The other end opens a stream; the answer goes back."""
        if self.lost_because:
            return
        ours = self.add()
        ours.twin, theirs.twin = theirs, ours
        served = self.owner_asked(protocol, ours)
        if not served:
            self.remove(ours)

        def answer() -> None:
            answers.append(served)
            theirs.wake()

        self.put(answer)


class MemoryBytes:
    """One end of a stream as a `p2p.stream.ByteStream`."""

    def __init__(self, end: End) -> None:
        self.written = 0
        self.twin: MemoryBytes | None = None
        self._end = end
        self._arrived = bytearray()
        self._ahead = 0  # bytes written that the other end has not read
        self._finished = self._their_end = self._reset_here = self._reset_there = False
        self._changed = trio.Event()

    @property
    def broken_because(self) -> str:
        """Why the stream ended, if it has."""
        return self._end.lost_because or ("reset at this end" if self._reset_here else "reset by the peer")

    @property
    def _broken(self) -> bool:
        return bool(self._end.lost_because) or self._reset_here or self._reset_there

    def wake(self) -> None:
        """Have whoever waits look again."""
        self._changed.set()
        self._changed = trio.Event()

    async def wait(self) -> None:
        """Return once something changed."""
        await self._changed.wait()

    async def write(self, data: bytes) -> None:
        """Hand all of it over.

        Raises: StreamBroken.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        start = 0
        while start < len(data):
            if self._broken or self._finished:
                raise StreamBroken(f"the stream broke: {self.broken_because}")
            end = min(len(data), start + WINDOW_BYTES - self._ahead)
            if end <= start:
                await self.wait()
                continue
            self._send(data[start:end])
            self._ahead += end - start
            self.written += end - start
            start = end

    def _send(self, data: bytes) -> None:
        twin = self._twin()

        def arrive() -> None:
            if not twin._reset_here and not twin._end.lost_because:
                twin._arrived += data
                twin.wake()

        self._end.put(arrive)

    def _twin(self) -> "MemoryBytes":
        assert self.twin is not None, "nothing is sent before the stream is open"
        return self.twin

    async def read(self) -> bytes:
        """What has arrived; none once nothing more will come."""
        while not self._arrived:
            if self._broken or self._their_end:
                await trio.lowlevel.checkpoint()
                return b""
            await self.wait()
        taken = bytes(self._arrived)
        self._arrived.clear()
        twin = self._twin()
        twin._ahead -= len(taken)
        twin.wake()
        return taken

    def finish(self) -> None:
        """Nothing more will be written."""
        self._finished = True
        self._tell("_their_end")

    def reset(self) -> None:
        """End both directions."""
        if not self._reset_here:
            self._reset_here = True
            self._tell("_reset_there")
            self.wake()
            self.free()

    def _tell(self, what: str) -> None:
        """Set a flag of the other end, when it gets there."""

        def arrive() -> None:
            if self.twin is not None:
                setattr(self.twin, what, True)
                self.twin.wake()

        self._end.put(arrive)

    def free(self) -> None:
        """Drop what is still held."""
        self._arrived.clear()
        self._end.remove(self)
