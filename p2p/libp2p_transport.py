"""The transport over the network: TCP, Noise and yamux from libp2p, composed here without its host.

Importing this module imports libp2p, which takes more than a second: only a node that starts does so.
"""

import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import structlog
import trio

from p2p.addresses import Address, advertised
from p2p.boot_clock import boot_clock
from p2p.cluster_key import Cluster
from p2p.hello import BOOT_BYTES, Decision, Hello, OtherLife, decides, hello, keep, outlives, precedes
from p2p.identity import Identity
from p2p.ids import NodeId
from p2p.interfaces import interface_addresses
from p2p.libp2p_connections import Connections
from p2p.libp2p_handshake import HANDSHAKE_BYTES_MAX, HandshakeFailed, Secured, secure, security
from p2p.libp2p_sealed import SocketBytes
from p2p.stream import GOODBYE_SECONDS, Peer
from p2p.tcp import accept, bind, connect, remote_of, resolve, why_not_connected
from p2p.transport import (
    COPY,
    DIAL_SECONDS,
    ITSELF,
    OUR_VERSIONS,
    TURNED_AWAY,
    Incompatible,
    Transport,
    Unreachable,
    Versions,
)

PEERS_MAX = 1024  # connected; beyond, whoever dials is turned away
HALF_OPEN_MAX = 128  # inbound connections whose handshake is not done; one more, and the oldest makes room
# Whoever goes on answering within DIAL_SECONDS gets so long in all. On a machine that is busy with many nodes a bound on the
# whole alone would have each of them start over, again and again, and so keep it busy.
HANDSHAKE_SECONDS_MAX = 15.0
RESOLVE_SECONDS = 3.0  # a name
INTERFACES_SECONDS = 5.0  # between looks at the device's addresses

_log = structlog.get_logger("p2p")


@asynccontextmanager
async def open_transport(
    identity: Identity,
    listen: Sequence[str],
    cluster: Cluster,
    *,
    versions: Versions = OUR_VERSIONS,
    boot: bytes | None = None,
) -> AsyncIterator[Transport]:
    """A transport that listens on each of `listen` (`host:port` or multiaddrs with IP addresses; port 0 picks one), until the
    context ends. `boot`: `BOOT_BYTES` that no other life of this node has; random by default.

    Raises: ListenFailed.
    """
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # it reports every failed dial as an error
    listeners = await bind(listen)
    async with trio.open_nursery() as lasting:
        transport: Libp2pTransport | None = None
        try:
            async with trio.open_nursery() as serving:
                boot = secrets.token_bytes(BOOT_BYTES) if boot is None else boot
                transport = Libp2pTransport(identity, cluster, lasting, serving, versions=versions, boot=boot)
                transport.listen(listeners)
                yield transport
                serving.cancel_scope.cancel()
        finally:
            if transport is not None:
                await transport.goodbye()


class Hellos(NamedTuple):
    """What two nodes said to each other, who of that id was connected here when our hello was sent, and who came now."""

    ours: Hello
    theirs: Hello
    known: Peer | None
    peer: Peer


