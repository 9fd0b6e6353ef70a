"""The one codec: values as msgpack in length-prefixed frames.

A frame is a big-endian u32 length and that many bytes of msgpack. Both ends name a cap; a longer frame is a violation and is
refused from its length alone, before its bytes are kept. What a frame may hold is said by a type: decoding checks types,
lengths and ranges (msgspec) before anything of it is used.

Pure: bytes in, values out. It imports nothing of shoal, so that a runner can use it too.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

HEADER_BYTES = 4

T = TypeVar("T")


class ProtocolViolation(Exception):
    """The other end sent what the protocol does not allow; its stream is not to be read any further."""


class FrameCodec(Generic[T]):
    """Frames that hold one value of `message_type` each, `max_bytes` of msgpack at most."""

    def __init__(self, message_type: type[T] | object, max_bytes: int) -> None:
        assert 0 < max_bytes < 1 << 32
        self.max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: T) -> bytes:
        """The whole frame of one message.

        Raises: ValueError where the message is longer than the cap (ours to prevent, so no violation).
        """
        frame = bytearray(HEADER_BYTES)
        self._encoder.encode_into(message, frame, HEADER_BYTES)
        length = len(frame) - HEADER_BYTES
        if length > self.max_bytes:
            raise ValueError(f"a frame of {length} bytes is above the cap of {self.max_bytes}")
        frame[:HEADER_BYTES] = length.to_bytes(HEADER_BYTES, "big")
        return bytes(frame)

    def encode_checked(self, message: T) -> bytes:
        """The whole frame of a message made from what somebody else sent: checked as the other end will check it.

        Constructing a value checks nothing, and the other end would take a value that is out of range for a violation.

        Raises: ValueError where the message has no valid frame: a field out of range, a number or text that msgpack can't
            hold, too long, nested too deep.
        """
        try:
            frame = self.encode(message)
            self.decode(memoryview(frame)[HEADER_BYTES:])
        except (ProtocolViolation, OverflowError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        return frame

    def decode(self, body: bytes | memoryview) -> T:
        """The message in a frame's body.

        Raises: ProtocolViolation where it is no msgpack or not of the message type.
        """
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolViolation(f"bad frame: {error}") from error

    def length(self, header: bytes) -> int:
        """The body length that a header announces.

        Raises: ProtocolViolation where it is zero or above the cap.
        """
        length = int.from_bytes(header, "big")
        if not 0 < length <= self.max_bytes:
            raise ProtocolViolation(f"a frame of {length} bytes was announced, the cap is {self.max_bytes}")
        return length

    def reader(self) -> "FrameReader[T]":
        """A fresh reader for one direction of one stream."""
        return FrameReader(self)


class FrameReader(Generic[T]):
    """Cuts a stream of bytes into messages. Holds at most one frame's bytes that are not yet whole."""

    def __init__(self, codec: FrameCodec[T]) -> None:
        self._codec = codec
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> Iterator[T]:
        """Yield each message that `data` completes, in order; must be iterated to its end.

        Raises: ProtocolViolation, after the messages before it; the reader is of no more use then.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER_BYTES:
                body = start + HEADER_BYTES
                end = body + self._codec.length(bytes(buffer[start:body]))
                if end > len(buffer):
                    break
                start = end
                yield self._codec.decode(bytes(buffer[body:end]))
        finally:
            del buffer[:start]

    @property
    def midway(self) -> bool:
        """Whether part of a frame is held: a stream that ends now was cut off."""
        return bool(self._buffer)
