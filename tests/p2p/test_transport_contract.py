"""What `p2p.transport` promises of streams, of both transports; `test_transport_connections` has the rest."""

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
import trio.testing

from p2p.stream import Stream, StreamBroken, StreamProtocol
from p2p.transport import STREAMS_MAX, NotConnected, ProtocolRefused
from p2p.wire import FrameCodec, ProtocolViolation
from tests.p2p.transport_lab import (
    ECHO,
    SINK,
    Gate,
    Kind,
    both,
    echo,
    gated,
    new_identity,
    open_pair,
    read_all,
)

# Above it a sender has to wait for its reader: the stream's window and what both ends hold on the way.
AHEAD_BYTES_MAX = 2 << 20


async def send_for_ever(stream: Stream[bytes], message: bytes) -> None:
    while True:
        await stream.send(message)


async def send_until_broken(stream: Stream[bytes], message: bytes) -> None:
    with suppress(StreamBroken):
        await send_for_ever(stream, message)


@both
async def test_messages_arrive_whole_in_order_once(kind: Kind) -> None:
    sizes = [0, 1, 3, 65_506, 65_507, 65_519, 65_536, 262_144, 1_500_000, 5] + [17] * 500
    sent = [random.Random(size).randbytes(size) for size in sizes]
    async with open_pair(kind) as (one, other):
        got: list[bytes] = []
        done = trio.Event()

        async def serve(stream: Stream[bytes]) -> None:
            got.extend(await read_all(stream))
            done.set()

        other.serve(SINK, serve)
        async with await one.open(other.node_id, SINK) as stream:
            for message in sent:
                await stream.send(message)
        await done.wait()

    assert got == sent


@both
async def test_half_close_leaves_the_other_direction_open(kind: Kind) -> None:
    async with open_pair(kind) as (one, other):

        async def serve(stream: Stream[bytes]) -> None:
            count = len(await read_all(stream))
            for _ in range(count):
                await stream.send(b"answer")

        other.serve(SINK, serve)
        async with await one.open(other.node_id, SINK) as stream:
            for _ in range(3):
                await stream.send(b"question")
            await stream.close_send()
            await stream.close_send()
            with pytest.raises(StreamBroken):
                await stream.send(b"late")

            assert await read_all(stream) == [b"answer"] * 3
            with pytest.raises(trio.EndOfChannel):
                await stream.receive()


async def leave(stream: Stream[bytes]) -> None:
    await stream.send(b"first")


async def fail(stream: Stream[bytes]) -> None:
    await stream.send(b"first")
    raise StreamBroken("as it happens")


async def give_up(stream: Stream[bytes]) -> None:
    await stream.send(b"first")
    stream.reset()


@both
@pytest.mark.parametrize(("act", "clean"), [(leave, True), (fail, False), (give_up, False)])
async def test_an_end_that_was_meant_differs_from_one_that_was_not(
    kind: Kind, act: Callable[[Stream[bytes]], Awaitable[None]], clean: bool
) -> None:
    async with open_pair(kind) as (one, other):
        other.serve(SINK, act)
        async with await one.open(other.node_id, SINK) as stream:
            assert await stream.receive() == b"first"
            if clean:
                assert await read_all(stream) == []
            else:
                with pytest.raises(StreamBroken):
                    await read_all(stream)


@both
async def test_what_was_sent_before_an_end_arrives_though_its_sender_reads_no_more(kind: Kind) -> None:
    async def serve(stream: Stream[bytes]) -> None:
        for number in range(200):
            await stream.send(bytes([number]) * 1000)

    async with open_pair(kind) as (one, other):
        other.serve(SINK, serve)
        async with await one.open(other.node_id, SINK) as stream:
            with pytest.raises(StreamBroken):  # nobody reads these; the served function's return stops them
                await send_for_ever(stream, b"x" * 10_000)

            assert len(await read_all(stream)) == 200


