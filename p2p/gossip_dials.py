"""Whom the loop around the replicated state dials, and where.

Who is to be connected is settled at two places. In a small cluster (`MESH_MAX` members) everybody is connected with everybody:
whoever is found is handed to the dialler, which goes on until it succeeds. In a large one the core chooses a few, and asks for
each; there the dialler keeps what came of that connected, and a connection that the core gives up is forgotten at both ends, so
that nobody dials it again at once. What was found beyond that is only remembered, for when the core asks for it.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import trio

from p2p.core import Core
from p2p.dialler import Dialler, merge_addresses
from p2p.ids import NodeId
from p2p.lattice import Liveness
from p2p.settings import BOOK_MAX, MESH_MAX
from p2p.stream import Peer
from p2p.sync_wire import node16
from p2p.transport import Transport, Unreachable

KNOWN_MAX = 4096  # nodes whose peer ids are remembered
OFFER_SECONDS = 30.0  # in which at most MESH_MAX found nodes are dialled

Profile = Callable[[bytes], tuple[str, Sequence[str]] | None]
"""The peer id and the addresses that a member has published, by its 16 bytes."""


class _Known(NamedTuple):
    node_id: NodeId
    addresses: tuple[str, ...]


class Dials:
    """One node's."""

    def __init__(
        self, core: Core, transport: Transport, dialler: Dialler, profile: Profile, remembered: Mapping[NodeId, Sequence[str]]
    ) -> None:
        self._core = core
        self._transport = transport
        self._dialler = dialler
        self._profile = profile
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._offered: OrderedDict[NodeId, float] = OrderedDict()
        for position, (node_id, addresses) in enumerate(reversed(list(remembered.items())[-BOOK_MAX:])):
            self.remember(node_id, addresses)
            if position < MESH_MAX:  # the last seen
                dialler.know(node_id, addresses)
            else:
                core.overlay.book[node16(node_id)] = None

    def node_id(self, node: bytes) -> NodeId | None:
        """The peer id behind a member's 16 bytes, once it is known."""
        known = self._known.get(node)
        if known is not None:
            return known.node_id
        published = self._profile(node)
        if published is not None and node16(published[0]) == node:
            return NodeId(published[0])
        return None

    def remember(self, node_id: NodeId, addresses: Sequence[str] = ()) -> None:
        """There is such a node, and that is where it was."""
        node = node16(node_id)
        before = self._known.pop(node, None)
        self._known[node] = _Known(node_id, merge_addresses(addresses, before.addresses if before is not None else ()))
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def found(self, node_id: NodeId, addresses: Sequence[str]) -> None:
        """There is a node of this cluster, says discovery: somebody to be connected to, or at least to be remembered."""
        self.remember(node_id, addresses)
        if self._core.mesh or not self._core.links:
            now = trio.current_time()
            while self._offered and next(iter(self._offered.values())) <= now - OFFER_SECONDS:
                self._offered.popitem(last=False)
            if node_id in self._offered or len(self._offered) < MESH_MAX:
                self._offered.setdefault(node_id, now)
                self._dialler.know(node_id, addresses)

    def parted(self, peer: Peer, *, meant: bool) -> None:
        """A sync stream ended, as one of the two meant it to or not: is that peer to be dialled again."""
        member = self._core.replica.members.get(node16(peer.node_id))
        left = member is not None and member.standing.liveness is Liveness.LEFT
        if left or (meant and not self._core.mesh):
            self._dialler.forget(peer.node_id)
        if not self._core.links:
            self._dialler.knock()

    def changed(self, node: bytes) -> None:
        """A member that has left, or is forgotten, is dialled no more, unless the core asks for it."""
        known = self._known.get(node)
        member = self._core.replica.members.get(node)
        gone = member is None or member.standing.liveness is Liveness.LEFT
        if gone and known is not None and known.node_id not in self._transport.peers:
            self._dialler.forget(known.node_id)

    async def reach(self, node: bytes) -> Peer | Unreachable:
        """Dial a member, because the core asks for it."""
        node_id = self.node_id(node)
        if node_id is None:
            return Unreachable("its peer id is not known here")
        if node_id in self._transport.peers:
            return self._transport.peers[node_id]
        known, published = self._known.get(node), self._profile(node)
        addresses = merge_addresses(published[1] if published is not None else (), known.addresses if known is not None else ())
        outcome = await self._dialler.redial(node_id, addresses)
        member = self._core.replica.members.get(node)
        live = member is not None and member.standing.liveness < Liveness.DEAD
        if isinstance(outcome, Unreachable) and self._core.mesh and live and published is not None:
            self._dialler.know(node_id, published[1])  # goes on, and shows why it fails
        return outcome
