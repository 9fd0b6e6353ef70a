"""Whom the dialler dials and when; and that it keeps nodes connected, whatever happens to the network."""

import math
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from p2p.address_book import NODES_MAX, AddressBook, keep_book, load_book
from p2p.dialler import (
    ADDRESSES_MAX,
    DELAY_SECONDS_MAX,
    REDIAL_SECONDS_MAX,
    REST_SECONDS,
    TARGETS_MAX,
    TRIES_PER_SECOND,
    Dialler,
    Target,
    addresses_of,
    delay,
    due,
    merge_addresses,
    next_due,
    summary,
)
from p2p.ids import NodeId, node_id_of
from p2p.memory_transport import MemoryNetwork, MemoryTransport, open_network
from p2p.stream import Peer
from p2p.transport import DIAL_SECONDS, ITSELF, Transport, Unreachable
from tests.p2p.transport_lab import CLUSTER, new_identity, until_gone

NODES = [node_id_of(bytes([number]) * 32) for number in range(4)]


def address(node_id: NodeId | None = None, host: str = "10.0.0.9") -> str:
    return f"/ip4/{host}/tcp/1" + (f"/p2p/{node_id}" if node_id else "")


@given(st.integers(0, 10_000), st.integers(0, 5000), st.floats(0, 1))
def test_delays_grow_to_a_bound_that_spreads_many_targets(failures: int, unconnected: int, spread: float) -> None:
    seconds = delay(failures, unconnected, spread)
    bound = max(DELAY_SECONDS_MAX, unconnected / TRIES_PER_SECOND)

    assert 0 <= seconds <= 1.21 * bound
    assert seconds <= delay(failures + 1, unconnected, spread)
    if failures > 20:
        assert seconds >= 0.8 * bound


def test_due_are_those_unconnected_and_not_being_dialled() -> None:
    fresh, failed, later, dialling, connected, itself = targets = [
        Target((address(),), NODES[0]),
        Target((address(),), None, "nas:1", failures=3, next_try=5.0),
        Target((address(),), NODES[1], next_try=20.0),
        Target((address(),), NODES[2], dialling=True),
        Target((address(),), NODES[3]),
        Target((address(),), None, "localhost:1", why=ITSELF),
    ]

    assert due(targets, {NODES[3]}, 10.0) == [fresh, failed]
    assert next_due([failed, later, dialling, connected, itself], {NODES[3]}) == 5.0
    assert next_due([later, dialling, connected], {NODES[1], NODES[3]}) == math.inf
    assert due([Target((), NODES[0])], set(), 10.0) == []


def test_addresses_that_are_claimed_get_the_id_of_who_claims_them() -> None:
    claimed = [address(), address(NODES[0], "10.0.0.8"), address(NODES[1]), "nonsense", "nas:0", "nas:7"]

    assert addresses_of(NODES[0], claimed) == [
        address(NODES[0]),
        address(NODES[0], "10.0.0.8"),
        f"/dns/nas/tcp/7/p2p/{NODES[0]}",
    ]
    assert merge_addresses(["c", "a"], ["a", "b"]) == ("c", "a", "b")
    assert len(merge_addresses([str(number) for number in range(50)], [])) == ADDRESSES_MAX


def test_the_reason_of_several_addresses() -> None:
    refused, silent = Unreachable("connection refused", refused=True), Unreachable("no answer for 3 s")

    assert summary({"a": refused, "b": refused}) == refused
    assert summary({"a": refused, "b": silent}) == Unreachable("a: connection refused; b: no answer for 3 s")


@asynccontextmanager
async def dialling(
    network: MemoryNetwork, *joins: str, host: str | None = None
) -> AsyncIterator[tuple[MemoryTransport, Dialler]]:
    async with network.open_transport(new_identity().node_id, CLUSTER, host=host) as transport, trio.open_nursery() as nursery:
        dialler = Dialler(transport, joins, random.Random(1))
        nursery.start_soon(dialler.run)
        yield transport, dialler
        nursery.cancel_scope.cancel()


async def until_peers(transport: Transport, count: int) -> None:
    while len(transport.peers) != count:
        await transport.wait_past(transport.revision)


