"""Streams of bytes in a libp2p connection, and which protocol one is for (multistream-select)."""

import trio

from p2p.libp2p_mending import CHUNK_BYTES_MAX, FIN, RST, WINDOW_BYTES, WINDOW_BYTES_MAX, MendedYamux
from p2p.stream import StreamBroken
from p2p.transport import ProtocolRefused

# isort: split
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import IOException
from libp2p.protocol_muxer.multiselect import MULTISELECT_PROTOCOL_ID, PROTOCOL_NOT_FOUND_MSG, Multiselect
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.stream_muxer.yamux.yamux import YamuxStream
from libp2p.utils import encode_delim

CHUNK_BYTES_MIN = 16 * 1024  # less is sent only where no more is left
KEEPS_UP_SECONDS = 0.05  # a reader that takes half a window in less is worth a larger one
NEGOTIATION_BYTES_MAX = 4096  # of one stream
NEGOTIATION_SECONDS = 5


class YamuxBytes:
    """One yamux stream as a `p2p.stream.ByteStream`."""

    def __init__(self, stream: YamuxStream, connection: MendedYamux) -> None:
        self.written = 0
        self._stream = stream
        self._connection = connection
        # Kept here, since the connection lets go of it when it ends: what had arrived by then can still be read.
        self._arrived: bytearray = connection.stream_buffers.get(stream.stream_id, bytearray())
        self._owed = 0  # bytes read and not yet given back to the peer's window
        self._window = WINDOW_BYTES
        self._room_given = trio.current_time()
        self._reset_here = False

    @property
    def broken_because(self) -> str:
        """Why the stream ended, if it has."""
        if self._connection.broken_because:
            return self._connection.broken_because
        return "reset at this end" if self._reset_here else "reset by the peer"

    async def write(self, data: bytes) -> None:
        """Hand all of it over, as the peer's window and the connection's outbox have room.

        Raises: StreamBroken.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        stream, connection = self._stream, self._connection
        start = 0
        while start < len(data):
            await connection.outbox.room()
            if stream.closed or stream.send_closed or connection.broken_because:
                raise StreamBroken(f"the stream broke: {self.broken_because}")
            end = min(len(data), start + CHUNK_BYTES_MAX, start + stream.send_window)
            if end - start < min(CHUNK_BYTES_MIN, len(data) - start):  # rather wait than send crumbs
                await connection.wait_window(stream)
                continue
            connection.put_data(stream, data[start:end])
            self.written += end - start
            start = end

    async def read(self, n: int | None = None) -> bytes:
        """What has arrived, up to `n` bytes; none once nothing more will come."""
        stream, events = self._stream, self._connection.stream_events
        while not self._arrived:
            event = events.get(stream.stream_id)
            if event is None or stream.recv_closed or stream.closed:
                await trio.lowlevel.checkpoint()
                return b""
            if event.is_set():
                events[stream.stream_id] = event = trio.Event()
            await event.wait()
        taken = bytes(self._arrived[:n])
        del self._arrived[: len(taken)]
        self._owed += len(taken)
        if self._owed >= self._window // 2 and not (stream.recv_closed or stream.closed):
            self._give_room()
        return taken

    def _give_room(self) -> None:
        """Let the peer send as much more as was read; and more than before, if its last room was used up in no time."""
        now = trio.current_time()
        grown = min(self._window, WINDOW_BYTES_MAX - self._window, self._connection.window_extra)
        if now - self._room_given > KEEPS_UP_SECONDS:
            grown = 0
        self._room_given = now
        self._window += grown
        self._connection.window_extra -= grown
        self._stream.recv_window += self._owed + grown
        self._connection.put_window_update(self._stream, increment=self._owed + grown)
        self._owed = 0

    def finish(self) -> None:
        """Nothing more will be written."""
        if not self._stream.send_closed:
            self._connection.put_window_update(self._stream, FIN)
            self._stream.send_closed = True
            self._stream.closed = self._stream.recv_closed

    def reset(self) -> None:
        """End both directions and free what they hold."""
        stream = self._stream
        if self._reset_here:
            return
        self._reset_here = True
        if not stream.closed:
            self._connection.put_window_update(stream, RST)
        stream.closed = stream.send_closed = stream.recv_closed = stream.reset_received = True
        event = self._connection.stream_events.get(stream.stream_id)
        if event is not None:
            event.set()
        self._connection.wake_window(stream.stream_id)
        self.free()

    def free(self) -> None:
        """Drop what is still held."""
        self._arrived = bytearray()
        self._connection.window_extra += self._window - WINDOW_BYTES
        self._window = WINDOW_BYTES
        self._connection.retire(self._stream)


class _Negotiation:
    """A stream as multistream-select reads it: a few bytes, and no more than `NEGOTIATION_BYTES_MAX`."""

    def __init__(self, carrier: YamuxBytes) -> None:
        self._carrier = carrier
        self._allowance = NEGOTIATION_BYTES_MAX

    async def read(self, n: int) -> bytes:
        data = await self._carrier.read(min(n, NEGOTIATION_BYTES_MAX))
        self._allowance -= len(data)
        if not data or self._allowance < 0:
            raise IOException("no protocol was agreed on")
        return data

    async def write(self, data: bytes) -> None:
        await self._carrier.write(data)


async def open_bytes(connection: MendedYamux, protocol: str) -> YamuxBytes:
    """A new stream, whose other end serves the protocol. One round trip: both of our lines are sent before any is answered.

    Raises: ProtocolRefused; StreamBroken.
    """
    if connection.stream_backlog_semaphore.value == 0:
        raise ProtocolRefused("too many streams are open to that peer")
    with trio.CancelScope(
        shield=True
    ):  # it takes a slot and a lock, and waits for neither; cancelled between, it would keep one
        try:
            stream = await connection.open_stream()
        except BaseLibp2pError as error:
            raise StreamBroken(f"the connection broke: {connection.broken_because or error}") from error
    carrier = YamuxBytes(stream, connection)
    agreed = False
    try:
        await carrier.write(encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + encode_delim(protocol.encode()))
        lines = MultiselectCommunicator(_Negotiation(carrier))
        greeting, answer = await lines.read(), await lines.read()
        agreed = (greeting, answer) == (MULTISELECT_PROTOCOL_ID, protocol)
    except Exception as error:
        raise StreamBroken(f"the stream broke: {carrier.broken_because}") from error
    finally:
        if not agreed:
            carrier.reset()
    if not agreed:
        why = "does not serve" if answer == PROTOCOL_NOT_FOUND_MSG else "answers nonsense to"
        raise ProtocolRefused(f"the peer {why} {protocol}")
    return carrier


async def accept_bytes(connection: MendedYamux, stream: YamuxStream, protocols: Multiselect) -> tuple[YamuxBytes, str] | None:
    """What the peer opened a stream for, and the stream; none (and the stream reset) where that was nothing we serve."""
    carrier = YamuxBytes(stream, connection)
    agreed = None
    try:
        agreed, _ = await protocols.negotiate(MultiselectCommunicator(_Negotiation(carrier)), NEGOTIATION_SECONDS)
    except Exception:  # noqa: BLE001 - what a peer can make it raise is libp2p's affair, and must not get further
        return None
    finally:
        if agreed is None:
            carrier.reset()
    return carrier, str(agreed)
