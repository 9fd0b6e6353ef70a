"""Members that come, go, come back, and can't be reached: what all of that leaves in the loop around the replicated state."""

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from p2p.lattice import ALIVE, Liveness
from p2p.settings import Settings
from p2p.transport import Versions
from tests.p2p.gossip_lab import NOTE, agree, meshed, open_gossips, until


@pytest.mark.parametrize("count", [2, 5])
async def test_an_idle_cluster_stays_as_it_is(autojump_clock: MockClock, count: int) -> None:
    """A3 (exo#2094)."""
    async with open_gossips() as gossips:
        members = await gossips.mesh(count)
        assert trio.current_time() <= 5
        await trio.sleep(3)
        before = [(member.gossip.revision, dict(member.transport.peers), member.gossip.counters.dials) for member in members]

        await trio.sleep(60)

        after = [(member.gossip.revision, dict(member.transport.peers), member.gossip.counters.dials) for member in members]
        assert after == before
        assert all(len(member.listed()) == count for member in members)


async def test_what_comes_and_goes_leaves_nothing(autojump_clock: MockClock) -> None:
    """A17 (edgevpn#37): fifty peers, half of which say goodbye; those that are killed are remembered for a while."""
    async with open_gossips(Settings(forget_seconds=300.0)) as gossips:
        base = await gossips.mesh(2)
        listed = base[0].listed()
        for number in range(10, 60):
            await gossips.start(number, [1])
            if number >= 15:
                if number % 2:
                    await gossips.leave(number - 5)
                else:
                    gossips.kill(number - 5)
            await trio.sleep(1)
        for number in range(55, 60):
            gossips.kill(number)
        await trio.sleep(20)

        assert all(member.listed() == listed for member in base)
        assert all(len(member.transport.peers) == 1 for member in base)
        assert all(len(member.dialler._nodes) <= 1 + 30 for member in base), "who said goodbye is dialled still"
        await trio.sleep(600)
        assert agree(base)
        for member in base:
            assert set(member.core.replica.members) == listed
            assert len(member.dialler._nodes) == 1
            assert not member.dialler.unreached
        assert not gossips.ended


@pytest.mark.parametrize("silent", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_member_that_starts_again_at_once_is_back_at_once(autojump_clock: MockClock, number: int, silent: bool) -> None:
    """A1 (exo#2197), A18 (parallax#160): whichever it is, its old records are gone and it is listed once."""
    async with open_gossips() as gossips:
        members = await gossips.mesh(3)
        others = [member for position, member in enumerate(members, 1) if position != number]
        gossips.members[number].gossip.write(NOTE, 1, "of the old life")
        await until(lambda: agree(members), 1)
        await trio.sleep(10)
        gossips.kill(number, silent=silent)

        reborn = await gossips.start(number, [2 if number == 1 else 1])

        took = await until(lambda: agree([*others, reborn]), 5)
        assert took <= (3.0 if silent else 1.0)
        assert all(member.note(reborn, 1) is None for member in others)
        assert all(len(member.listed()) == 3 for member in others)
        await until(lambda: meshed([*others, reborn]), 5)
        assert not gossips.ended


async def test_a_node_that_was_away_finds_the_others_by_its_address_book(autojump_clock: MockClock) -> None:
    async with open_gossips() as gossips:
        members = await gossips.mesh(3)
        await gossips.leave(3)
        await trio.sleep(60)

        back = await gossips.start(3, remembered=members[:2])

        assert await until(lambda: agree([*members[:2], back]), 10) <= 2


async def test_silent_addresses_to_join_by_hold_up_nobody(autojump_clock: MockClock) -> None:
    """A22 (mesh-llm#348): twenty that take a connection and say nothing, and a good one."""
    async with open_gossips() as gossips:
        bad = [f"10.9.0.{last}:4701" for last in range(20)]
        gossips.network.silent |= {(f"10.9.0.{last}", 4701) for last in range(20)}
        first = await gossips.start(1)

        second = await gossips.start(2, [*bad, 1])

        assert await until(lambda: agree([first, second]), 5) <= 5
        await trio.sleep(5)
        unreached = {entry.target: entry.reason for entry in second.dialler.unreached}
        assert unreached == dict.fromkeys(bad, "it took the connection and said nothing for 3 s")


async def test_another_protocol_version_is_shown_at_both_ends_and_logged_once(autojump_clock: MockClock) -> None:
    """A10 (exo#983): however often the dialler tries."""
    async with open_gossips() as gossips:
        with capture_logs() as logs:
            old = await gossips.start(1, versions=Versions(1, 1))
            new = await gossips.start(2, [1], versions=Versions(2, 2))
            await trio.sleep(60)
        assert list(old.transport.incompatible) == [new.node_id]
        assert list(new.transport.incompatible) == [old.node_id]
        warned = [entry["versions"] for entry in logs if entry["log_level"] == "warning"]
        assert sorted(warned) == ["1", "2"]
        assert len(old.listed()) == len(new.listed()) == 1
        assert not gossips.ended


async def test_the_dead_are_not_given_up(autojump_clock: MockClock) -> None:
    """Nobody tells a node that was away for long; its neighbours look for it where it was."""
    async with open_gossips() as gossips:
        members = await gossips.mesh(3)
        victim = gossips.kill(3)
        await until(lambda: all(member.sees(victim) is Liveness.DEAD for member in members[:2]), 3)
        await trio.sleep(300)

        back = await gossips.start(3)

        await until(lambda: agree([*members[:2], back]), 10)
        assert back.sees(members[0]) is ALIVE