async def test_silent_addresses_hold_up_nobody_and_are_shown(autojump_clock: MockClock) -> None:
    """Twenty that take a connection and say nothing, and a good one behind them."""
    async with open_network() as network, network.open_transport(new_identity().node_id, CLUSTER, host="10.9.9.9") as good:
        network.silent |= {(f"10.1.0.{last}", 4701) for last in range(20)}
        network.set_latency(0.01)
        joins = [*(f"10.1.0.{last}:4701" for last in range(20)), "10.9.9.9:4701", "10.9.9.8:4701", "what is this"]

        async with dialling(network, *joins) as (transport, dialler):
            await until_peers(transport, 1)
            assert trio.current_time() < 1
            await trio.sleep(DIAL_SECONDS + 0.5)
            unreached = {entry.target: entry.reason for entry in dialler.unreached}

        assert unreached.pop("10.9.9.8:4701") == "connection refused"
        assert "needs a port" in unreached.pop("what is this")
        assert set(unreached.values()) == {"it took the connection and said nothing for 3 s"}
        assert len(unreached) == 20
        assert good.node_id not in unreached


async def test_a_name_is_resolved_anew_at_each_try_and_all_its_addresses_are_tried(autojump_clock: MockClock) -> None:
    """A9 (exo#725): the first of the name's two addresses is dead."""
    async with open_network() as network, dialling(network, "nas:4701") as (transport, dialler):
        await trio.sleep(1)
        assert dialler.unreached[0].reason == "the name nas has no address that could be found"
        async with network.open_transport(new_identity().node_id, CLUSTER, host="10.9.0.2") as nas:
            network.silent.add(("10.9.0.1", 4701))
            network.names["nas"] = ("10.9.0.1", "10.9.0.2")
            await until_peers(transport, 1)
            assert nas.node_id in transport.peers
            await trio.sleep(0.1)
            assert not dialler.unreached
        await until_peers(transport, 0)
        network.names["nas"] = ("10.9.0.3",)
        async with network.open_transport(new_identity().node_id, CLUSTER, host="10.9.0.3") as moved:
            with trio.fail_after(2 * DELAY_SECONDS_MAX):
                await until_peers(transport, 1)
            assert moved.node_id in transport.peers


async def test_a_lost_peer_is_dialled_again_at_once_though_others_are_connected(autojump_clock: MockClock) -> None:
    async with (
        open_network() as network,
        network.open_transport(new_identity().node_id, CLUSTER) as one,
        network.open_transport(new_identity().node_id, CLUSTER) as other,
        dialling(network, one.addresses[0]) as (transport, dialler),
    ):
        dialler.know(other.node_id, other.addresses)
        await until_peers(transport, 2)
        for peer in (one, other):
            await trio.sleep(60)
            network.sever(transport.node_id, peer.node_id)
            assert len(transport.peers) == 1
            with trio.fail_after(REDIAL_SECONDS_MAX + 0.1):
                await until_peers(transport, 2)


async def test_a_peer_that_dialled_us_is_dialled_back_after_a_loss(autojump_clock: MockClock) -> None:
    """Its own dialler is gone; where it listens it said itself."""
    async with (
        open_network() as network,
        dialling(network) as (transport, _),
        network.open_transport(new_identity().node_id, CLUSTER) as other,
    ):
        assert isinstance(await other.dial(transport.addresses[0]), Peer)
        await trio.sleep(60)
        network.sever(transport.node_id, other.node_id)
        await until_gone(other, transport)
        with trio.fail_after(1):
            await until_peers(transport, 1)


async def test_a_connection_that_never_lasts_is_not_made_without_end(autojump_clock: MockClock) -> None:
    async with open_network() as network, network.open_transport(new_identity().node_id, CLUSTER) as other:
        network.set_latency(0.001)
        made = 0
        async with dialling(network, other.addresses[0]) as (transport, _):
            while trio.current_time() < 60:
                await until_peers(transport, 1)
                made += 1
                await other.drop(transport.node_id)
                await until_gone(transport, other)

    assert 10 <= made <= 40


async def test_after_the_longest_outage_both_sides_meet_within_seconds(autojump_clock: MockClock) -> None:
    """Five minutes of silence between two halves; each end drops the other's nodes, as its membership would."""
    async with open_network() as network, AsyncExitStack() as stack:
        network.set_latency(0.002)
        nodes = [await stack.enter_async_context(dialling(network)) for _ in range(8)]
        transports = [transport for transport, _ in nodes]
        for _, dialler in nodes:
            for transport in transports:
                dialler.know(transport.node_id, transport.addresses)
        for transport in transports:
            await until_peers(transport, 7)
        halves = [{transport.node_id for transport in transports[start : start + 4]} for start in (0, 4)]
        network.partition(*halves)
        for transport in transports:
            for node_id in list(transport.peers):
                if not any({transport.node_id, node_id} <= half for half in halves):
                    await transport.drop(node_id)
        await trio.sleep(300)
        assert all(len(transport.peers) == 3 for transport in transports)

        network.mend()

        with trio.fail_after(10):
            for transport in transports:
                await until_peers(transport, 7)
        assert all(len(transport.peers) == 7 for transport in transports)


