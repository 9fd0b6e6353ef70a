"""Handshakes with a far end that answers late, as where many nodes share a busy machine: time passes with each piece sent."""

from contextlib import suppress

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from p2p.addresses import parse_address
from p2p.libp2p_transport import HANDSHAKE_SECONDS_MAX
from p2p.stream import Peer
from p2p.transport import DIAL_SECONDS, Transport, Unreachable
from tests.p2p.transport_lab import open_lab

SETTLED_SECONDS = 0.01  # without anything arriving, on loopback
OPENING_BYTES = 20 + 8 + 34  # a dialler's two lines and first Noise message
PIECE_SECONDS = 0.3 * DIAL_SECONDS  # an answer takes three at most: two of the dialler's before it, and itself


@pytest.fixture
def pieces_clock() -> MockClock:
    """Time that passes when a test says so."""
    return MockClock()


class SlowWay:
    """A way to a node on which each piece takes `PIECE_SECONDS`."""

    def __init__(self, to: Transport, clock: MockClock) -> None:
        self._to = parse_address(to.addresses[0])
        self._clock = clock

    async def serve(self, *, task_status: trio.TaskStatus[str]) -> None:
        listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
        task_status.started(f"127.0.0.1:{listener.socket.getsockname()[1]}")
        async with (
            listener,
            await listener.accept() as near,
            await trio.open_tcp_stream(self._to.host, self._to.port) as far,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._pass_on, near, far)
            await self._pass_on(far, near)

    async def _pass_on(self, source: trio.SocketStream, to: trio.SocketStream) -> None:
        try:
            async for data in source:
                await trio.testing.wait_all_tasks_blocked(SETTLED_SECONDS)  # what came before was taken
                self._clock.jump(PIECE_SECONDS)
                await to.send_all(data)
        except trio.BrokenResourceError:
            pass  # it was given up


async def test_who_answers_late_each_time_is_no_stranger(pieces_clock: MockClock) -> None:
    async with open_lab("libp2p") as lab, lab.node() as one, lab.node() as other, trio.open_nursery() as nursery:
        address = await nursery.start(SlowWay(other, pieces_clock).serve)
        start = trio.current_time()
        assert isinstance(await one.dial(address), Peer)
        assert trio.current_time() - start > DIAL_SECONDS
        nursery.cancel_scope.cancel()


async def test_no_handshake_takes_for_ever(pieces_clock: MockClock) -> None:
    """The far end begins a Noise message and sends a byte of it from time to time."""

    async def dribble(stream: trio.SocketStream) -> None:
        await stream.send_all(b"\x13/multistream/1.0.0\n\x07/noise\n\x40\x00")
        heard = b""
        while len(heard) < OPENING_BYTES:
            heard += await stream.receive_some()
        with suppress(trio.BrokenResourceError):
            while True:
                await trio.testing.wait_all_tasks_blocked(SETTLED_SECONDS)
                pieces_clock.jump(PIECE_SECONDS)
                await stream.send_all(b"x")

    async with open_lab("libp2p") as lab, lab.node() as one, trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, dribble, 0)
        start = trio.current_time()
        outcome = await one.dial(f"127.0.0.1:{listeners[0].socket.getsockname()[1]}")
        assert outcome == Unreachable(f"its handshake was not done in {HANDSHAKE_SECONDS_MAX:g} s")
        assert trio.current_time() - start < HANDSHAKE_SECONDS_MAX + DIAL_SECONDS
        nursery.cancel_scope.cancel()
