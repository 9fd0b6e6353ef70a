"""Two processes with one identity, of both transports: A21 (exo#1332, mesh-llm#1699), and a node that was just started again.

Boots decide here which of two is the older one: they all start together.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from p2p.hello import LIFE_SECONDS
from p2p.identity import Identity
from p2p.memory_transport import open_network
from p2p.stream import Peer
from p2p.transport import APART_SECONDS, COPY, DOUBLE_SECONDS, TURNED_AWAY, Transport, Unreachable
from tests.p2p.transport_lab import CLUSTER, ECHO, Kind, both, connect, echo, new_identity, open_lab, serve_echo, until_gone

OLD, YOUNG = b"\0" * 7 + b"1", b"\0" * 7 + b"2"


def bare(address: str) -> str:
    """An address as people type it, without an id."""
    return address.partition("/p2p/")[0]


def identities() -> tuple[Identity, Identity]:
    """A lower and a higher one."""
    one, other = sorted((new_identity(), new_identity()), key=lambda identity: identity.node_id)
    return one, other


@both
@pytest.mark.parametrize("form", ["with its id", "without"])
@pytest.mark.parametrize("dials", ["copy", "original"])
async def test_of_two_that_meet_the_newcomer_stops(kind: Kind, form: str, dials: str) -> None:
    """Also by an address that ends in the id of both: people copy that from the original's output."""
    same = new_identity()
    async with open_lab(kind) as lab, lab.node(same, boot=OLD) as original, lab.node(same, boot=YOUNG) as copy:
        source, target = (copy, original) if dials == "copy" else (original, copy)
        address = target.addresses[0]
        with capture_logs() as logs:
            for _ in range(3):
                assert await source.dial(address if form == "with its id" else bare(address)) == COPY
            while copy.clash is None:
                await copy.wait_past(copy.revision)
            assert original.clash is None
            assert not original.peers
            assert not copy.peers
        loud = sorted(entry["log_level"] for entry in logs if entry["log_level"] in {"error", "warning"})
        assert loud == ["error", "warning"]


@asynccontextmanager
async def doubles(kind: Kind, *, lower: bool) -> AsyncIterator[tuple[Transport, Transport, Transport]]:
    """A node, its original neighbour that is connected to it, and a copy of that; `lower`: which of the two ids decides."""
    one, other = identities()
    same, neighbour = (one, other) if lower else (other, one)
    async with (
        open_lab(kind) as lab,
        lab.node(neighbour) as node,
        lab.node(same, boot=OLD) as original,
        lab.node(same, boot=YOUNG) as copy,
    ):
        node.serve(ECHO, serve_echo)
        await connect(original, node)
        yield node, original, copy


@both
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("dials", ["copy", "node"])
async def test_a_neighbour_of_the_original_turns_its_copy_away(kind: Kind, lower: bool, dials: str) -> None:
    """Whoever dials and whichever id decides; what the original has open there goes on."""
    async with doubles(kind, lower=lower) as (node, original, copy), await original.open(node.node_id, ECHO) as stream:
        held = node.peers[original.node_id]
        outcome = await (copy.dial(node.addresses[0]) if dials == "copy" else node.dial(bare(copy.addresses[0])))

        assert isinstance(outcome, Unreachable)
        if dials == "copy":
            assert outcome == TURNED_AWAY
        await stream.send("still here")
        assert await stream.receive() == "still here"
        assert node.peers[original.node_id] is held
        assert not copy.peers
        assert copy.clash is None, "its own last life may have just ended"


@both
@pytest.mark.parametrize("lower", [True, False])
async def test_the_original_takes_its_place_back(kind: Kind, lower: bool) -> None:
    """The copy was faster at this neighbour."""
    async with doubles(kind, lower=lower) as (node, original, copy):
        await original.drop(node.node_id)
        await until_gone(node, original)
        await connect(copy, node)

        await connect(original, node)

        assert node.peers[original.node_id].boot == OLD
        await until_gone(copy, node)
        assert await echo(original, node, "hello") == "hello"
        assert await copy.dial(node.addresses[0]) == TURNED_AWAY


async def test_a_copy_that_is_turned_away_again_and_again_finds_out_what_it_is(autojump_clock: MockClock) -> None:
    async with doubles("memory", lower=True) as (node, original, copy):
        await copy.dial(node.addresses[0])
        await trio.sleep(DOUBLE_SECONDS - 0.1)
        await copy.dial(node.addresses[0])
        assert not copy.clash
        await trio.sleep(0.2)

        await copy.dial(node.addresses[0])

        assert copy.clash == node.addresses[0]
        assert original.clash is None


async def test_two_refusals_long_apart_are_no_double(autojump_clock: MockClock) -> None:
    async with doubles("memory", lower=True) as (node, _, copy):
        for _ in range(3):
            await copy.dial(node.addresses[0])
            await trio.sleep(APART_SECONDS + 1)
        assert copy.clash is None


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("silent", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("dials", ["reborn", "neighbour"])
async def test_a_node_that_starts_again_within_a_second_is_let_in_at_once(
    autojump_clock: MockClock, lower: bool, silent: bool, dials: str
) -> None:
    """Also where the old connection looks alive still."""
    one, other = identities()
    same, neighbour = (one, other) if lower else (other, one)
    async with open_network() as network, network.open_transport(neighbour.node_id, CLUSTER) as node, AsyncExitStack() as old:
        network.set_latency(0.001)
        node.serve(ECHO, serve_echo)
        async with trio.open_nursery() as nursery:
            began = trio.Event()

            async def live() -> None:
                async with network.open_transport(same.node_id, CLUSTER, host="10.5.5.5") as transport:
                    await connect(transport, node)
                    began.set()
                    await trio.sleep_forever()

            nursery.start_soon(live)
            await began.wait()
            await trio.sleep(10)
            network.crash(same.node_id, silent=silent)
        await old.aclose()
        if not silent:
            await trio.sleep(0.01)
        assert (same.node_id in node.peers) is silent
        start = trio.current_time()
        async with network.open_transport(same.node_id, CLUSTER, host="10.5.5.5") as reborn:
            if dials == "reborn" or not silent:
                assert isinstance(await reborn.dial(node.addresses[0]), Peer)
            else:
                assert isinstance(await node.dial(bare(reborn.addresses[0])), Peer)

            assert trio.current_time() - start <= LIFE_SECONDS + 0.1
            assert node.peers[same.node_id].boot == reborn.boot
            assert await echo(reborn, node, "back") == "back"
            assert reborn.clash is None
