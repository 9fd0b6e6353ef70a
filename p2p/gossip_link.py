"""One sync stream, as the loop around the replicated state keeps it: what is to be sent waits in a bounded queue."""

from collections import deque

import trio
from msgspec import Struct

from p2p.stream import Stream, StreamProtocol, TransportError
from p2p.sync_wire import FRAME_BYTES_MAX
from p2p.wire import HEADER_BYTES, FrameCodec

QUEUE_BYTES_MAX = 1 << 20  # of one peer
CLOSE_SECONDS = 1.0  # for the last frames of a stream that is closed, and the peer's end


class _Bodies(FrameCodec[bytes]):
    """Frames whose bodies are the core's to write and to read."""

    def __init__(self) -> None:
        super().__init__(bytes, FRAME_BYTES_MAX)

    def encode(self, message: bytes) -> bytes:
        assert 0 < len(message) <= self.max_bytes
        return len(message).to_bytes(HEADER_BYTES, "big") + message

    def decode(self, body: bytes | memoryview) -> bytes:
        return bytes(body)


SYNC = StreamProtocol[bytes]("sync/1", _Bodies())


class Counters(Struct):
    """What went in and out since the start."""

    frames_in: int = 0
    frames_out: int = 0
    bytes_in: int = 0  # of frames; what carries them costs more
    bytes_out: int = 0
    overflows: int = 0  # times that a peer's queue was full and dropped
    faults: int = 0  # streams ended because the peer broke a rule
    dials: int = 0  # that the core asked for


class SyncLink:
    """One open sync stream."""

    def __init__(self, stream: Stream[bytes]) -> None:
        self.stream = stream
        self.scope = trio.CancelScope()  # of all that the stream does here
        self.closing = False  # by this node
        self.ended = False  # by the peer, cleanly
        self._queue: deque[bytes] = deque()
        self._queued = 0  # bytes, with the frame that is being sent
        self._wanted = trio.Event()  # something is queued, or it is to be closed

    @property
    def meant(self) -> bool:
        """Whether its end, if it has ended, was meant by one of the two."""
        return self.closing or self.ended

    @property
    def idle(self) -> bool:
        """Whether all that was put is on its way."""
        return not self._queued

    def put(self, body: bytes) -> bool:
        """Queue a frame; False where there was too much already, and now there is nothing."""
        if self._queued + len(body) > QUEUE_BYTES_MAX:
            self._queued -= sum(map(len, self._queue))
            self._queue.clear()
            return False
        self._queue.append(body)
        self._queued += len(body)
        self._wanted.set()
        return True

    def close(self) -> None:
        """Send what is queued and the end, await the peer's end, all within `CLOSE_SECONDS`."""
        self.closing = True
        self._wanted.set()
        self.scope.deadline = trio.current_time() + CLOSE_SECONDS

    def cut(self) -> None:
        """Send nothing more."""
        self.closing = True
        self.scope.cancel()

    async def send(self, counters: Counters) -> None:
        """Write what is queued until the link is closed or breaks. A peer that takes nothing holds up nobody else."""
        try:
            while self._queue or not self.closing:
                if not self._queue:
                    self._wanted = trio.Event()
                    await self._wanted.wait()
                    continue
                body = self._queue.popleft()
                await self.stream.send(body)
                self._queued -= len(body)
                counters.frames_out += 1
                counters.bytes_out += HEADER_BYTES + len(body)
            await self.stream.close_send()
        except TransportError:
            self.scope.cancel()