@both
async def test_a_reset_stops_both_directions(kind: Kind) -> None:
    gate = Gate()
    async with open_pair(kind) as (one, other):
        other.serve(SINK, gated(gate, lambda stream: send_for_ever(stream, b"x" * 1000)))
        gate.open.set()
        stream = await one.open(other.node_id, SINK)
        await stream.receive()
        stream.reset()
        stream.reset()
        with pytest.raises(StreamBroken):
            await read_all(stream)
        with pytest.raises(StreamBroken):
            await stream.send(b"x")
        await stream.aclose()
        await gate.done.wait()

        assert isinstance(gate.error, StreamBroken)
        assert other.counters.failures == 0


@both
async def test_a_slow_reader_holds_up_its_own_stream_only(kind: Kind) -> None:
    gate = Gate()
    message = b"m" * 50_000
    count = 3 * AHEAD_BYTES_MAX // len(message)
    sent = 0

    async def serve(stream: Stream[bytes]) -> None:
        gate.received.extend(await read_all(stream))

    async with open_pair(kind) as (one, other), trio.open_nursery() as nursery:
        other.serve(SINK, gated(gate, serve))

        async def send() -> None:
            nonlocal sent
            async with await one.open(other.node_id, SINK) as stream:
                for _ in range(count):
                    await stream.send(message)
                    sent += 1

        nursery.start_soon(send)
        await gate.reached.wait()
        for number in range(30):
            assert await echo(one, other, str(number)) == str(number)
        assert sent * len(message) <= AHEAD_BYTES_MAX
        gate.open.set()
        await gate.done.wait()

    assert gate.received == [message] * count


@both
async def test_cancelling_a_send_at_any_point_harms_no_other_stream(kind: Kind) -> None:
    """Every cancelled send either did nothing to its stream, or broke that one alone."""
    intact = broken = 0

    async def serve(stream: Stream[bytes]) -> None:
        async for message in stream:
            assert message in {b"s", b"t" * 20_000, b"b" * 400_000}

    async with open_pair(kind) as (one, other):
        other.serve(SINK, serve)
        async with await one.open(other.node_id, ECHO) as sibling:
            for number in range(68):
                message = (b"t" * 20_000, b"b" * 400_000)[number % 2]
                async with await one.open(other.node_id, SINK) as stream:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(send_until_broken, stream, message)
                        for _ in range(number // 2 % 17):
                            await trio.lowlevel.checkpoint()
                        nursery.cancel_scope.cancel()
                    try:
                        await stream.send(b"s")
                        intact += 1
                    except StreamBroken:
                        broken += 1
                await sibling.send(str(number))
                assert await sibling.receive() == str(number)
        assert other.counters.failures == other.counters.violations == 0

    assert intact
    assert broken


@both
async def test_a_cancelled_receive_has_taken_nothing(kind: Kind) -> None:
    async with open_pair(kind) as (one, other), await one.open(other.node_id, ECHO) as stream:
        got = []
        for number in range(40):
            await stream.send(str(number))
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_cancel_after, scope, number % 12)
                    got.append(await stream.receive())
                    nursery.cancel_scope.cancel()
        await stream.close_send()
        got += [message async for message in stream]

    assert got == [str(number) for number in range(40)]


async def _cancel_after(scope: trio.CancelScope, checkpoints: int) -> None:
    for _ in range(checkpoints):
        await trio.lowlevel.checkpoint()
    scope.cancel()


@both
async def test_cancelled_opens_leave_nothing_behind(kind: Kind) -> None:
    """More of them than there may be streams at once."""
    async with open_pair(kind) as (one, other):
        for number in range(400):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_cancel_after, scope, number % 15)
                    async with await one.open(other.node_id, ECHO):
                        pass
                    nursery.cancel_scope.cancel()


@both
async def test_a_message_above_the_cap_is_refused_at_the_sender_and_its_stream_goes_on(kind: Kind) -> None:
    small = StreamProtocol[str](ECHO.name, FrameCodec(str, 100))
    async with open_pair(kind) as (one, other), await one.open(other.node_id, small) as stream:
        with pytest.raises(ValueError, match="above the cap"):
            await stream.send("x" * 200)
        await stream.send("fits")
        assert await stream.receive() == "fits"


