"""The transport between two processes, beside plain TCP in the same run; and a home that relays what 64 engine slots make."""

import logging
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
import trio

from p2p.ids import NodeId
from p2p.libp2p_transport import open_transport
from p2p.stream import Peer
from p2p.transport import Transport
from scripts.benchmarks.figures import PAIRS_MIN, median, report
from scripts.benchmarks.transport_peer import CLUSTER, ECHO, PACED, SINK, Pace, new_identity

ROUND_TRIPS = 500
SMALL_MESSAGES = 10_000
BULK_BYTES = 64 << 20
BULK_MESSAGE_BYTES = 64 * 1024
SLOTS = 64
TOKENS_PER_SECOND = 125  # of each slot
PACED_SECONDS = 4
RELAY_P99_MILLISECONDS = 50.0


@dataclass(frozen=True)
class Peers:
    """The far end, by both ways."""

    transport: Transport
    node_id: NodeId
    port: int


async def round_trip(peers: Peers) -> float:
    """Milliseconds for 100 bytes there and back."""
    async with await peers.transport.open(peers.node_id, ECHO) as stream:
        start = time.perf_counter()
        for _ in range(ROUND_TRIPS):
            await stream.send(b"x" * 100)
            await stream.receive()
        return (time.perf_counter() - start) / ROUND_TRIPS * 1e3


async def plain_round_trip(peers: Peers) -> float:
    """The same over TCP."""
    async with await trio.open_tcp_stream("127.0.0.1", peers.port) as stream:
        await stream.send_all(b"e")
        start = time.perf_counter()
        for _ in range(ROUND_TRIPS):
            await stream.send_all(b"x" * 100)
            await stream.receive_some(100)
        return (time.perf_counter() - start) / ROUND_TRIPS * 1e3


async def pour(peers: Peers, size: int, count: int) -> float:
    """Seconds to send so many messages of so many bytes and to hear that they arrived."""
    async with await peers.transport.open(peers.node_id, SINK) as stream:
        start = time.perf_counter()
        for _ in range(count):
            await stream.send(b"x" * size)
        await stream.close_send()
        assert await stream.receive() == size * count
        return time.perf_counter() - start


async def plain_pour(peers: Peers, size: int, count: int) -> float:
    """The same over TCP."""
    async with await trio.open_tcp_stream("127.0.0.1", peers.port) as stream:
        await stream.send_all(b"s")
        start = time.perf_counter()
        for _ in range(count):
            await stream.send_all(b"x" * size)
        await stream.send_eof()
        assert int.from_bytes(await stream.receive_some(8), "big") == size * count
        return time.perf_counter() - start


async def relay(peers: Peers, streams: int) -> tuple[float, float, float]:
    """Tokens a second that came, and p50 and p99 of the milliseconds from engine to home; one stream means one frame a step."""
    late: list[float] = []

    async def take(pace: Pace) -> None:
        async with await peers.transport.open(peers.node_id, PACED) as stream:
            await stream.send(pace)
            async for tokens in stream:
                now = time.monotonic()
                assert not isinstance(tokens, Pace)
                late.extend((now - token.made) * 1e3 for token in tokens)

    steps = TOKENS_PER_SECOND * PACED_SECONDS
    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(take, Pace(steps if streams > 1 else -steps, 1 / TOKENS_PER_SECOND))
    took = time.perf_counter() - start
    late.sort()
    assert len(late) == SLOTS * steps
    return len(late) / took, late[len(late) // 2], late[int(len(late) * 0.99)]


async def beside_plain(
    name: str, unit: str, ours: Callable[[], Awaitable[float]], plain: Callable[[], Awaitable[float]], per: float
) -> None:
    """Print both medians; `per` over a time in seconds gives the figure, or 0 where the time is the figure."""
    mine, theirs = [], []
    for _ in range(PAIRS_MIN):
        mine.append(await ours())
        theirs.append(await plain())
    if per:
        mine, theirs = [per / value for value in mine], [per / value for value in theirs]
    print(f"     {name}: {median(mine, unit)}; plain TCP {median(theirs, unit)}", flush=True)


async def measure(address: str, port: int) -> None:
    """All figures."""
    async with open_transport(new_identity(), ["127.0.0.1:0"], CLUSTER) as transport:
        peer = await transport.dial(address)
        assert isinstance(peer, Peer), peer
        peers = Peers(transport, peer.node_id, port)
        count = BULK_BYTES // BULK_MESSAGE_BYTES
        await beside_plain("round trip", "ms", lambda: round_trip(peers), lambda: plain_round_trip(peers), 0)
        await beside_plain(
            "small messages",
            "thousand/s",
            lambda: pour(peers, 100, SMALL_MESSAGES),
            lambda: plain_pour(peers, 100, SMALL_MESSAGES),
            SMALL_MESSAGES / 1e3,
        )
        await beside_plain(
            "bulk",
            "MB/s",
            lambda: pour(peers, BULK_MESSAGE_BYTES, count),
            lambda: plain_pour(peers, BULK_MESSAGE_BYTES, count),
            BULK_BYTES / 1e6,
        )
        rate, middle, worst = await relay(peers, 1)
        report(
            f"relay of {SLOTS} slots at {TOKENS_PER_SECOND} tokens/s each, one frame a step",
            f"{rate:.0f} tokens/s, p50 {middle:.1f} ms, p99 {worst:.1f} ms",
            f"all of them, p99 at most {RELAY_P99_MILLISECONDS:.0f} ms",
            reached=worst <= RELAY_P99_MILLISECONDS,
        )
        rate, middle, worst = await relay(peers, SLOTS)
        print(f"     the same at one frame a token: {rate:.0f} tokens/s, p50 {middle:.1f} ms, p99 {worst:.1f} ms", flush=True)


def main() -> None:
    """Start the far end and measure."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    command = [sys.executable, "-m", "scripts.benchmarks.transport_peer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        assert peer.stdin is not None
        line = peer.stdout.readline().split()
        while len(line) != 2 or not line[1].isdecimal():  # its log
            line = peer.stdout.readline().split()
        trio.run(measure, line[0], int(line[1]))
        peer.stdin.close()
