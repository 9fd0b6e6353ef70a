"""The contract between nodes and whatever carries their frames: connections to peers, and streams of typed messages in them.

Two implementations keep it, under one suite of tests: `libp2p_transport` over the network and `memory_transport` in one process
with faults at will. What holds of both:

- One connection at most for each pair of nodes, whoever dials and however often. A peer's id is proved, not claimed, and who
  is of another cluster is kept out; a peer of another protocol version is shown, not admitted.
- A stream belongs to one connection and ends with it. Messages arrive whole, in order, once. `send` waits while the reader is
  slow (the peer's or the connection's buffer is full), and one slow stream holds up no other.
- An end that the sender meant (`close_send`) differs from one that it did not: iteration ends, or raises `StreamBroken`.
- Cancelling any call at any point harms no other stream. A `send` cancelled with part of its message on the way breaks its own
  stream; otherwise the stream goes on.
- A message above the cap, or one that is no message of the protocol, breaks that stream and nothing else (`ProtocolViolation`).
- A peer that dies closes its connection, which is seen at once. One that freezes or is cut off is not seen here: the membership
  probes it, and `drop` ends the connection without waiting for it.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import structlog
import trio

from p2p.addresses import Address, AddressError, parse_address
from p2p.ids import NodeId
from p2p.stream import ByteStream, Peer, Stream, StreamBroken, StreamProtocol, TransportError
from p2p.wire import ProtocolViolation

DIAL_SECONDS = 3.0  # one address: to connect, and for each answer of the handshake
OPEN_SECONDS = 5.0  # a stream: until the peer said that it serves the protocol
STREAMS_MAX = 256  # of a connection, opened by the peer
INCOMPATIBLE_MAX = 64  # remembered; the longest unseen is forgotten first
DOUBLE_SECONDS = 3.0  # for which a node is turned away for another life of it before it takes that one for a double
APART_SECONDS = 60.0  # between two such refusals that have nothing to do with each other

T = TypeVar("T")
Serve = Callable[[Stream[T]], Awaitable[None]]

_log = structlog.get_logger("p2p")


class ListenFailed(TransportError):
    """The address to listen on can't be used."""


class NotConnected(TransportError):
    """There is no connection to that peer."""


class ProtocolRefused(StreamBroken):
    """The peer does not serve that protocol, or has too many streams."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Why a dial came to nothing. `refused`: it was answered at once that nobody listens there."""

    reason: str
    refused: bool = False


ITSELF = Unreachable("that is this node itself")
COPY = Unreachable("another process has this node's identity: was its data directory copied?")
TURNED_AWAY = Unreachable("it is connected to another process that has this node's identity")


@dataclass(frozen=True, slots=True)
class Versions:
    """The range of protocol versions that a node speaks."""

    lowest: int
    highest: int

    def agreed(self, theirs: "Versions") -> int | None:
        """The highest version that both speak."""
        version = min(self.highest, theirs.highest)
        return version if version >= max(self.lowest, theirs.lowest) else None

    def __str__(self) -> str:
        return str(self.lowest) if self.lowest == self.highest else f"{self.lowest}-{self.highest}"


OUR_VERSIONS = Versions(1, 1)


@dataclass(frozen=True, slots=True)
class Incompatible:
    """A peer of this cluster that speaks other versions of the protocol only."""

    node_id: NodeId
    versions: Versions
    remote: str


@dataclass(slots=True)
class Counters:
    """What went wrong at the edge, since the start."""

    handshakes_refused: int = 0  # strangers, silence, garbage
    handshakes_evicted: int = 0  # half-open ones that made room
    duplicates_closed: int = 0
    streams_refused: int = 0  # no such protocol, garbage instead of one, or too many at once
    violations: int = 0
    failures: int = 0  # exceptions out of a served stream: ours to mend


@dataclass(frozen=True, slots=True)
class Served:
    """A protocol with what serves it; the type of its messages is the two's own affair."""

    protocol: StreamProtocol[object]
    serve: Serve[object]


