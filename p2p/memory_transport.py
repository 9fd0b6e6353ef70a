"""The transport within one process: a network of nodes whose faults are set at will. The cluster simulator runs on it.

A connection is two `Wire`s, one each way, on which everything that happens (bytes, ends, resets, losses) travels in order and
arrives after the link's latency. A link that is cut holds what is on it until it is mended, as TCP does for a while: neither
end sees anything. All randomness is the network's own, from its seed; time is trio's, so a mock clock makes it virtual.
"""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from p2p.addresses import Address
from p2p.cluster_key import Cluster
from p2p.hello import BOOT_BYTES, LIFE_SECONDS, decides, keep, precedes
from p2p.ids import NodeId
from p2p.memory_stream import End, Link, MemoryBytes, Wire
from p2p.stream import Peer, StreamBroken
from p2p.transport import (
    COPY,
    DIAL_SECONDS,
    ITSELF,
    OUR_VERSIONS,
    STREAMS_MAX,
    TURNED_AWAY,
    Incompatible,
    ListenFailed,
    Transport,
    Unreachable,
    Versions,
)

PORT = 4701


@dataclass(eq=False)
class MemoryNetwork:
    """Nodes by address, links by pair, names as a name server would have them. Use `open_network`."""

    nursery: trio.Nursery
    randomness: random.Random
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # host name to IP addresses
    silent: set[tuple[str, int]] = field(default_factory=set)  # addresses that take a connection and say nothing
    _nodes: dict[tuple[str, int], "MemoryTransport"] = field(default_factory=dict)
    _links: dict[tuple[NodeId, NodeId], Link] = field(default_factory=dict)
    _hosts: int = 0
    _latency: tuple[float, float] = (0.0, 0.0)

    def set_latency(self, latency: float, jitter: float = 0.0) -> None:
        """Seconds that everything takes from now on, on every link."""
        self._latency = latency, jitter
        for link in self._links.values():
            link.latency, link.jitter = self._latency

    def link(self, source: NodeId, target: NodeId) -> Link:
        """The way from one node to another, to be set."""
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = Link()
            link.latency, link.jitter = self._latency
        return link

    def partition(self, *sides: set[NodeId]) -> None:
        """Cut every link between nodes of different sides, both ways."""
        for side in sides:
            for other in sides:
                if side is not other:
                    for source in side:
                        for target in other:
                            self.link(source, target).cut = True

    def mend(self) -> None:
        """No link is cut any more."""
        for link in self._links.values():
            link.cut = False

    def sever(self, one: NodeId, other: NodeId) -> None:
        """Break the connection between two nodes, seen at both ends at once."""
        for transport in self._nodes.values():
            if transport.node_id in {one, other}:
                transport.lose(other if transport.node_id == one else one, "severed", tell=False)

    def crash(self, node_id: NodeId, *, silent: bool = False) -> None:
        """End a node as kill -9 does: what runs within its `open_transport` is cancelled, and nothing more gets out of it.

        `silent`: as a power cut does. Its peers don't hear of it.
        """
        for place, transport in list(self._nodes.items()):
            if transport.node_id == node_id:
                del self._nodes[place]  # what is cancelled may take its time, and nobody is to meet it meanwhile
                transport.crash(silent=silent)

    def nodes(self) -> tuple["MemoryTransport", ...]:
        """Whoever is there now."""
        return tuple(self._nodes.values())

    def node_at(self, host: str, port: int) -> "MemoryTransport | None":
        """Who listens there."""
        return self._nodes.get((host, port))

    @asynccontextmanager
    async def open_transport(
        self,
        node_id: NodeId,
        cluster: Cluster,
        *,
        host: str | None = None,
        versions: Versions = OUR_VERSIONS,
        boot: bytes | None = None,
    ) -> AsyncIterator["MemoryTransport"]:
        """A node's transport, at `host` or an address of its own, until the context ends.

        Raises: ListenFailed where another node is there.
        """
        self._hosts += 1
        place = host or f"10.{self._hosts >> 16 & 255}.{self._hosts >> 8 & 255}.{self._hosts & 255}", PORT
        if place in self._nodes:
            raise ListenFailed(f"can't listen on {Address(*place)}: address already in use")
        async with trio.open_nursery() as nursery:
            boot = self.randomness.randbytes(BOOT_BYTES) if boot is None else boot
            transport = MemoryTransport(node_id, cluster, self, Address(*place, node_id), nursery, versions=versions, boot=boot)
            self._nodes[place] = transport
            try:
                yield transport
            finally:
                nursery.cancel_scope.cancel()
                if self._nodes.get(place) is transport:
                    del self._nodes[place]
                transport.close()