class Libp2pTransport(Connections):
    """Use `open_transport`."""

    def __init__(
        self,
        identity: Identity,
        cluster: Cluster,
        lasting: trio.Nursery,
        serving: trio.Nursery,
        *,
        versions: Versions,
        boot: bytes,
    ) -> None:
        assert len(boot) == BOOT_BYTES
        super().__init__(identity.node_id, lasting, serving)
        self._versions = versions
        self._boot = boot
        self._began = boot_clock()
        self._security = security(identity, cluster)
        self._listening: list[Address] = []
        self._half_open: dict[trio.CancelScope, None] = {}

    # Listening

    def listen(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Accept connections on each."""
        self._listening = [Address(*listener.socket.getsockname()[:2]) for listener in listeners]
        for listener in listeners:
            self._serving.start_soon(accept, listener, self._serving, self._accept)
        self._look_at_interfaces()
        if any(address.ip is not None and address.ip.is_unspecified for address in self._listening):
            self._serving.start_soon(self._watch_interfaces)

    async def _watch_interfaces(self) -> None:
        while True:
            await trio.sleep(INTERFACES_SECONDS)
            self._look_at_interfaces()

    def _look_at_interfaces(self) -> None:
        self._set_addresses(advertised(self._listening, interface_addresses(), self.node_id))

    async def _accept(self, stream: trio.SocketStream) -> None:
        remote = remote_of(stream)
        if len(self._connections) >= PEERS_MAX:
            self.counters.handshakes_refused += 1
            stream.socket.close()
            return
        outcome: Peer | Unreachable = Unreachable("it said nothing")
        with trio.move_on_after(DIAL_SECONDS) as scope:
            self._make_room(scope)
            try:
                outcome = await self._greet(stream, remote, scope, dialled=False)
            finally:
                del self._half_open[scope]
        if isinstance(outcome, Unreachable):
            self.counters.handshakes_refused += 1
            _log.debug("handshake refused", remote=remote, why=outcome.reason)

    def _make_room(self, scope: trio.CancelScope) -> None:
        """An honest handshake takes milliseconds, so the oldest that isn't done is the one to give up."""
        self._half_open[scope] = None
        if len(self._half_open) > HALF_OPEN_MAX:
            next(iter(self._half_open)).cancel()
            self.counters.handshakes_evicted += 1

    # Dialling

    async def _dial(self, address: Address) -> Peer | Unreachable:
        hosts: tuple[str, ...] = ()
        with trio.move_on_after(RESOLVE_SECONDS):
            hosts = await resolve(address)
        if not hosts:
            return Unreachable(f"the name {address.host} has no address that could be found")
        outcomes: list[Peer | Unreachable] = []
        async with trio.open_nursery() as tries:
            for host in hosts:
                tries.start_soon(self._try, Address(host, address.port, address.node_id), outcomes, tries.cancel_scope)
        return next((outcome for outcome in outcomes if isinstance(outcome, Peer)), outcomes[0])

    async def _try(self, address: Address, outcomes: list[Peer | Unreachable], others: trio.CancelScope) -> None:
        """Dial one IP address; with success the others are given up."""
        outcome = await self._dial_ip(address)
        outcomes.append(outcome)
        if isinstance(outcome, Peer):
            others.cancel()

    async def _dial_ip(self, address: Address) -> Peer | Unreachable:
        outcome: Peer | Unreachable = Unreachable(f"no answer for {DIAL_SECONDS:g} s")
        latest = trio.current_time() + HANDSHAKE_SECONDS_MAX
        with trio.move_on_after(DIAL_SECONDS) as scope:
            try:
                stream = await connect(address.host, address.port)
            except OSError as error:
                return why_not_connected(error)
            outcome = Unreachable(f"it took the connection and said nothing for {DIAL_SECONDS:g} s")
            outcome = await self._greet(stream, str(address), scope, dialled=True, expected=address.node_id)
        if scope.cancelled_caught and trio.current_time() >= latest:
            outcome = Unreachable(f"its handshake was not done in {HANDSHAKE_SECONDS_MAX:g} s")
        return outcome

    # From a TCP connection to a peer

    async def _greet(
        self,
        stream: trio.SocketStream,
        remote: str,
        scope: trio.CancelScope,
        *,
        dialled: bool,
        expected: NodeId | None = None,
    ) -> Peer | Unreachable:
        """Handshake, hellos, decision: the peer, connected by this connection or by another one, or why not.

        `scope` is around it: each answer of the far end gives it `DIAL_SECONDS` more, up to `HANDSHAKE_SECONDS_MAX` in all.
        """
        latest = trio.current_time() + HANDSHAKE_SECONDS_MAX

        def give_time() -> None:
            scope.deadline = min(latest, trio.current_time() + DIAL_SECONDS)

        socket = SocketBytes(stream, HANDSHAKE_BYTES_MAX, give_time)
        outcome: Peer | Unreachable | None = None
        try:
            secured = await secure(self._security, socket, dialled=dialled, expected=expected)
            met = await self._exchange_hellos(secured, remote, dialled=dialled)
            outcome = met if isinstance(met, Unreachable) else await self._admit(secured, met)
        except HandshakeFailed as failure:
            return Unreachable(str(failure))
        finally:
            if not isinstance(outcome, Peer):
                socket.cut()
        if outcome is not None:
            return outcome
        self.counters.duplicates_closed += 1
        return await self._otherwise_connected(secured.node_id)

    async def _exchange_hellos(self, secured: Secured, remote: str, *, dialled: bool) -> Hellos | Unreachable:
        """What the two said, or why it can't become a connection.

        Raises: HandshakeFailed.
        """
        known = self._peers.get(secured.node_id)
        uptime = boot_clock() - self._began
        ours = hello(self._boot, self.addresses, self._versions, uptime_seconds=uptime, holds=known)
        await secured.send(ours)
        theirs = await secured.receive()
        if not isinstance(theirs, Hello):
            raise HandshakeFailed("its hello makes no sense")
        if secured.node_id == self.node_id:
            if theirs.boot == self._boot:
                return ITSELF
            older = precedes(-theirs.uptime / 1000, theirs.boot, -ours.uptime / 1000, self._boot)
            self._met_copy(remote, older=older)
            return COPY
        version = self._versions.agreed(theirs.versions)
        if version is None:
            self._add_incompatible(Incompatible(secured.node_id, theirs.versions, remote))
            return Unreachable(f"it speaks protocol version {theirs.versions}, this node {self._versions}")
        number, now = next(self._numbers), trio.current_time()
        began = boot_clock() - theirs.uptime / 1000
        peer = Peer(secured.node_id, theirs.boot, version, theirs.addresses, remote, dialled, number, now, began)
        return Hellos(ours, theirs, known, peer)

    async def _admit(self, secured: Secured, hellos: Hellos) -> Peer | Unreachable | None:
        """The peer, once its connection has its place; none where another connection to it is kept.

        Raises: HandshakeFailed.
        """
        known, peer = hellos.known, hellos.peer
        if known is not None and known.boot != peer.boot:
            stays = not await self._yields(known, peer)
            await secured.send(OtherLife(stays))
            if stays:
                return Unreachable("it has the identity of a node that is connected and older")
        if hellos.theirs.holds not in {b"", self._boot}:
            word = await secured.receive()
            if not isinstance(word, OtherLife):
                raise HandshakeFailed("its hello makes no sense")
            if word.stays:
                self._was_turned_away(peer.remote)
                return TURNED_AWAY
        return peer if await self._decide(secured, peer) else None

    async def _decide(self, secured: Secured, peer: Peer) -> bool:
        """Whether this connection is kept, by the rule of `p2p.hello`; if so, it has its place now."""
        if decides(self.node_id, peer.node_id):
            if keep(self._peers.get(peer.node_id), peer):
                # Its place comes before the word to the peer: other connections are decided on meanwhile.
                self._keep(secured, peer, Decision(True))
                return True
            await secured.send(Decision(False))
            return False
        answer = await secured.receive()
        if not isinstance(answer, Decision):
            raise HandshakeFailed("its hello makes no sense")
        existing = self._peers.get(peer.node_id)
        if not answer.keep or (existing is not None and outlives(existing, peer)):
            return False
        self._keep(secured, peer, None)
        return True

    async def _otherwise_connected(self, node_id: NodeId) -> Peer | Unreachable:
        """The peer, once the other connection to it is known here too."""
        with trio.move_on_after(GOODBYE_SECONDS):
            revision = self.revision
            while node_id not in self._peers:
                revision = await self.wait_past(revision)
        return self._peers.get(node_id, Unreachable("it holds another connection to this node"))
