"""The memory network's faults do what they say, and one seed gives one run."""

import pytest
import trio
from trio.testing import MockClock

from p2p.ids import NodeId
from p2p.memory_transport import PORT, MemoryNetwork, MemoryTransport, open_network
from p2p.stream import Peer, Stream, StreamBroken
from p2p.transport import DIAL_SECONDS, ListenFailed, Transport, Unreachable
from tests.p2p.transport_lab import CLUSTER, ECHO, SINK, Gate, connect, echo, new_identity, serve_echo, until_gone


def node(network: MemoryNetwork, host: str | None = None, node_id: NodeId | None = None):  # type: ignore[no-untyped-def] # noqa: ANN201
    return network.open_transport(node_id or new_identity().node_id, CLUSTER, host=host)


async def test_everything_takes_the_latency(autojump_clock: MockClock) -> None:
    async with open_network() as network, node(network) as one, node(network) as other:
        other.serve(ECHO, serve_echo)
        network.set_latency(0.1)
        await one.dial(other.addresses[0])
        assert trio.current_time() == pytest.approx(0.3)  # three messages of a handshake
        stream = await one.open(other.node_id, ECHO)
        assert trio.current_time() == pytest.approx(0.5)
        await stream.send("a")
        await stream.receive()
        assert trio.current_time() == pytest.approx(0.7)
        network.link(other.node_id, one.node_id).latency = 1.0
        await stream.send("b")
        await stream.receive()
        assert trio.current_time() == pytest.approx(1.8)
        await stream.aclose()


async def test_jitter_keeps_the_order(autojump_clock: MockClock) -> None:
    async with open_network(seed=7) as network, node(network) as one, node(network) as other:
        network.set_latency(0.01, jitter=0.5)
        other.serve(ECHO, serve_echo)
        await one.dial(other.addresses[0])
        async with await one.open(other.node_id, ECHO) as stream:
            for number in range(50):
                await stream.send(str(number))
            await stream.close_send()
            assert [message async for message in stream] == [str(number) for number in range(50)]


async def test_a_one_way_cut_holds_what_is_on_it(autojump_clock: MockClock) -> None:
    gate = Gate()

    async def serve(stream: Stream[bytes]) -> None:
        for number in range(3):
            await stream.send(bytes([number]))
        gate.received.extend([message async for message in stream])
        gate.done.set()

    async with open_network() as network, node(network) as one, node(network) as other:
        other.serve(SINK, serve)
        await connect(one, other)
        stream = await one.open(other.node_id, SINK)
        network.link(one.node_id, other.node_id).cut = True
        await stream.send(b"held")
        await stream.close_send()
        assert [await stream.receive() for _ in range(3)] == [bytes([number]) for number in range(3)]  # the other way works
        await trio.sleep(100)
        assert not gate.done.is_set()
        assert other.node_id in one.peers

        network.mend()
        await gate.done.wait()

        assert gate.received == [b"held"]
        await stream.aclose()


async def test_nobody_answers_across_a_cut(autojump_clock: MockClock) -> None:
    async with open_network() as network, node(network) as one, node(network) as other:
        network.partition({one.node_id}, {other.node_id})
        assert await one.dial(other.addresses[0]) == Unreachable(f"no answer for {DIAL_SECONDS:g} s")
        assert trio.current_time() == pytest.approx(DIAL_SECONDS)
        network.mend()
        assert isinstance(await one.dial(other.addresses[0]), Peer)
        network.partition({one.node_id}, {other.node_id})
        other.serve(ECHO, serve_echo)
        with pytest.raises(StreamBroken, match="within 5 s"):
            await one.open(other.node_id, ECHO)


async def test_a_connection_dropped_across_a_cut_is_seen_there_when_the_cut_is_mended(autojump_clock: MockClock) -> None:
    async with open_network() as network, node(network) as one, node(network) as other:
        await connect(one, other)
        network.partition({one.node_id}, {other.node_id})
        await one.drop(other.node_id)
        await trio.sleep(60)
        assert one.node_id in other.peers
        network.mend()
        await until_gone(other, one)


