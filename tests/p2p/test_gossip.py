"""The loop around the replicated state, over the network in memory on virtual time, and once over the real one."""

import pytest
import trio
from trio.testing import MockClock

from p2p.lattice import Liveness
from tests.p2p.gossip_lab import NOTE, agree, meshed, open_gossips, open_real, until


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


async def test_over_the_real_network() -> None:
    async with open_real(3) as members:
        await until(lambda: meshed(members), 20)
