"""Streams of messages over streams of bytes, alike for every transport: framing, the clean end, what a cancelled send means.

On the wire a direction is frames (`p2p.wire`) and then, if its sender closed it, an end mark: four zero bytes, a length that no
frame has. Bytes that stop without the mark were cut off, whatever the layer below calls it: libp2p's streams report a reset, a
close and a dead peer alike.
"""

import contextlib
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import trio

from p2p.ids import NodeId
from p2p.wire import HEADER_BYTES, FrameCodec, ProtocolViolation

GOODBYE_SECONDS = 1.0  # what a stream's or a connection's clean end may take before it is cut
END_MARK = bytes(HEADER_BYTES)

T = TypeVar("T")


class TransportError(Exception):
    """What the transport reports; `str()` is one clear sentence."""


class StreamBroken(TransportError):
    """The stream ended otherwise than by its sender's `close_send`: reset, cut off, or its connection lost."""


@dataclass(frozen=True)  # slots would make StreamProtocol[str](...) fail
class StreamProtocol(Generic[T]):
    """What a kind of stream is called and which messages it carries, at most `codec.max_bytes` each."""

    name: str
    codec: FrameCodec[T]


@dataclass(frozen=True, slots=True)
class Peer:
    """The far end of one connection. `boot` differs for each life of the peer's process; `since` is of trio's clock."""

    node_id: NodeId
    boot: bytes
    version: int
    addresses: tuple[str, ...]  # where it says that it listens, as multiaddrs
    remote: str  # the far end of the connection itself, `host:port`
    dialled: bool  # by this node
    connection: int  # counts this node's connections, so that a new one to the same peer is seen as such
    since: float
    began: float = 0.0  # when the peer's process started, on the clock of this node's transport


class ByteStream(Protocol):
    """What a transport provides for each stream."""

    written: int  # bytes handed over so far

    async def write(self, data: bytes) -> None:
        """Hand all of it over, waiting for room as often as need be. Cancelled, it may have handed over a part.

        Raises: StreamBroken.
        """

    async def read(self) -> bytes:
        """What has arrived, at least a byte; none once nothing more will come. Cancelled, it has taken nothing."""

    def finish(self) -> None:
        """Nothing more will be written."""

    def reset(self) -> None:
        """End both directions and free what they hold. What was written before still goes out."""

    def free(self) -> None:
        """Both directions have ended; drop what is still held."""

    @property
    def broken_because(self) -> str:
        """Why the stream ended, if it has."""


class MessageCutter(Generic[T]):
    """Cuts a direction's bytes into messages until its end mark. Holds at most one frame that is not yet whole."""

    def __init__(self, codec: FrameCodec[T]) -> None:
        self._codec = codec
        self._buffer = bytearray()
        self.ended = False

    def feed(self, data: bytes, messages: deque[T]) -> None:
        """Append the messages that `data` completes.

        Raises: ProtocolViolation, after the messages before it were appended.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= HEADER_BYTES and not self.ended:
            body = start + HEADER_BYTES
            header = bytes(buffer[start:body])
            if header == END_MARK:
                self.ended = True
                start = body
                break
            end = body + self._codec.length(header)
            if end > len(buffer):
                break
            messages.append(self._codec.decode(bytes(buffer[body:end])))
            start = end
        del buffer[:start]
        if self.ended and buffer:
            raise ProtocolViolation("bytes after the end of a stream")


class Stream(Generic[T]):
    """Messages of one protocol, both ways. Iterate it to receive.

    As a context: a normal exit ends our direction cleanly and stops a peer that still sends; an exception resets it. Several
    trio tasks may send, and their messages are not mixed; one at a time may receive.
    """

    def __init__(self, peer: Peer, protocol: StreamProtocol[T], carrier: ByteStream) -> None:
        self.peer = peer
        self.protocol = protocol
        self._carrier = carrier
        self._cutter = MessageCutter(protocol.codec)
        self._received: deque[T] = deque()
        self._violation: ProtocolViolation | None = None
        self._sending = trio.Lock()
        self._send_closed = False
        self._reset = False

    def __repr__(self) -> str:
        return f"Stream({self.protocol.name}, {self.peer.node_id[-8:]})"

    async def send(self, message: T) -> None:
        """Hand one message over; waits while the way to the reader is full. Nothing says that the peer has it.

        Cancelled, either none of the message was handed over, or the stream is reset.

        Raises: StreamBroken; ValueError for a message above the protocol's cap, which leaves the stream as it was.
        """
        await self._hand_over(self.protocol.codec.encode(message))

    async def close_send(self) -> None:
        """Nothing more will be sent; the peer's iteration ends after what was sent. Receiving goes on. Harmless when repeated.

        Raises: StreamBroken.
        """
        if not self._send_closed:
            await self._hand_over(END_MARK)
            self._send_closed = True
            self._carrier.finish()

    async def _hand_over(self, frame: bytes) -> None:
        try:  # the lock's own `acquire` lets other tasks run each time, which costs more than the rest of a small send
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            await self._sending.acquire()
        before = self._carrier.written
        try:
            if self._reset or self._send_closed:
                raise StreamBroken(f"this end of the {self.protocol.name} stream is closed")
            await self._carrier.write(frame)
        except trio.Cancelled:
            if self._carrier.written != before:
                self.reset()  # half a frame is on its way: nothing after it could be understood
            raise
        finally:
            self._sending.release()

    async def receive(self) -> T:
        """The next message. Cancelled, it has taken none.

        Raises: trio.EndOfChannel once the peer closed its direction and all before that was received; StreamBroken;
        ProtocolViolation.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._received:
            if self._violation is not None:
                raise self._violation
            if self._cutter.ended:
                raise trio.EndOfChannel
            if self._reset:
                raise StreamBroken(f"the {self.protocol.name} stream was reset at this end")
            data = await self._carrier.read()
            if not data:
                raise StreamBroken(f"the {self.protocol.name} stream broke: {self._carrier.broken_because}")
            try:
                self._cutter.feed(data, self._received)
            except ProtocolViolation as violation:
                self._violation = violation
                self.reset()
        return self._received.popleft()

    def __aiter__(self) -> "Stream[T]":
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def reset(self) -> None:
        """End both directions now; the peer's send and receive raise `StreamBroken`. Never waits; harmless when repeated."""
        if not self._reset:
            self._reset = True
            self._carrier.reset()

    async def aclose(self) -> None:
        """End our direction cleanly within `GOODBYE_SECONDS`, stop a peer that still sends, and free everything."""
        with trio.CancelScope(shield=True), trio.move_on_after(GOODBYE_SECONDS):
            if not self._reset:
                with contextlib.suppress(StreamBroken):
                    await self.close_send()
        if self._send_closed and self._cutter.ended and not self._reset:
            self._carrier.free()
        else:
            self.reset()

    async def __aenter__(self) -> "Stream[T]":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.reset()
        await self.aclose()