class Transport(ABC):
    """A node's place among its peers. Subclasses connect, open and close; what is shown of it is kept here."""

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self.counters = Counters()
        self._addresses: tuple[str, ...] = ()
        self._peers: dict[NodeId, Peer] = {}
        self._incompatible: OrderedDict[NodeId, Incompatible] = OrderedDict()
        self._served: dict[str, Served] = {}
        self._clash: str | None = None
        self._copies_met = False
        self._turned_away = (-math.inf, -math.inf)  # the first and the last time, for another life of this node
        self._numbers = itertools.count(1)  # of connections
        self._revision = 0
        self._changed = trio.Event()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where peers can dial this node, as multiaddrs that end in its id; they change with the device's interfaces."""
        return self._addresses

    @property
    def peers(self) -> Mapping[NodeId, Peer]:
        """The peers that are connected now; not a copy."""
        return self._peers

    @property
    def incompatible(self) -> Mapping[NodeId, Incompatible]:
        """Peers of this cluster that were met lately and speak other versions; not a copy."""
        return self._incompatible

    @property
    def clash(self) -> str | None:
        """Where an older process with this node's own identity was met, as it is with a copied data directory: this node has to
        stop. The older one notices nothing but a line in its log.
        """
        return self._clash

    @property
    def revision(self) -> int:
        """Raised by every change of `peers`, `incompatible`, `clash` and `addresses`."""
        return self._revision

    async def wait_past(self, revision: int) -> int:
        """Wait until the revision is above this one; returns it."""
        while self._revision <= revision:
            await self._changed.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        return self._revision

    async def dial(self, address: str) -> Peer | Unreachable:
        """Connect to `host:port` or a multiaddr, with or without a peer id; the peer where that is connected already.

        A name is resolved anew, and what it resolves to is tried side by side, each until it says nothing for `DIAL_SECONDS`.
        """
        try:
            parsed = parse_address(address)
        except AddressError as error:
            return Unreachable(str(error))
        if parsed.node_id in self._peers:
            return self._peers[parsed.node_id]
        return await self._dial(parsed)

    async def open(self, node_id: NodeId, protocol: StreamProtocol[T]) -> Stream[T]:
        """A new stream to a connected peer, which serves the protocol. Use it as a context, or `aclose` it.

        Raises: NotConnected; ProtocolRefused; StreamBroken, also where there is no answer within `OPEN_SECONDS`.
        """
        peer = self._peers.get(node_id)
        if peer is None:
            raise NotConnected(f"not connected to {node_id}")
        with trio.move_on_after(OPEN_SECONDS):
            return Stream(peer, protocol, await self._open(peer, protocol.name))
        raise StreamBroken(f"{node_id} did not open a {protocol.name} stream within {OPEN_SECONDS:g} s")

    async def lead(self, node_id: NodeId, protocol: StreamProtocol[T], serve: Serve[T]) -> None:
        """Open a stream and have `serve` called for it to its end, as for one that the peer opened.

        Raises: what `open` does.
        """
        stream = await self.open(node_id, protocol)
        await self._run_stream(cast("Stream[object]", stream), cast("Serve[object]", serve))

    def serve(self, protocol: StreamProtocol[T], serve: Serve[T]) -> None:
        """Have `serve` called for each stream of this protocol that a peer opens, in a trio task of its own.

        Call it before the first `await` after the transport was opened, so that no early stream is refused. The stream is
        closed when `serve` returns and reset when it raises; `StreamBroken` and `ProtocolViolation` are expected.
        """
        self._served[protocol.name] = Served(cast("StreamProtocol[object]", protocol), cast("Serve[object]", serve))

    @abstractmethod
    async def drop(self, node_id: NodeId) -> None:
        """End the connection to this peer at once, without a word to it; its streams break."""

    @abstractmethod
    async def _dial(self, address: Address) -> Peer | Unreachable: ...

    @abstractmethod
    async def _open(self, peer: Peer, protocol_name: str) -> ByteStream: ...

    def _touch(self) -> None:
        self._revision += 1
        self._changed.set()
        self._changed = trio.Event()

    def _set_addresses(self, addresses: tuple[str, ...]) -> None:
        if addresses != self._addresses:
            self._addresses = addresses
            self._touch()

    def _met_copy(self, remote: str, *, older: bool) -> None:
        """There is another process with this node's identity, older than this one or not."""
        if not older:
            if not self._copies_met:
                _log.warning("a younger process with this node's identity came, which has to stop", remote=remote)
            self._copies_met = True
        elif self._clash is None:
            _log.error("another process has this node's identity, and was there first", remote=remote)
            self._clash = remote
            self._touch()

    def _was_turned_away(self, remote: str) -> None:
        """A peer is connected to another life of this node, which answers: one just about to end, or a double's."""
        now = trio.current_time()
        first, last = self._turned_away
        first = now if now - last > APART_SECONDS else first
        self._turned_away = first, now
        if now - first > DOUBLE_SECONDS:
            self._met_copy(remote, older=True)

    def _add_peer(self, peer: Peer) -> None:
        self._peers[peer.node_id] = peer
        self._incompatible.pop(peer.node_id, None)
        _log.info("connected", peer=peer.node_id, remote=peer.remote, dialled=peer.dialled)
        self._touch()

    def _remove_peer(self, peer: Peer, why: str) -> None:
        """Take out the entry of this very connection; a newer one to the same peer stays."""
        if self._peers.get(peer.node_id) is peer:
            del self._peers[peer.node_id]
            _log.info("disconnected", peer=peer.node_id, why=why)
            self._touch()

    def _add_incompatible(self, met: Incompatible) -> None:
        """Remember a peer of other versions; one that is new, or of a new version, is logged, once."""
        known = self._incompatible.pop(met.node_id, None)
        self._incompatible[met.node_id] = met
        if known is not None and known.versions == met.versions:
            return
        if len(self._incompatible) > INCOMPATIBLE_MAX:
            self._incompatible.popitem(last=False)
        _log.warning("peer of another protocol version", peer=met.node_id, remote=met.remote, versions=str(met.versions))
        self._touch()

    async def _serve_stream(self, peer: Peer, served: Served, carrier: ByteStream) -> None:
        await self._run_stream(Stream(peer, served.protocol, carrier), served.serve)

    async def _run_stream(self, stream: Stream[object], serve: Serve[object]) -> None:
        """Run what serves one stream; nothing that it does or meets goes further than this stream."""
        about = {"peer": stream.peer.node_id, "protocol": stream.protocol.name}
        try:
            async with stream:
                await serve(stream)
        except ProtocolViolation as violation:
            self.counters.violations += 1
            _log.warning("protocol violation", what=str(violation), **about)
        except (TransportError, trio.EndOfChannel) as broken:
            _log.debug("stream ended", why=str(broken), **about)
        except Exception as error:  # noqa: BLE001 - the one place: a peer's stream must not take others with it
            if not _only_expected(error):
                self.counters.failures += 1
                _log.warning("serving a stream failed", exc_info=error, **about)


def _only_expected(error: Exception) -> bool:
    """Whether a group, as nurseries raise them, holds nothing but broken streams."""
    return isinstance(error, ExceptionGroup) and error.split((TransportError, ProtocolViolation, trio.EndOfChannel))[1] is None
