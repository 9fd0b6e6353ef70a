"""What `p2p.transport` promises of connections, of both transports."""

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from p2p.cluster_key import cluster, new_key
from p2p.stream import Stream, StreamBroken
from p2p.transport import Incompatible, Transport, Unreachable, Versions
from tests.p2p.transport_lab import (
    ECHO,
    SINK,
    Gate,
    Kind,
    both,
    connect,
    gated,
    narrow,
    new_identity,
    open_lab,
    open_pair,
    read_all,
    stay,
    until_gone,
)


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
async def test_dropping_a_peer_breaks_its_streams_and_it_can_be_dialled_again(kind: Kind) -> None:
    gate = Gate()
    async with open_pair(kind) as (one, other):
        other.serve(SINK, gated(gate, lambda stream: stream.receive()))  # type: ignore[arg-type, return-value]  # handlers of several results
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
@pytest.mark.parametrize(
    "theirs", [cluster("home", new_key()), cluster("home", None), cluster("away", None)], ids=["key", "no key", "name"]
)
async def test_clusters_never_mix(kind: Kind, theirs: object) -> None:
    async with open_lab(kind) as lab, lab.node() as one, lab.node(cluster=theirs) as stranger:  # type: ignore[arg-type]  # handlers of several results
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
