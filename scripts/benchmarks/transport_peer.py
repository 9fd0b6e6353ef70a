"""The far end of the transport's benchmark, in a process of its own: over plain TCP and over libp2p it does the same.

Serves, on either: ECHO; SINK, which answers with the bytes that it got; PACED, which sends what a home gets from engines.
"""

import sys
import time

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.cluster_key import cluster
from p2p.identity import Identity
from p2p.libp2p_transport import open_transport
from p2p.stream import Stream, StreamProtocol
from p2p.wire import FrameCodec

CLUSTER = cluster("bench", "0123456789abcdef" * 4)


class Pace(msgspec.Struct):
    """`count` messages, one each `interval` seconds."""

    count: int
    interval: float


class Token(msgspec.Struct, array_like=True):
    """As much as a token and its text take, when it was made (`time.monotonic`, one clock for a machine)."""

    task: int
    made: float
    text: str


ECHO = StreamProtocol[bytes]("/bench/echo/1", FrameCodec(bytes, 1 << 16))
SINK = StreamProtocol[bytes | int]("/bench/sink/1", FrameCodec(bytes | int, 1 << 20))
PACED = StreamProtocol[Pace | list[Token]]("/bench/paced/1", FrameCodec(Pace | list[Token], 1 << 20))


def new_identity() -> Identity:
    """A node of this run."""
    return Identity(Ed25519PrivateKey.generate())


async def _echo(stream: Stream[bytes]) -> None:
    async for message in stream:
        await stream.send(message)


async def _sink(stream: Stream[bytes | int]) -> None:
    total = 0
    async for message in stream:
        total += len(message) if isinstance(message, bytes) else 0
    await stream.send(total)


async def _paced(stream: Stream[Pace | list[Token]]) -> None:
    """The first message says how many tokens a frame holds, by its count's sign: one of 64 tasks, or all of them in one."""
    pace = await stream.receive()
    assert isinstance(pace, Pace)
    tasks = 1 if pace.count > 0 else 64
    start = trio.current_time()
    for number in range(abs(pace.count)):
        await trio.sleep_until(start + number * pace.interval)
        now = time.monotonic()
        await stream.send([Token(task, now, " token") for task in range(tasks)])


async def plain_peer(stream: trio.SocketStream) -> None:
    """A byte says what is wanted: to have everything sent back, or to have it counted."""
    wanted = await stream.receive_some(1)
    total = 0
    async for data in stream:
        total += len(data)
        if wanted == b"e":
            await stream.send_all(data)
    if wanted == b"s":
        await stream.send_all(total.to_bytes(8, "big"))


async def main() -> None:
    """Print the addresses, and serve until stdin ends."""
    async with open_transport(new_identity(), ["127.0.0.1:0"], CLUSTER) as transport, trio.open_nursery() as nursery:
        transport.serve(ECHO, _echo)
        transport.serve(SINK, _sink)
        transport.serve(PACED, _paced)
        listeners = await nursery.start(trio.serve_tcp, plain_peer, 0)
        print(transport.addresses[0], listeners[0].socket.getsockname()[1], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
