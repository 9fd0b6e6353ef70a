"""What `p2p.transport` promises, of both transports."""

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from p2p.cluster_key import cluster, new_key
from p2p.stream import Stream, StreamBroken, StreamProtocol
from p2p.transport import STREAMS_MAX, Incompatible, NotConnected, ProtocolRefused, Transport, Unreachable, Versions
from p2p.wire import FrameCodec, ProtocolViolation
from tests.p2p.transport_lab import ECHO, SINK, Gate, Kind, connect, echo, narrow, new_identity, open_lab, open_pair, until_gone

# Above it a sender has to wait for its reader: the stream's window and what both ends hold on the way.
AHEAD_BYTES_MAX = 2 << 20

both = pytest.mark.parametrize("kind", ["memory", "libp2p"])


def gated(gate: Gate, act: Callable[[Stream[bytes]], Awaitable[None]]) -> Callable[[Stream[bytes]], Awaitable[None]]:
    """Serve a stream by `act` once the gate is open, and keep how it ended."""

    async def serve(stream: Stream[bytes]) -> None:
        gate.reached.set()
        try:
            await gate.open.wait()
            await act(stream)
        except BaseException as error:
            gate.error = error
            raise
        finally:
            gate.done.set()

    return serve


async def read_all(stream: Stream[bytes]) -> list[bytes]:
    return [message async for message in stream]


async def send_for_ever(stream: Stream[bytes], message: bytes) -> None:
    while True:
        await stream.send(message)


async def send_until_broken(stream: Stream[bytes], message: bytes) -> None:
    with suppress(StreamBroken):
        await send_for_ever(stream, message)


async def stay(_stream: Stream[bytes]) -> None:
    await trio.sleep_forever()


@both
async def test_a_connection_shows_at_both_ends(kind: Kind) -> None:
    async with open_lab(kind) as lab, lab.node(boot=b"12345678") as one, lab.node() as other:
        revision = other.revision

        peer = await connect(one, other)

        assert await other.wait_past(revision) > revision
        assert (peer.node_id, peer.dialled, peer.version) == (other.node_id, True, 1)
        seen = other.peers[one.node_id]
        assert (seen.boot, seen.dialled, seen.addresses) == (b"12345678", False, one.addresses)
        assert all(address.endswith(f"/p2p/{one.node_id}") for address in one.addresses)


@both
async def test_dialling_a_connected_peer_makes_no_second_connection(kind: Kind) -> None:
    async with open_pair(kind) as (one, other):
        first = one.peers[other.node_id]

        assert await one.dial(other.addresses[0]) is first
        with_no_id = other.addresses[0].partition("/p2p/")[0]
        assert await one.dial(with_no_id) is first
        assert other.counters.duplicates_closed + one.counters.duplicates_closed > 0


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
        rude = StreamProtocol[object](ECHO.name, theirs)  # type: ignore[arg-type]
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
async def test_dropping_a_peer_breaks_its_streams_and_it_can_be_dialled_again(kind: Kind) -> None:
    gate = Gate()
    async with open_pair(kind) as (one, other):
        other.serve(SINK, gated(gate, lambda stream: stream.receive()))  # type: ignore[arg-type, return-value]
        gate.open.set()
        before = one.peers[other.node_id]
        stream = await one.open(other.node_id, SINK)
        await gate.reached.wait()

        await one.drop(other.node_id)

        assert other.node_id not in one.peers
        with pytest.raises(StreamBroken):
            await stream.receive()
        with pytest.raises(StreamBroken):
            await stream.send(b"x")
        await stream.aclose()
        await gate.done.wait()
        assert isinstance(gate.error, StreamBroken)
        await until_gone(other, one)
        after = await connect(one, other)
        assert after.connection > before.connection


@both
async def test_leaving_ends_what_was_served_and_tells_the_peer(kind: Kind) -> None:
    async with open_lab(kind) as lab, lab.node() as one:
        async with lab.node() as other:
            other.serve(SINK, lambda stream: stream.send(b"hello"))
            await connect(one, other)
            clean = await one.open(other.node_id, SINK)
            assert await clean.receive() == b"hello"
            other.serve(SINK, stay)
            open_still = await one.open(other.node_id, SINK)

        await until_gone(one, other)
        assert await read_all(clean) == []
        with pytest.raises(StreamBroken):
            await open_still.receive()
        for stream in (clean, open_still):
            await stream.aclose()
        assert isinstance(await one.dial(other.addresses[0]), Unreachable)


@both
async def test_what_was_sent_before_leaving_arrives(kind: Kind) -> None:
    got: list[list[bytes]] = []

    async def serve(stream: Stream[bytes]) -> None:
        got.append(await read_all(stream))

    async with open_lab(kind) as lab, lab.node() as one:
        one.serve(SINK, serve)
        async with lab.node() as other:
            await connect(other, one)
            async with await other.open(one.node_id, SINK) as stream:
                if kind == "libp2p":
                    narrow(one)
                    narrow(other)
                for _ in range(20):
                    await stream.send(b"x" * 10_000)
        await until_gone(one, other)
        while not got:
            await trio.lowlevel.checkpoint()

    assert got == [[b"x" * 10_000] * 20]


