"""A21 (exo#1332, mesh-llm#1699): a copied data directory runs beside its original. Exactly the newcomer stops, and says why."""

import random

import pytest
import trio
from trio.testing import MockClock

from p2p.boot_clock import new_nonce
from p2p.gossip import IdentityClash
from tests.p2p.gossip_lab import NOTE, Gossips, Member, agree, meshed, open_gossips, until

COPY = "10.8.8.8"


async def expect_clash(gossips: Gossips, copy: Member, seconds: float) -> None:
    """The copy stops, with one sentence that names what clashes, and nobody else does."""
    await until(lambda: copy.boot in gossips.ended, seconds)
    error = gossips.ended[copy.boot]
    assert isinstance(error, IdentityClash)
    assert copy.node_id in str(error)
    assert "data directory was copied" in str(error)
    assert list(gossips.ended) == [copy.boot]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("way", ["dials it", "dials it by its id", "dials a neighbour", "dials both", "a neighbour dials it"])
async def test_the_newcomer_stops_and_the_original_notices_nothing(autojump_clock: MockClock, number: int, way: str) -> None:
    """Each of three nodes copied: the lowest id, one between, the highest."""
    async with open_gossips() as gossips:
        members = dict(enumerate(await gossips.mesh(3), 1))
        original, neighbour = members[number], members[1 if number == 2 else 2]
        await trio.sleep(10)
        generation, revision = original.core.me.standing.generation, original.gossip.revision
        peers = {place: dict(member.transport.peers) for place, member in members.items()}
        joins = {
            "dials it": [f"{original.address.partition('/p2p/')[0]}"],
            "dials it by its id": [original.address],
            "dials a neighbour": [neighbour.address],
            "dials both": [original.address, neighbour.address],
            "a neighbour dials it": [],
        }[way]
        copy = await gossips.start(number, joins, host=COPY)
        if way == "a neighbour dials it":
            neighbour.dialler._joins.extend(type(neighbour.dialler)(neighbour.transport, [f"{COPY}:4701"])._joins)
            neighbour.dialler.hurry()

        await expect_clash(gossips, copy, 8)

        await trio.sleep(5)
        assert {place: dict(member.transport.peers) for place, member in members.items()} == peers
        assert original.core.me.standing.generation == generation
        assert original.gossip.revision == revision
        assert all(len(member.listed()) == 3 for member in members.values())
        assert meshed(members.values())


async def test_the_newcomer_stops_where_the_original_dials_it(autojump_clock: MockClock) -> None:
    """By an address that people gave it."""
    async with open_gossips() as gossips:
        original = await gossips.start(1, [f"{COPY}:4701"])
        other = await gossips.start(2, [1])
        await until(lambda: agree([original, other]), 10)

        copy = await gossips.start(1, host=COPY)

        await expect_clash(gossips, copy, 8)
        assert agree([original, other])


@pytest.mark.parametrize("hears", ["original", "copy"])
async def test_two_that_only_discovery_brings_together(autojump_clock: MockClock, hears: str) -> None:
    async with open_gossips() as gossips:
        original = await gossips.start(1)
        await trio.sleep(5)
        copy = await gossips.start(1, host=COPY)
        one, other = (original, copy) if hears == "original" else (copy, original)
        one.gossip.found(one.node_id, one.transport.addresses)  # its own announcement comes back

        one.gossip.found(one.node_id, other.transport.addresses)

        await expect_clash(gossips, copy, 1)


async def test_an_original_that_was_away_takes_its_place_from_the_copy(autojump_clock: MockClock) -> None:
    """Its neighbours came to know the copy first."""
    async with open_gossips() as gossips:
        original = await gossips.start(1)
        await trio.sleep(60)
        others = [await gossips.start(2), await gossips.start(3, [2])]
        copy = await gossips.start(1, [2], host=COPY)
        await until(lambda: meshed([*others, copy]), 10)
        original.gossip.write(NOTE, 1, "of the original")

        original.gossip.found(others[0].node_id, others[0].transport.addresses)

        await expect_clash(gossips, copy, 8)
        await until(lambda: meshed([*others, original]), 10)
        assert all(member.note(original, 1) == "of the original" for member in others)
        assert all(len(member.listed()) == 3 for member in others)


async def test_two_in_different_halves_find_each_other_out_when_these_meet(autojump_clock: MockClock) -> None:
    """No node knows both at first: they outbid each other, and meet the other's neighbours."""
    async with open_gossips() as gossips:
        original = await gossips.start(1)
        here = await gossips.start(2, [1])
        await until(lambda: meshed([original, here]), 10)
        there = await gossips.start(3)
        copy = await gossips.start(1, [3], host=COPY)
        await until(lambda: meshed([there, copy]), 10)
        original.gossip.write(NOTE, 1, "of the original")

        here.gossip.found(there.node_id, there.transport.addresses)

        await expect_clash(gossips, copy, 8)
        await until(lambda: meshed([original, here, there]), 10)
        assert there.note(original, 1) == "of the original"


def test_a_later_start_has_the_larger_nonce() -> None:
    """That of two copies, which nobody met both of, the one with the larger stops."""
    chance = random.Random(1)
    nonces = [new_nonce(1.8e9 + second, chance) for second in range(100)]

    assert nonces == sorted(nonces)
    assert 0 < new_nonce(-5.0, chance) < nonces[0]
    assert new_nonce(1e30, chance) < 1 << 63
    assert len({new_nonce(1.8e9, chance) for _ in range(1000)}) == 1000
