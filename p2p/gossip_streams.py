"""The sync streams of one node: one for each connection, opened by the lower id of the two.

Stream and connection live and die together: where the stream ends, however it does, the connection is dropped, and everything
starts anew by a dial, which `p2p.dialler` delays after repeated failures. A peer that serves no sync stream, or never opens its
own, is no member and may ask for other things. A frame that breaks a rule ends its stream, and so the connection; it is
counted, and logged once.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable

import structlog
import trio

from p2p.core import Core
from p2p.effects import Close, Effect
from p2p.gossip_dials import Dials
from p2p.gossip_link import SYNC, Counters, SyncLink
from p2p.ids import NodeId
from p2p.stream import Peer, Stream, StreamBroken, TransportError
from p2p.sync_wire import node16
from p2p.transport import NotConnected, ProtocolRefused, Transport
from p2p.wire import HEADER_BYTES, ProtocolViolation

BLAMED_MAX = 1024  # peers whose faults are logged
REASONS_MAX = 8  # that are logged of one peer

_log = structlog.get_logger("p2p")


class SyncStreams:
    """What comes in goes to the core, whose effects go to `perform`."""

    def __init__(
        self,
        core: Core,
        transport: Transport,
        dials: Dials,
        clock: Callable[[], float],
        perform: Callable[[list[Effect]], None],
    ) -> None:
        self.counters = Counters()
        self._core = core
        self._transport = transport
        self._dials = dials
        self._clock = clock
        self._perform = perform
        self._links: dict[bytes, SyncLink] = {}
        self._blamed: OrderedDict[NodeId, Counter[str]] = OrderedDict()
        self._nursery: trio.Nursery | None = None  # while it runs
        self._begun = trio.Event()
        transport.serve(SYNC, self._serve)

    def __len__(self) -> int:
        return len(self._links)

    @property
    def idle(self) -> bool:
        """Whether all that was to be sent is on its way."""
        return all(link.idle for link in self._links.values())

    def send(self, node: bytes, body: bytes) -> None:
        """Queue a frame for a peer, if it has a stream."""
        link = self._links.get(node)
        if link is not None and not link.closing and not link.put(body):
            self.counters.overflows += 1
            self._core.overflowed(node)

    def close(self, close: Close) -> None:
        """End a peer's stream: at once where it broke a rule, else with all that is queued."""
        link = self._links.get(close.peer)
        if link is None:
            return
        if close.fault:
            self._fault(link.stream.peer, close.reason)
            link.cut()
        else:
            link.close()

    async def run(self) -> None:
        """Keep a stream on each connection, for ever; once. The core has been started."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._begun.set()
            try:
                await self._open_ours(nursery)
            finally:
                self._nursery = None
                for link in self._links.values():  # those that the transport serves would outlive this
                    link.cut()

    async def _open_ours(self, nursery: trio.Nursery) -> None:
        opened: dict[NodeId, int] = {}
        transport = self._transport
        while True:
            revision = transport.revision
            opened = {node_id: number for node_id, number in opened.items() if node_id in transport.peers}
            for node_id, peer in transport.peers.items():
                if transport.node_id < node_id and opened.get(node_id) != peer.connection:
                    opened[node_id] = peer.connection
                    nursery.start_soon(self._lead, peer)
            await transport.wait_past(revision)

    async def _lead(self, peer: Peer) -> None:
        """Open the stream to a peer and keep it."""
        if self._transport.peers.get(peer.node_id) is not peer:
            return  # there is a newer connection, which gets its own
        try:
            await self._transport.lead(peer.node_id, SYNC, self._keep)
        except ProtocolRefused:
            return  # it takes no part
        except (StreamBroken, NotConnected):
            await self._part(peer, False)

    async def _serve(self, stream: Stream[bytes]) -> None:
        """A peer opened its stream."""
        await self._begun.wait()
        peer = stream.peer
        existing = self._links.get(node16(peer.node_id))
        second = existing is not None and existing.stream.peer.connection == peer.connection
        if second or peer.node_id > self._transport.node_id:
            self._fault(peer, "opened a second sync stream" if second else "opened the sync stream that is not its to open")
            await self._part(peer, False)
        else:
            await self._keep(stream)

    async def _keep(self, stream: Stream[bytes]) -> None:
        """Keep one stream to its end."""
        if self._nursery is None:
            return
        peer = stream.peer
        node = node16(peer.node_id)
        former = self._links.get(node)
        if former is not None:  # of an earlier connection, whose end was not yet noticed here
            self._forget(node, former)
            former.cut()
        self._dials.remember(peer.node_id, peer.addresses)
        link = self._links[node] = SyncLink(stream)
        try:
            self._perform(self._core.connected(node, self._clock()))
            with link.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(link.send, self.counters)
                    await self._read(node, link)
                    nursery.cancel_scope.cancel()
        finally:
            if self._links.get(node) is link:
                self._forget(node, link)
            if self._nursery is not None:
                self._nursery.start_soon(self._part, peer, link.meant)

    async def _read(self, node: bytes, link: SyncLink) -> None:
        try:
            async for body in link.stream:
                self.counters.frames_in += 1
                self.counters.bytes_in += HEADER_BYTES + len(body)
                if not link.closing:
                    self._perform(self._core.handle(node, body, self._clock()))
            link.ended = True
        except ProtocolViolation as violation:
            self._fault(link.stream.peer, str(violation))
        except TransportError:
            pass  # it broke, and the core hears of it as such

    def _forget(self, node: bytes, link: SyncLink) -> None:
        del self._links[node]
        self._perform(self._core.disconnected(node, self._clock(), broken=not link.meant))

    async def _part(self, peer: Peer, meant: bool) -> None:
        """End the connection of a sync stream that has ended, if it is there still."""
        if self._transport.peers.get(peer.node_id) is peer:
            await self._transport.drop(peer.node_id)
        self._dials.parted(peer, meant=meant)

    def _fault(self, peer: Peer, reason: str) -> None:
        """Count what a peer did, and log each kind of it once."""
        self.counters.faults += 1
        reasons = self._blamed.setdefault(peer.node_id, Counter())
        if reason in reasons or len(reasons) < REASONS_MAX:
            reasons[reason] += 1
            if reasons[reason] == 1:
                _log.warning("a peer broke a rule", peer=peer.node_id, remote=peer.remote, what=reason)
        if len(self._blamed) > BLAMED_MAX:
            self._blamed.popitem(last=False)