@both
async def test_simultaneous_dials_leave_one_connection(kind: Kind) -> None:
    """And what is opened on it right away works: the other one was never shown."""
    for _ in range(8):
        async with open_lab(kind) as lab, lab.node() as one, lab.node() as other:
            for node in (one, other):
                node.serve(ECHO, lambda stream: stream.send("hi"))

            async def dial(source: Transport, target: Transport) -> None:
                assert not isinstance(await source.dial(target.addresses[0]), Unreachable)
                async with await source.open(target.node_id, ECHO) as stream:
                    assert await stream.receive() == "hi"

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(dial, one, other)
                    nursery.start_soon(dial, other, one)
            assert one.peers[other.node_id].dialled != other.peers[one.node_id].dialled
            assert one.peers[other.node_id].connection == next(iter(one.peers.values())).connection
            assert (len(one.peers), len(other.peers)) == (1, 1)


@both
async def test_no_node_is_its_own_peer(kind: Kind) -> None:
    async with open_lab(kind) as lab, lab.node() as one:
        for address in (one.addresses[0], one.addresses[0].partition("/p2p/")[0]):
            assert await one.dial(address) == Unreachable("that is this node itself")
        assert not one.peers
        assert one.clash is None


@both
async def test_a_copied_identity_is_noticed_at_both_ends(kind: Kind) -> None:
    same = new_identity()
    async with open_lab(kind) as lab, lab.node(same) as one, lab.node(same) as other:
        outcome = await one.dial(other.addresses[0].partition("/p2p/")[0])

        assert isinstance(outcome, Unreachable)
        assert "identity" in outcome.reason
        while other.clash is None:
            await other.wait_past(other.revision)
        assert one.clash
        assert not one.peers
        assert not other.peers


@both
@pytest.mark.parametrize(
    "theirs", [cluster("home", new_key()), cluster("home", None), cluster("away", None)], ids=["key", "no key", "name"]
)
async def test_clusters_never_mix(kind: Kind, theirs: object) -> None:
    async with open_lab(kind) as lab, lab.node() as one, lab.node(cluster=theirs) as stranger:  # type: ignore[arg-type]
        for source, target in ((one, stranger), (stranger, one)):
            outcome = await source.dial(target.addresses[0])

            assert outcome == Unreachable("a node of another cluster: its cluster name or key differs")
            while not target.counters.handshakes_refused:
                await trio.lowlevel.checkpoint()
        for node in (one, stranger):
            assert not node.peers
            assert not node.incompatible


@both
async def test_another_protocol_version_is_shown_as_such_at_both_ends(kind: Kind) -> None:
    async with open_lab(kind) as lab, lab.node(versions=Versions(1, 2)) as one, lab.node(versions=Versions(3, 4)) as newer:
        with capture_logs() as logs:
            for _ in range(2):
                outcome = await one.dial(newer.addresses[0])

                assert outcome == Unreachable("it speaks protocol version 3-4, this node 1-2")
            while one.node_id not in newer.incompatible:
                await newer.wait_past(newer.revision)
            await trio.testing.wait_all_tasks_blocked(0.01)
        warned = [(entry["peer"], entry["versions"]) for entry in logs if entry["log_level"] == "warning"]
        assert sorted(warned) == sorted([(newer.node_id, "3-4"), (one.node_id, "1-2")])
        assert one.incompatible[newer.node_id].versions == Versions(3, 4)
        met = newer.incompatible[one.node_id]
        assert isinstance(met, Incompatible)
        assert met.versions == Versions(1, 2)
        assert not one.peers
        assert not newer.peers


@both
async def test_the_highest_version_that_both_speak_is_agreed_on(kind: Kind) -> None:
    async with open_lab(kind) as lab, lab.node(versions=Versions(1, 3)) as one, lab.node(versions=Versions(2, 5)) as other:
        assert (await connect(one, other)).version == 3
        assert other.peers[one.node_id].version == 3


@both
async def test_another_node_than_expected_is_not_connected(kind: Kind) -> None:
    async with open_lab(kind) as lab, lab.node() as one, lab.node() as other:
        wrong = f"{other.addresses[0].partition('/p2p/')[0]}/p2p/{new_identity().node_id}"

        outcome = await one.dial(wrong)

        assert outcome == Unreachable("another node than the one expected answers there")
        assert not one.peers


@both
async def test_a_dial_that_comes_to_nothing_says_why(kind: Kind) -> None:
    async with open_lab(kind) as lab, lab.node() as one:
        async with lab.node() as other:
            gone = other.addresses[0]
        assert await one.dial(gone) == Unreachable("connection refused", refused=True)
        outcome = await one.dial("nonsense")
        assert isinstance(outcome, Unreachable)
        assert "needs a port" in outcome.reason


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