async def test_a_new_connection_replaces_one_that_only_the_other_end_still_holds(autojump_clock: MockClock) -> None:
    """As after a cut: both ends in turn, since only one of them decides."""
    for order in (0, 1):
        async with open_network() as network, node(network) as first, node(network) as second:
            one, other = (first, second) if (first.node_id < second.node_id) == bool(order) else (second, first)
            other.serve(ECHO, serve_echo)
            await connect(one, other)
            held = other.peers[one.node_id].connection
            await trio.sleep(60)
            network.partition({one.node_id}, {other.node_id})
            await one.drop(other.node_id)
            await trio.sleep(60)
            network.link(one.node_id, other.node_id).cut = False
            network.link(other.node_id, one.node_id).cut = False
            assert isinstance(await one.dial(other.addresses[0]), Peer)
            await trio.sleep(1)
            assert other.peers[one.node_id].connection != held
            assert await echo(one, other, "new") == "new"


async def test_severed_is_seen_at_both_ends_at_once(autojump_clock: MockClock) -> None:
    async with open_network() as network, node(network) as one, node(network) as other, node(network) as third:
        await connect(one, other)
        await connect(one, third)
        network.set_latency(10)
        network.sever(one.node_id, other.node_id)
        assert list(one.peers) == [third.node_id]
        assert not other.peers


async def test_a_crash_lets_nothing_more_out(autojump_clock: MockClock) -> None:
    """Not even from what runs when it is cancelled; and its address is free again."""
    ended = []

    async def run(network: MemoryNetwork, task_status: trio.TaskStatus[Transport] = trio.TASK_STATUS_IGNORED) -> None:
        async with node(network, "10.1.1.1") as transport:
            transport.serve(SINK, serve)
            task_status.started(transport)
            await trio.sleep_forever()

    async def serve(stream: Stream[bytes]) -> None:
        try:
            await stream.send(b"before")
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                try:
                    await stream.send(b"after")
                except StreamBroken as broken:
                    ended.append(str(broken))
                await stream.aclose()

    async with open_network() as network, node(network) as one, trio.open_nursery() as nursery:
        network.set_latency(0.01)
        victim: Transport = await nursery.start(run, network)
        await one.dial(victim.addresses[0])
        async with await one.open(victim.node_id, SINK) as stream:
            assert await stream.receive() == b"before"
            network.crash(victim.node_id)
            with pytest.raises(StreamBroken, match="the peer closed the connection"):
                await stream.receive()
        assert ended
        assert not one.peers
        assert await one.dial(victim.addresses[0]) == Unreachable("connection refused", refused=True)
        async with node(network, "10.1.1.1", victim.node_id) as reborn:
            peer = await one.dial(victim.addresses[0])
            assert isinstance(peer, Peer)
            assert peer.boot == reborn.boot
            with pytest.raises(ListenFailed, match="address already in use"):
                async with node(network, "10.1.1.1"):
                    pass


async def story(seed: int) -> list[tuple[float, str]]:
    """When each answer came, over a network of random latency."""
    seen: list[tuple[float, str]] = []
    async with open_network(seed) as network, node(network) as hub:
        network.set_latency(0.001, jitter=0.2)
        hub.serve(ECHO, serve_echo)

        async def talk(transport: MemoryTransport, name: str) -> None:
            async with await transport.open(hub.node_id, ECHO) as stream:
                for number in range(10):
                    await stream.send(f"{name}{number}")
                    seen.append((trio.current_time(), await stream.receive()))

        async with node(network) as one:
            await one.dial(f"10.0.0.1:{PORT}")
            await talk(one, "a")
            await talk(one, "b")
    return seen


async def test_one_seed_gives_one_run(autojump_clock: MockClock) -> None:
    runs = []
    for seed in (1, 1, 2):
        start = trio.current_time()
        runs.append([(round(time - start, 9), text) for time, text in await story(seed)])

    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
