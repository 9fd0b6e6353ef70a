"""libp2p's connection, mended from outside by subclasses and by what they read from and write to; nothing is replaced in place.

py-libp2p 0.8.1 is used for its protocols (multistream-select, Noise, yamux) and not for its host and swarm, which end the
process on a peer's bad byte, never give back a token for an inbound connection, and dial one address of many. Of what is left,
these are the faults that matter and what is done about each; tests/p2p/test_libp2p_edges.py shows them in the bare library:

- A cancelled write leaves half a Noise message on the wire and breaks the connection: here one task writes (`Outbox`).
- The read loop waits to write its answers, so two nodes that both send much wait for each other for ever: the outbox takes what
  the read loop says without waiting.
- A message that can't be deciphered is logged and reading goes on in the middle of nowhere: here the first failure is the last
  (`SealedFrames`).
- Flow control is not enforced on what is received: a peer that ignores it is dropped (`UNREAD_BYTES_MAX`).
- A full window is polled and taken for a broken stream after 5 s: here a writer waits for the window itself.
"""

import contextlib
import struct

import trio

from p2p.libp2p_sealed import (
    SEALED_BYTES_MAX,
    SEALED_LENGTH_BYTES,
    WRITE_SECONDS,
    Outbox,
    SealedFrames,
    SocketBytes,
)
from p2p.transport import STREAMS_MAX

# isort: split
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.security.secure_session import SecureSession
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_FIN,
    FLAG_RST,
    FLAG_SYN,
    HEADER_SIZE,
    TYPE_DATA,
    TYPE_GO_AWAY,
    TYPE_PING,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
    Yamux,
    YamuxStream,
)

CHUNK_BYTES_MAX = SEALED_BYTES_MAX - HEADER_SIZE  # of one yamux frame, so that it fills one Noise message
OUTBOX_BYTES_MAX = 4 * 1024 * 1024  # what answers may add to the outbox: above it, the peer asks much and reads nothing
WINDOW_BYTES = 256 * 1024  # of a stream, as yamux has it: what a peer may send ahead of its reader
WINDOW_BYTES_MAX = 1024 * 1024  # of a stream whose reader keeps up
WINDOW_EXTRA_BYTES_MAX = 32 * 1024 * 1024  # beyond `WINDOW_BYTES`, of a connection's streams together
UNREAD_BYTES_MAX = STREAMS_MAX * WINDOW_BYTES + WINDOW_EXTRA_BYTES_MAX  # who keeps to the windows stays below
FIN, RST = FLAG_FIN, FLAG_RST


