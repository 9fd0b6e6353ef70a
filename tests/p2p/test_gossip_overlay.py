"""More members than everybody keeps a stream to: the core chooses, and nobody else dials."""

import trio
from trio.testing import MockClock

from p2p.settings import LINKS_MAX, LINKS_MIN, MESH_MAX
from tests.p2p.gossip_lab import NOTE, Member, agree, open_gossips, until

COUNT = MESH_MAX + 4


def sparse(members: list[Member]) -> bool:
    return agree(members) and all(len(member.transport.peers) <= LINKS_MAX for member in members)


async def test_a_large_cluster_keeps_few_connections_and_leaves_them_alone(autojump_clock: MockClock) -> None:
    """What grew as a mesh gives streams up; neither dialler brings them back, also not those to the address that all joined by,
    nor does discovery, which finds everybody.
    """
    async with open_gossips() as gossips:
        members = [await gossips.start(1)]
        for number in range(2, COUNT + 1):
            members.append(await gossips.start(number, [1]))
            await trio.sleep(0.02)
        await until(lambda: sparse(members), 60, step=0.5)
        newcomer = await gossips.start(COUNT + 1)
        for member in members:
            newcomer.gossip.found(member.node_id, member.transport.addresses)
        everybody = [*members, newcomer]
        await until(lambda: sparse(everybody), 30, step=0.5)
        connections: set[tuple[str, int]] = set()
        for member in everybody:
            for peer in member.transport.peers.values():
                connections.add((member.node_id, peer.connection))
        opened: set[tuple[str, int]] = set()

        for _ in range(20):
            assert max(len(member.transport.peers) for member in everybody) <= LINKS_MAX + 4, "taken, and not yet given up"
            for member in everybody:
                newcomer.gossip.found(member.node_id, member.transport.addresses)
                opened |= {(member.node_id, peer.connection) for peer in member.transport.peers.values()}
            await trio.sleep(0.5)

        assert len(opened - connections) <= COUNT / 4, "connections come and go"
        await until(lambda: sparse(everybody), 10, step=0.5)
        assert min(len(member.core.links) for member in everybody) >= LINKS_MIN - 2
        newcomer.gossip.write(NOTE, 1, "for all")
        assert await until(lambda: all(member.note(newcomer, 1) == "for all" for member in members), 2, step=0.05) <= 1.0
        assert not gossips.ended