async def test_an_address_of_a_node_that_was_given_up_rests_until_nobody_is_connected(autojump_clock: MockClock) -> None:
    async with (
        open_network() as network,
        network.open_transport(new_identity().node_id, CLUSTER) as other,
        dialling(network, other.addresses[0]) as (transport, dialler),
    ):
        await until_peers(transport, 1)
        await trio.sleep(10)
        await transport.drop(other.node_id)
        dialler.forget(other.node_id)
        await trio.sleep(REST_SECONDS / 2)
        assert not transport.peers

        dialler.knock()

        with trio.fail_after(1):
            await until_peers(transport, 1)
        await transport.drop(other.node_id)
        dialler.forget(other.node_id)
        with trio.fail_after(REST_SECONDS + 1):
            await until_peers(transport, 1)


async def test_a_dial_out_of_turn_leaves_no_target_behind(autojump_clock: MockClock) -> None:
    async with (
        open_network() as network,
        network.open_transport(new_identity().node_id, CLUSTER) as other,
        dialling(network) as (transport, dialler),
    ):
        nobody = await dialler.redial(NODES[1], [address(NODES[1], "10.200.0.1")])
        assert isinstance(nobody, Unreachable)
        assert isinstance(await dialler.redial(other.node_id, other.addresses), Peer)
        assert list(transport.peers) == [other.node_id]
        await trio.sleep(60)
        assert not dialler.unreached


async def test_its_own_address_is_dialled_once(autojump_clock: MockClock) -> None:
    async with open_network() as network, dialling(network, "10.7.7.7:4701", host="10.7.7.7") as (transport, dialler):
        dialler.know(NODES[0], [])
        await trio.sleep(60)
        assert not dialler.unreached
        assert not transport.peers


async def test_known_nodes_are_bounded(autojump_clock: MockClock) -> None:
    async with open_network() as network, dialling(network) as (_, dialler):
        for number in range(TARGETS_MAX + 50):
            dialler.know(node_id_of(number.to_bytes(32, "big")), ["10.200.0.1:1"])
        await trio.sleep(1)
        assert len(dialler.unreached) <= TARGETS_MAX
        assert isinstance(await dialler.redial(NODES[1]), Unreachable)
        dialler.forget(NodeId(dialler.unreached[0].target))


def test_the_book_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    book = AddressBook("0a1b2c3d")
    assert book.record(NODES[0], [address(NODES[0])], 100)
    assert not book.record(NODES[0], [address(NODES[0])], 200)
    assert book.record(NODES[0], [address(NODES[0], "10.0.0.2")], 300)
    path.write_bytes(book.to_json())

    read = load_book(path, "0a1b2c3d")

    assert read.entries == book.entries
    assert read.entries[NODES[0]].addresses[0] == address(NODES[0], "10.0.0.2")
    assert not load_book(path, "ffffffff").entries
    assert not load_book(tmp_path / "none.json", "0a1b2c3d").entries
    read.forget(NODES[0])
    assert not read.entries


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"cluster": 3}', b'{"cluster":"x","nodes":{"me":{"addresses":[],"seen":1}}}']
)
def test_a_damaged_book_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(content)

    assert not load_book(path, "x").entries


def test_the_book_forgets_the_longest_unseen() -> None:
    book = AddressBook("x")
    for number in range(NODES_MAX + 10):
        book.record(node_id_of(number.to_bytes(32, "big")), [f"10.0.0.1:{number}"], 1000 + number)

    assert len(book.entries) == NODES_MAX
    assert min(entry.seen for entry in book.entries.values()) == 1010


async def test_who_connects_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    async with (
        open_network() as network,
        network.open_transport(new_identity().node_id, CLUSTER) as one,
        network.open_transport(new_identity().node_id, CLUSTER) as other,
        trio.open_nursery() as nursery,
    ):
        book = load_book(path, CLUSTER.tag)
        nursery.start_soon(keep_book, book, path, one)
        await one.dial(other.addresses[0])
        while not path.exists():
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()

    assert load_book(path, CLUSTER.tag).entries[other.node_id].addresses == other.addresses