class MendedYamux(Yamux):  # type: ignore[misc]  # has no annotations
    """One connection's streams. `run_writer` and `start` are its two tasks; `sever` ends it, at once and without waiting."""

    def __init__(self, session: SecureSession, socket: SocketBytes) -> None:
        self.frames = SealedFrames(session, socket, self._frame_done)
        super().__init__(self.frames, session.get_remote_peer(), is_initiator=session.is_initiator)
        self.outbox = Outbox()
        self.broken_because = ""  # set once, when the connection ends
        self._session = session
        self._socket = socket
        self._windows: dict[int, trio.Event] = {}  # of streams whose writer waits for room at the peer
        self._retired: list[YamuxStream] = []
        self.window_extra = WINDOW_EXTRA_BYTES_MAX  # bytes left for windows to grow
        self._received = 0  # bytes since what is unread was last counted, and what was unread then

    async def run_writer(self) -> None:
        """Write what the outbox holds until the connection ends."""
        try:
            await self.outbox.run(self._write_sealed, self._forget_retired)
        except trio.TooSlowError:
            self.sever(f"the peer read nothing for {WRITE_SECONDS:g} s")
        except ConnectionClosedError as error:
            self.sever(str(error))

    async def _write_sealed(self, batch: bytes) -> None:
        sealed = self._session.conn.encrypt(batch)
        await self._socket.write(len(sealed).to_bytes(SEALED_LENGTH_BYTES, "big") + sealed)

    async def _write_frame(self, data: bytes) -> None:
        if self.broken_because:
            raise ConnectionClosedError(self.broken_because, transport="tcp")
        self.outbox.put(data)
        if self.outbox.bytes > OUTBOX_BYTES_MAX:
            self.sever("the peer asks without reading the answers")

    async def _read_data_body(self, length: int) -> bytes:
        self._received += length
        if self._received > UNREAD_BYTES_MAX:
            self._received = length + sum(map(len, self.stream_buffers.values()))
            if self._received > UNREAD_BYTES_MAX:
                self.frames.fail("the peer ignores flow control")
        return await self.frames.exactly(length)

    async def _cleanup_on_error(self) -> None:
        self.sever(self.frames.failure or "the peer said goodbye")

    def sever(self, because: str) -> None:
        """End the connection and everything that waits for it. Harmless when repeated."""
        if self.broken_because:
            return
        self.broken_because = because
        self.event_shutting_down.set()
        self.new_stream_send_channel.close()
        for stream in self.streams.values():
            stream.closed = stream.send_closed = stream.recv_closed = stream.reset_received = True
        for event in (*self.stream_events.values(), *self._windows.values()):
            event.set()
        self.streams.clear()
        self.stream_buffers.clear()
        self.stream_events.clear()
        self.outbox.shut()
        self.frames.wake()
        self._socket.cut()
        self.event_closed.set()

    async def goodbye(self) -> None:
        """Have everything written that was put, tell the peer, and wait until it closes its side."""
        self.outbox.put(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_GO_AWAY, 0, 0, 0))
        await self.outbox.room(below=1)
        if self.broken_because:  # meanwhile, and a write that was under way may not have come back yet
            return
        with contextlib.suppress(trio.ClosedResourceError, trio.BrokenResourceError):  # the peer was faster
            await self._socket.stream.send_eof()
        await self.event_closed.wait()

    async def answers(self, seconds: float) -> bool:
        """Whether anything comes from the peer within so long, which is asked for an answer."""
        self.outbox.put(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_SYN, 0, 0))
        with trio.move_on_after(seconds) as patience:
            await self.frames.wait_message()
        return not (patience.cancelled_caught or self.broken_because)

    def put_data(self, stream: YamuxStream, data: bytes) -> None:
        """Send part of a stream, which must fit its window."""
        stream.send_window -= len(data)
        self.outbox.put(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_DATA, 0, stream.stream_id, len(data)) + data)

    def put_window_update(self, stream: YamuxStream, flags: int = 0, increment: int = 0) -> None:
        """Give the peer more room, or end a direction (`FLAG_FIN`) or both (`FLAG_RST`)."""
        self.outbox.put(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_WINDOW_UPDATE, flags, stream.stream_id, increment))

    async def wait_window(self, stream: YamuxStream) -> None:
        """Wait for the next frame of this stream to be dealt with, or for its end."""
        await self._windows.setdefault(stream.stream_id, trio.Event()).wait()

    def wake_window(self, stream_id: int) -> None:
        """Have the stream's writer look again."""
        event = self._windows.pop(stream_id, None)
        if event is not None:
            event.set()

    def _frame_done(self, stream_id: int) -> None:
        if self._windows:
            self.wake_window(stream_id)

    def retire(self, stream: YamuxStream) -> None:
        """Forget a stream that has ended at this end, as soon as the read loop has none in hand."""
        self._retired.append(stream)
        self.outbox.wake()

    async def _forget_retired(self) -> None:
        if not self._retired:
            return
        async with self.streams_lock:
            while self._retired:
                stream = self._retired.pop()
                self.stream_buffers.pop(stream.stream_id, None)  # else what nobody will read keeps the stream
                self._finalize_stream_locked(stream, fully_closed=True)