@asynccontextmanager
async def open_network(seed: int = 0) -> AsyncIterator[MemoryNetwork]:
    """A network without nodes and faults."""
    async with trio.open_nursery() as nursery:
        yield MemoryNetwork(nursery, random.Random(seed))  # noqa: S311 - faults, not secrets
        nursery.cancel_scope.cancel()


class MemoryTransport(Transport):
    """Use `MemoryNetwork.open_transport`."""

    def __init__(
        self,
        node_id: NodeId,
        cluster: Cluster,
        network: MemoryNetwork,
        listens: Address,
        nursery: trio.Nursery,
        *,
        versions: Versions,
        boot: bytes,
    ) -> None:
        super().__init__(node_id)
        self.cluster = cluster
        self.versions = versions
        self.boot = boot
        self.began = trio.current_time()
        self.gone = False
        self._network = network
        self._nursery = nursery
        self._ends: dict[NodeId, End] = {}
        self._set_addresses((listens.multiaddr,))

    async def drop(self, node_id: NodeId) -> None:
        """End the connection to this peer at once; its streams break."""
        self.lose(node_id, "dropped by this node", tell=True)
        await trio.lowlevel.checkpoint()

    def lose(self, node_id: NodeId, why: str, *, tell: bool) -> None:
        """The connection to a peer ends here, and there too if it is told."""
        end = self._ends.pop(node_id, None)
        if end is not None:
            far = end.far
            end.lose(why, (lambda: far.owner_lost("the peer closed the connection")) if tell else None)
            self._remove_peer(end.peer, why)

    def close(self, *, tell: bool = True) -> None:
        """Every connection ends, and none begins."""
        self.gone = True
        for node_id in list(self._ends):
            self.lose(node_id, "this node stops", tell=tell)

    def crash(self, *, silent: bool) -> None:
        """As `MemoryNetwork.crash`."""
        self.close(tell=not silent)
        self._nursery.cancel_scope.cancel()

    async def _dial(self, address: Address) -> Peer | Unreachable:
        hosts = (address.host,) if address.ip is not None else self._network.names.get(address.host, ())
        if not hosts:
            return Unreachable(f"the name {address.host} has no address that could be found")
        outcomes: list[Peer | Unreachable] = []
        async with trio.open_nursery() as tries:

            async def attempt(host: str) -> None:
                outcomes.append(await self._dial_ip(Address(host, address.port, address.node_id)))
                if isinstance(outcomes[-1], Peer):
                    tries.cancel_scope.cancel()

            for host in hosts:
                tries.start_soon(attempt, host)
        return next((outcome for outcome in outcomes if isinstance(outcome, Peer)), outcomes[0])

    async def _dial_ip(self, address: Address) -> Peer | Unreachable:
        outcome: Peer | Unreachable = Unreachable(f"no answer for {DIAL_SECONDS:g} s")
        with trio.move_on_after(DIAL_SECONDS):
            if (address.host, address.port) in self._network.silent:
                outcome = Unreachable(f"it took the connection and said nothing for {DIAL_SECONDS:g} s")
                await trio.sleep_forever()
            target = self._network.node_at(address.host, address.port)
            if target is None:
                return Unreachable("connection refused", refused=True)
            for source, to in ((self, target), (target, self), (self, target)):  # three messages, as Noise XX
                link = self._network.link(source.node_id, to.node_id)
                await trio.sleep(link.latency)
                await link.wait_whole()
            if self._network.node_at(address.host, address.port) is not target:
                return Unreachable("connection refused", refused=True)
            outcome = await self._meet(target, address)
        return outcome  # noqa: RET504 - the deadline may come before the last assignment

    async def _meet(self, target: "MemoryTransport", address: Address) -> Peer | Unreachable:
        """The handshake's outcome at both ends, as `libp2p_transport` has it."""
        if target is self:
            return ITSELF
        if target.cluster.prologue != self.cluster.prologue:
            target.counters.handshakes_refused += 1
            return Unreachable("a node of another cluster: its cluster name or key differs")
        if address.node_id not in {None, target.node_id}:
            return Unreachable("another node than the one expected answers there")
        if target.node_id == self.node_id:
            older = precedes(target.began, target.boot, self.began, self.boot)
            self._met_copy(str(address), older=older)
            target._met_copy(self._addresses[0], older=not older)
            return COPY
        version = self.versions.agreed(target.versions)
        if version is None:
            self._add_incompatible(Incompatible(target.node_id, target.versions, str(address)))
            target._add_incompatible(Incompatible(self.node_id, self.versions, self._addresses[0]))
            return Unreachable(f"it speaks protocol version {target.versions}, this node {self.versions}")
        for holder, comer in ((self, target), (target, self)):
            if not await holder._yields(comer):
                comer._was_turned_away(holder._addresses[0])
                return (
                    Unreachable("it has the identity of a node that is connected and older") if holder is self else TURNED_AWAY
                )
        if target.gone or self.gone:
            return Unreachable("it closed the connection during the handshake")
        return self._connect(target, version)

    async def _yields(self, comer: "MemoryTransport") -> bool:
        """Whether a connection to another life of the comer, if there is one, makes room for it; if so, it is gone now."""
        end = self._ends.get(comer.node_id)
        if end is None or end.peer.boot == comer.boot:
            return True
        if precedes(end.peer.began, end.peer.boot, comer.began, comer.boot) and await end.answers(LIFE_SECONDS):
            return False
        if self._ends.get(comer.node_id) is end:
            self.lose(comer.node_id, "another life of the peer came", tell=True)
        return True

    def _connect(self, target: "MemoryTransport", version: int) -> Peer | Unreachable:
        there, here = self._as_peer(target, version, dialled=True), target._as_peer(self, version, dialled=False)
        decider, newcomer = (self, there) if decides(self.node_id, target.node_id) else (target, here)
        if not keep(decider._peers.get(newcomer.node_id), newcomer):
            self.counters.duplicates_closed += 1
            target.counters.duplicates_closed += 1
            return self._peers.get(target.node_id, Unreachable("it holds another connection to this node"))
        for one, another in ((self, target), (target, self)):
            one.lose(another.node_id, "replaced by a newer connection", tell=False)
        wires = [
            Wire(self._network.link(one.node_id, another.node_id), self._network.randomness)
            for one, another in ((self, target), (target, self))
        ]
        ours, theirs = self._place(there, wires[0]), target._place(here, wires[1])
        ours.far, theirs.far = theirs, ours
        for wire in wires:
            self._network.nursery.start_soon(wire.run)
        return there

    def _as_peer(self, other: "MemoryTransport", version: int, *, dialled: bool) -> Peer:
        number, now, remote = next(self._numbers), trio.current_time(), other.addresses[0]
        return Peer(other.node_id, other.boot, version, other.addresses, remote, dialled, number, now, other.began)

    def _place(self, peer: Peer, wire: Wire) -> End:
        end = End(peer, wire.put, wire.close)
        end.owner_lost = lambda why: self._lost(end, why)
        end.owner_asked = lambda name, stream: self._asked(end, name, stream)
        self._ends[peer.node_id] = end
        self._add_peer(peer)
        return end

    def _lost(self, end: End, why: str) -> None:
        if self._ends.get(end.peer.node_id) is end:
            self.lose(end.peer.node_id, why, tell=False)

    def _asked(self, end: End, name: str, stream: MemoryBytes) -> bool:
        """A peer opens a stream: whether it is served."""
        served = self._served.get(name)
        if served is None or end.inbound >= STREAMS_MAX:
            self.counters.streams_refused += 1
            return False
        end.inbound += 1

        async def run() -> None:
            try:
                await self._serve_stream(end.peer, served, stream)
            finally:
                end.inbound -= 1

        self._nursery.start_soon(run)
        return True

    async def _open(self, peer: Peer, protocol_name: str) -> MemoryBytes:
        end = self._ends.get(peer.node_id)
        if end is None:
            raise StreamBroken("the connection was lost")
        return await end.open(protocol_name)
