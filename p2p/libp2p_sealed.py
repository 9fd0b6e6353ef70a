"""One connection's bytes on their way in and out: the socket, the ciphered messages, and the one task that writes.

Of the faults that `libp2p_mending` lists, those of cancelled writes, waiting read loops and undecipherable messages end here.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable

import trio

from p2p import fastecdsa_stub

fastecdsa_stub.install()  # before the first import of libp2p, which imports fastecdsa and does not need it here

from libp2p.io.exceptions import ConnectionClosedError  # noqa: E402 - the stub goes first
from libp2p.io.trio import TrioTCPStream  # noqa: E402 - the stub goes first
from libp2p.security.secure_session import SecureSession  # noqa: E402 - the stub goes first

RECEIVE_BYTES = 64 * 1024  # of one system call
SEALED_LENGTH_BYTES = 2  # before each Noise message (libp2p specifications, noise)
SEALED_BYTES_MAX = 65519  # plain text of one Noise message: 65535 less the tag of 16
OUTBOX_BYTES = 128 * 1024  # waiting to be written, two Noise messages; above it streams wait, and small ones wait little
OUTBOX_YIELD_BYTES = 16 * 1024  # waiting to be written: above it, a sender lets others run
WRITE_SECONDS = 20.0  # one write that makes no progress for so long ends the connection


class SocketBytes(TrioTCPStream):  # type: ignore[misc]  # the stub goes first
    """A TCP connection as libp2p reads it. Many small reads cost one system call.

    `allowance` bounds what is read in all; as long as there is one, `on_heard` is told of each piece.
    """

    def __init__(self, stream: trio.SocketStream, allowance: int, on_heard: Callable[[], None]) -> None:
        super().__init__(stream)
        self._on_heard = on_heard
        self._arrived = bytearray()
        self.allowance: int | None = allowance
        self.ended = False  # nothing more will come

    async def read(self, n: int | None = None) -> bytes:
        """Up to `n` bytes; none at the end.

        Raises: ConnectionClosedError.
        """
        if not self._arrived:
            try:
                self._arrived += await self.stream.receive_some(RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self.ended = True
                raise ConnectionClosedError("the connection was reset", transport="tcp") from error
            self.ended = not self._arrived
            if self.allowance is not None:
                self.allowance -= len(self._arrived)
                if self.allowance < 0:
                    raise ConnectionClosedError("too much was sent before the handshake was done", transport="tcp")
                self._on_heard()
        taken = bytes(self._arrived[:n])
        del self._arrived[: len(taken)]
        return taken

    async def exactly(self, n: int) -> bytes:
        """Raises: ConnectionClosedError, also where the end comes before."""
        data = await self.read(n)
        while len(data) < n:
            more = await self.read(n - len(data))
            if not more:
                raise ConnectionClosedError("the connection was cut off" if data else "the peer closed the connection")
            data += more
        return data

    async def write(self, data: bytes) -> None:
        """Write all of it.

        Raises: ConnectionClosedError.
        """
        try:
            await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError("the connection was reset", transport="tcp") from error

    def cut(self) -> None:
        """Close the socket at once."""
        self.stream.socket.close()


class SealedFrames:
    """What the muxer reads from: deciphered bytes, which end for good at the first failure.

    The muxer asks for a frame's header only when it is done with the frame before; `on_frame` is told which stream that was of.
    """

    def __init__(self, session: SecureSession, socket: SocketBytes, on_frame: Callable[[int], None]) -> None:
        self.is_initiator: bool = session.is_initiator
        self._session = session
        self._socket = socket
        self._on_frame = on_frame
        self._plain = bytearray()
        self._stream_id = 0
        self._awaited: trio.Event | None = None
        self.failure = ""

    async def wait_message(self) -> None:
        """Return once another message was deciphered, or `wake` was called."""
        if self._awaited is None:
            self._awaited = trio.Event()
        await self._awaited.wait()

    def wake(self) -> None:
        """Let whoever waits for a message go."""
        if self._awaited is not None:
            self._awaited.set()
            self._awaited = None

    async def read(self, n: int) -> bytes:
        """The next frame's header.

        Raises: ConnectionClosedError.
        """
        self._on_frame(self._stream_id)
        header = await self.exactly(n)
        self._stream_id = int.from_bytes(header[4:8], "big")
        return header

    async def exactly(self, n: int) -> bytes:
        """Raises: ConnectionClosedError, from the first failure on."""
        while len(self._plain) < n:
            if self.failure:
                raise ConnectionClosedError(self.failure, transport="tcp")
            try:
                length = int.from_bytes(await self._socket.exactly(SEALED_LENGTH_BYTES), "big")
                self._plain += self._session.conn.decrypt(await self._socket.exactly(length))
                self.wake()
            except ConnectionClosedError as error:
                self.failure = str(error)
            except Exception as error:  # noqa: BLE001 - noiseprotocol and cryptography each raise their own
                self.failure = f"what arrived can't be deciphered ({type(error).__name__})"
        data = bytes(self._plain[:n])
        del self._plain[:n]
        return data

    def fail(self, why: str) -> None:
        """Let no further byte be read."""
        self.failure = why
        self._plain.clear()

    async def close(self) -> None:
        """Nothing to do: `MendedYamux.sever` closes the socket."""


class Outbox:
    """Frames on their way to the one task that writes them. Putting never waits; who has more to say asks for `room` first."""

    def __init__(self) -> None:
        self.bytes = 0  # put and not yet written
        self._frames: deque[bytes] = deque()
        self._filled = trio.Event()
        self._drained = trio.Event()
        self._shut = False

    def put(self, frame: bytes) -> None:
        """Append a frame; one that comes after `shut` is dropped."""
        if not self._shut:
            self._frames.append(frame)
            self.bytes += len(frame)
            self._filled.set()

    async def room(self, below: int = OUTBOX_BYTES) -> None:
        """Wait until fewer than so many bytes wait, or the outbox is shut."""
        while self.bytes >= below and not self._shut:
            await self._drained.wait()
        if self.bytes > OUTBOX_YIELD_BYTES:
            await trio.lowlevel.checkpoint()

    def shut(self) -> None:
        """Drop everything and let everyone go."""
        self._shut = True
        self._frames.clear()
        self.bytes = 0
        self._filled.set()
        self._drained.set()

    def wake(self) -> None:
        """Let the writing task go round once."""
        self._filled.set()

    async def run(self, write: Callable[[bytes], Awaitable[None]], after: Callable[[], Awaitable[None]]) -> None:
        """Write what is put, as many frames at once as one Noise message holds, until the outbox is shut.

        Raises: whatever `write` does; trio.TooSlowError where one write takes `WRITE_SECONDS`.
        """
        with trio.CancelScope() as patience:
            while not self._shut:
                if not self._frames:
                    self._filled = trio.Event()
                    await self._filled.wait()
                while self._frames:
                    batch = self._next_batch()
                    patience.deadline = trio.current_time() + WRITE_SECONDS
                    await write(batch)
                    patience.deadline = math.inf
                    self.bytes = max(0, self.bytes - len(batch))
                    self._drained.set()
                    self._drained = trio.Event()
                await after()
        if patience.cancelled_caught:
            raise trio.TooSlowError

    def _next_batch(self) -> bytes:
        batch = [self._frames.popleft()]
        size = len(batch[0])
        while self._frames and size + len(self._frames[0]) <= SEALED_BYTES_MAX:
            batch.append(self._frames.popleft())
            size += len(batch[-1])
        return b"".join(batch)
