"""The loop around the replicated state, over the network in memory on virtual time, and once over the real one."""

import random

import pytest
import trio
from trio.testing import MockClock

from p2p.effects import Changed
from p2p.lattice import Liveness
from p2p.namespace import NamespaceFull
from tests.p2p.gossip_lab import NOTE, Member, agree, meshed, open_gossips, open_real, until


@pytest.mark.parametrize("count", [3, 10])
async def test_members_find_each_other_and_a_write_is_everywhere_at_once(autojump_clock: MockClock, count: int) -> None:
    async with open_gossips() as gossips:
        members = await gossips.mesh(count)
        members[-1].gossip.write(NOTE, 7, "new")
        took = await until(lambda: all(member.note(members[-1], 7) == "new" for member in members), 1)
        assert took <= 0.1
        assert agree(members)
        members[-1].gossip.delete(NOTE, 7)
        assert await until(lambda: all(member.note(members[-1], 7) is None for member in members), 1) <= 0.1


async def test_a_killed_member_is_dead_for_all_within_a_second_and_a_half(autojump_clock: MockClock) -> None:
    async with open_gossips() as gossips:
        members = await gossips.mesh(10)
        victim = gossips.kill(10)
        assert await until(lambda: all(m.sees(victim) is Liveness.DEAD for m in members[:-1]), 3) <= 1.5


async def test_one_that_says_goodbye_has_left_for_all_at_once(autojump_clock: MockClock) -> None:
    async with open_gossips() as gossips:
        members = await gossips.mesh(5)
        began = trio.current_time()
        await members[4].gossip.leave()
        assert trio.current_time() - began <= 1
        assert all(member.sees(members[4]) is Liveness.LEFT for member in members[:4])


async def test_a_goodbye_waits_for_nobody_who_does_not_listen(autojump_clock: MockClock) -> None:
    async with open_gossips() as gossips:
        one, other, deaf = await gossips.mesh(3)
        gossips.network.link(one.node_id, deaf.node_id).cut = True
        for number in range(3000):  # more than the stream's window and the queue hold
            one.gossip.write(NOTE, number % 100, f"{number:>1000}")
            if number % 20 == 19:
                await trio.sleep(0.01)
        began = trio.current_time()
        await one.gossip.leave()
        assert 0.9 <= trio.current_time() - began <= 1.0
        assert other.sees(one) is Liveness.LEFT


def ask(member: Member) -> None:
    """A write whose listener writes in turn."""
    heard: list[object] = []

    def told(change: Changed) -> None:
        for written in change.changes or ():
            heard.append(written.key)
            if written.key == (NOTE, 1):
                member.gossip.write(NOTE, 2, "an answer")

    member.gossip.on_changed.append(told)
    before = member.gossip.revision
    member.gossip.write(NOTE, 1, "a question")
    assert heard == [(NOTE, 1), (NOTE, 2)]
    assert member.gossip.revision == before + 2
    member.gossip.delete(NOTE, 2)
    assert heard[2:] == [(NOTE, 2)]
    member.gossip.write(NOTE, 1, "a question")
    member.gossip.delete(NOTE, 9)
    assert len(heard) == 3, "nothing changed"


async def test_whoever_listens_has_heard_of_a_write_when_it_returns(autojump_clock: MockClock) -> None:
    """Also before the loop runs."""
    async with open_gossips() as gossips:
        await gossips.start(1, before=ask)
        member = await gossips.start(2, [1])
        await trio.sleep(1)
        revision = member.gossip.revision
        ask(member)
        assert await member.gossip.wait_past(revision) == revision + 3


async def test_a_full_namespace_refuses_by_name(autojump_clock: MockClock) -> None:
    async with open_gossips() as gossips:
        member = await gossips.start(1)
        with pytest.raises(NamespaceFull):  # noqa: PT012 - which write is one too many is the core's affair
            for number in range(1000):
                member.gossip.write(NOTE, number, "x" * 1000)


async def test_ending_it_at_any_moment_is_clean(autojump_clock: MockClock) -> None:
    """The loop is cancelled while its transport lives on for a moment, as at the end of a process."""
    chance = random.Random(3)
    async with open_gossips() as gossips:
        members = await gossips.mesh(3)
        for number in range(40):
            victim = await gossips.start(10 + number % 3, [1, 2])
            with trio.move_on_after(chance.choice((0.0, 0.001, 0.003, 0.02, 0.5, 2.5)) * chance.random()):
                while True:
                    victim.gossip.write(NOTE, 1, f"{chance.random()}")
                    await trio.sleep(0.01)
            victim.stop()
            await trio.sleep(chance.random() * 0.1)
            assert len(victim.transport.peers) == 0 or not victim.gossip._streams._links
            gossips.kill(10 + number % 3)
        await until(lambda: meshed(members), 20)
        assert not gossips.ended
        assert all(member.transport.counters.failures == 0 for member in members)


async def test_over_the_real_network() -> None:
    async with open_real(3) as members:
        await until(lambda: meshed(members), 20)