@both
@pytest.mark.parametrize("theirs", [FrameCodec(int, 1000), FrameCodec(str, 8 << 20)], ids=["type", "length"])
async def test_a_violation_breaks_its_stream_and_is_counted(kind: Kind, theirs: FrameCodec[int] | FrameCodec[str]) -> None:
    async with open_pair(kind) as (one, other), await one.open(other.node_id, ECHO) as sibling:
        rude = StreamProtocol[object](ECHO.name, theirs)  # type: ignore[arg-type]  # what the types forbid
        async with await one.open(other.node_id, rude) as stream:
            with suppress(StreamBroken):  # the long one is cut off while it is sent
                await stream.send(7 if theirs.max_bytes == 1000 else "x" * (5 << 20))
            with pytest.raises(StreamBroken):
                await stream.receive()
        await sibling.send("unharmed")
        assert await sibling.receive() == "unharmed"
        assert (other.counters.violations, other.counters.failures) == (1, 0)


@both
async def test_a_violation_is_raised_to_the_reader_after_what_came_before_it(kind: Kind) -> None:
    async def serve(stream: Stream[object]) -> None:
        await stream.send("right")
        await stream.send(17)

    async with open_pair(kind) as (one, other):
        other.serve(StreamProtocol[object]("/test/odd/1", FrameCodec(object, 100)), serve)
        async with await one.open(other.node_id, StreamProtocol[str]("/test/odd/1", FrameCodec(str, 100))) as stream:
            assert await stream.receive() == "right"
            for _ in range(2):
                with pytest.raises(ProtocolViolation):
                    await stream.receive()


@both
async def test_a_failure_in_a_served_stream_goes_no_further(kind: Kind) -> None:
    async def serve(stream: Stream[bytes]) -> None:
        await stream.receive()
        raise RuntimeError("connection closed")  # a text that libp2p takes for a sign of its own

    async with open_pair(kind) as (one, other), await one.open(other.node_id, ECHO) as sibling:
        other.serve(SINK, serve)
        for _ in range(3):
            async with await one.open(other.node_id, SINK) as stream:
                await stream.send(b"x")
                with pytest.raises(StreamBroken):
                    await stream.receive()
        await sibling.send("unharmed")
        assert await sibling.receive() == "unharmed"
        assert other.counters.failures == 3


@both
async def test_nobody_serves_and_nobody_there(kind: Kind) -> None:
    async with open_pair(kind) as (one, other):
        with pytest.raises(ProtocolRefused):
            await one.open(other.node_id, SINK)
        with pytest.raises(NotConnected):
            await one.open(new_identity().node_id, SINK)
        while not other.counters.streams_refused:
            await trio.lowlevel.checkpoint()


@both
async def test_streams_at_once_are_bounded_and_come_free_again(kind: Kind) -> None:
    async with open_pair(kind) as (one, other):
        for _ in range(2):
            streams = [await one.open(other.node_id, ECHO) for _ in range(STREAMS_MAX)]
            with pytest.raises(ProtocolRefused):
                await one.open(other.node_id, ECHO)
            for number, stream in enumerate(streams):
                await stream.send(str(number))
            for number, stream in enumerate(streams):
                assert await stream.receive() == str(number)
                await stream.aclose()
            with trio.fail_after(5):
                while True:  # the other end needs a moment to see them go
                    with suppress(ProtocolRefused):
                        await (await one.open(other.node_id, ECHO)).aclose()
                        break
                    await trio.sleep(0.01)


@both
async def test_many_streams_at_once(kind: Kind) -> None:
    async with open_pair(kind) as (one, other):

        async def talk(number: int) -> None:
            async with await one.open(other.node_id, ECHO) as stream:
                for step in range(10):
                    await stream.send(f"{number}.{step}" * (number + 1))
                    assert await stream.receive() == f"{number}.{step}" * (number + 1)

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(talk, number)
