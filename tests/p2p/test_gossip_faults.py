"""What peers and networks do to the loop around the replicated state: silence, slowness, garbage."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from p2p.gossip_link import QUEUE_BYTES_MAX, SYNC, SyncLink
from p2p.gossip_streams import REASONS_MAX
from p2p.lattice import ALIVE, Generation, Liveness, Standing
from p2p.memory_transport import MemoryTransport
from p2p.stream import Stream, StreamBroken, StreamProtocol
from p2p.sync_wire import FRAME_BYTES_MAX, Hello, node16
from p2p.transport import OPEN_SECONDS, Transport, Unreachable
from p2p.wire import FrameCodec
from tests.p2p.fuzz import bend, body, samples
from tests.p2p.gossip_lab import NOTE, Gossips, Member, agree, identity, meshed, open_gossips, until
from tests.p2p.transport_lab import CLUSTER, read_all, until_gone

RAW = StreamProtocol[bytes](SYNC.name, FrameCodec(object, 1 << 20))  # writes what it is given as msgpack


def cut(gossips: Gossips, *sides: list[Member]) -> None:
    gossips.network.partition(*({member.node_id for member in side} for side in sides))


async def test_a_cut_that_ends_within_a_second_is_no_death(autojump_clock: MockClock) -> None:
    async with open_gossips() as gossips:
        members = await gossips.mesh(5)
        await trio.sleep(5)
        seen: set[Liveness | None] = set()
        for member in members[:4]:
            member.gossip.on_changed.append(lambda _, member=member: seen.add(member.sees(members[4])))  # type: ignore[misc]  # a default binds the loop variable
        peers = [dict(member.transport.peers) for member in members]
        cut(gossips, members[:4], members[4:])
        await trio.sleep(0.9)

        gossips.network.mend()

        await trio.sleep(10)
        assert agree(members)
        assert Liveness.DEAD not in seen
        assert [dict(member.transport.peers) for member in members] == peers


@pytest.mark.parametrize("seconds", [20.0, 300.0])
async def test_a_silent_partition_heals_within_seconds(autojump_clock: MockClock, seconds: float) -> None:
    """A20 (petals#254): nothing gets through for five minutes, and both sides go on writing."""
    async with open_gossips() as gossips:
        members = await gossips.mesh(6)
        halves = members[:3], members[3:]
        cut(gossips, *halves)
        await trio.sleep(seconds / 2)
        for number, member in enumerate(members):
            member.gossip.write(NOTE, number, "from this side")
        await trio.sleep(seconds / 2)
        for half, other in (halves, halves[::-1]):
            assert len({member.root for member in half}) == 1
            assert all(member.sees(lost) is Liveness.DEAD for member in half for lost in other)

        gossips.network.mend()

        assert await until(lambda: agree(members), 30) < 10
        assert members[0].note(members[5], 5) == members[5].note(members[5], 5) == "from this side"
        await until(lambda: meshed(members), 10)
        assert not gossips.ended


async def test_one_that_reads_nothing_holds_up_nobody_and_has_all_in_the_end(autojump_clock: MockClock) -> None:
    """A12 (exo#1434): 10,000 updates while one of three sleeps for five seconds."""
    async with open_gossips() as gossips:
        writer, slow, other = await gossips.mesh(3)
        gossips.network.link(writer.node_id, slow.node_id).cut = True
        link = writer.gossip._streams._links[slow.node]
        most = 0
        for number in range(10_000):
            writer.gossip.write(NOTE, number % 100, f"{number:>1000}")
            most = max(most, link._queued)
            if number % 20 == 19:
                await trio.sleep(0.01)
        assert await until(lambda: other.note(writer, 99) == f"{9999:>1000}", 1) <= 0.1

        gossips.network.mend()

        assert await until(lambda: agree([writer, slow, other]), 10) < 10
        assert slow.note(writer, 99) == f"{9999:>1000}"
        assert writer.gossip.counters.overflows > 0
        assert QUEUE_BYTES_MAX / 2 < most <= QUEUE_BYTES_MAX
        await until(lambda: meshed([writer, slow, other]), 10)
        assert not gossips.ended


def greeting(transport: Transport) -> bytes:
    """What an honest node would say first."""
    node = node16(transport.node_id)
    return body(Hello(1, 1, bytes(16), node, Standing(Generation(1, 1), 0, ALIVE), None))


@asynccontextmanager
async def rude_peer(gossips: Gossips, victim: Member) -> AsyncIterator[MemoryTransport]:
    """One that holds the cluster's key, whose id is lower than the victim's, so that the sync stream is its to open."""
    rude = min((identity(number) for number in range(100, 120)), key=lambda candidate: candidate.node_id)
    assert rude.node_id < victim.node_id
    async with gossips.network.open_transport(rude.node_id, CLUSTER) as transport:
        yield transport


async def open_greeted(rude: Transport, victim: Member) -> Stream[bytes]:
    """A stream on which the victim would take frames."""
    while rude.node_id in victim.transport.peers and victim.node_id not in rude.peers:
        await victim.transport.wait_past(victim.transport.revision)
    assert not isinstance(await rude.dial(victim.address), Unreachable)
    stream = await rude.open(victim.node_id, SYNC)
    await stream.send(greeting(rude))
    return stream


async def test_garbage_ends_its_stream_and_nothing_else(autojump_clock: MockClock) -> None:
    """A11 (exo#2128): noise, cut and bent frames, unknown kinds, wrong types; then an honest peer is heard as before."""
    chance = random.Random(5)
    async with open_gossips() as gossips:
        victim, other = await gossips.mesh(2)
        victim.gossip.write(NOTE, 1, "mine")
        connection = victim.transport.peers[other.node_id]
        with capture_logs() as logs:
            async with rude_peer(gossips, victim) as rude:
                sent, ended = 0, 0
                while sent < 1000:
                    stream = await open_greeted(rude, victim)
                    try:
                        while True:
                            frame = bend(body(chance.choice(samples(chance))), chance) or b"\xc1"
                            sent += 1
                            await stream.send(frame)
                            with trio.move_on_after(0.01):
                                while True:
                                    await stream.receive()
                    except (StreamBroken, trio.EndOfChannel):
                        ended += 1
                    await stream.aclose()
                    await until_gone(rude, victim.transport)
                    await until_gone(victim.transport, rude)
        assert ended > 300
        assert victim.gossip.counters.faults + victim.core.violations.not_greeted >= ended
        assert victim.core.violations.bad_frame > 300
        assert victim.transport.counters.failures == 0
        told = [entry for entry in logs if entry["event"] == "a peer broke a rule"]
        assert 1 <= len(told) <= 2 * REASONS_MAX
        assert victim.note(victim, 1) == "mine"
        assert victim.transport.peers[other.node_id] is connection
        other.gossip.write(NOTE, 2, "still heard")
        await until(lambda: victim.note(other, 2) == "still heard", 0.1)
        assert not gossips.ended


@pytest.mark.parametrize("frame", [b"x" * (FRAME_BYTES_MAX + 1), b""], ids=["too long", "empty"])
async def test_a_frame_above_the_cap_or_without_a_body_ends_the_connection(autojump_clock: MockClock, frame: bytes) -> None:
    async with open_gossips() as gossips:
        victim = await gossips.start(1)
        async with rude_peer(gossips, victim) as rude:
            await rude.dial(victim.address)
            async with await rude.open(victim.node_id, RAW) as stream:
                await stream._hand_over(len(frame).to_bytes(4, "big") + frame + b"\0" * 8)
                await until_gone(rude, victim.transport)
        assert victim.gossip.counters.faults == 1


async def test_who_opens_streams_that_are_not_its_to_open_is_dropped(autojump_clock: MockClock) -> None:
    async with open_gossips() as gossips:
        victim = await gossips.start(1)
        async with rude_peer(gossips, victim) as rude:
            first = await open_greeted(rude, victim)
            await rude.open(victim.node_id, SYNC)
            with pytest.raises(StreamBroken):
                await read_all(first)
            await until_gone(rude, victim.transport)
        high = max((identity(number) for number in range(100, 120)), key=lambda candidate: candidate.node_id)
        assert high.node_id > victim.node_id
        async with gossips.network.open_transport(high.node_id, CLUSTER) as rude:
            await rude.dial(victim.address)
            await rude.open(victim.node_id, SYNC)
            await until_gone(rude, victim.transport)
        assert victim.gossip.counters.faults == 2
        assert not gossips.ended


async def test_who_serves_no_sync_stream_may_stay_for_other_things(autojump_clock: MockClock) -> None:
    async with open_gossips() as gossips:
        victim = await gossips.start(1)
        for number in (100, 101, 102, 103):
            async with gossips.network.open_transport(identity(number).node_id, CLUSTER) as guest:
                await guest.dial(victim.address)
                await trio.sleep(30)
                assert victim.node_id in guest.peers
        assert victim.gossip.counters.faults == 0
        assert len(victim.listed()) == 1


async def test_who_does_not_answer_when_the_stream_is_opened_is_dropped(autojump_clock: MockClock) -> None:
    """It was cut off just when it had connected; else nobody would dial it again."""
    async with open_gossips() as gossips:
        victim = await gossips.start(1)
        high = max((identity(number) for number in range(100, 120)), key=lambda candidate: candidate.node_id)
        async with gossips.network.open_transport(high.node_id, CLUSTER) as guest:
            await guest.dial(victim.address)
            gossips.network.partition({guest.node_id}, {victim.node_id})
            with trio.fail_after(OPEN_SECONDS + 0.1):
                await until_gone(victim.transport, guest)


async def test_a_queue_that_is_full_is_dropped_whole(autojump_clock: MockClock) -> None:
    async with open_gossips() as gossips:
        one, other = await gossips.mesh(2)
        link = SyncLink(one.gossip._streams._links[other.node].stream)
        frame = b"x" * (QUEUE_BYTES_MAX // 4)
        assert [link.put(frame) for _ in range(6)] == [True, True, True, True, False, True]
        assert list(link._queue) == [frame]
        assert link._queued == len(frame)


async def test_who_never_greets_is_dropped(autojump_clock: MockClock) -> None:
    async with open_gossips() as gossips:
        victim = await gossips.start(1)
        async with rude_peer(gossips, victim) as rude:
            await rude.dial(victim.address)
            await rude.open(victim.node_id, SYNC)
            with trio.fail_after(5):
                await until_gone(rude, victim.transport)
        assert victim.gossip.counters.faults == 1
