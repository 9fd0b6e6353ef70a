"""The connections that count: their tasks, their streams, their end. How one comes about is in `libp2p_transport`."""

from dataclasses import dataclass

import structlog
import trio

from p2p.hello import LIFE_SECONDS, Decision, outlives
from p2p.ids import NodeId
from p2p.libp2p_handshake import HandshakeFailed, Secured
from p2p.libp2p_mending import MendedYamux
from p2p.libp2p_stream import YamuxBytes, accept_bytes, open_bytes
from p2p.stream import GOODBYE_SECONDS, Peer, StreamBroken, StreamProtocol, T
from p2p.transport import STREAMS_MAX, Serve, Transport

# isort: split
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.yamux.yamux import YamuxStream

_log = structlog.get_logger("p2p")


@dataclass(eq=False, slots=True)
class Connection:
    """A connection's peer, its muxer, the scope that its tasks run in."""

    peer: Peer
    muxer: MendedYamux
    scope: trio.CancelScope
    inbound: int = 0  # streams that the peer opened and that are still served


class Connections(Transport):
    """At most one connection to each peer.

    Their tasks are in `lasting`, and shielded, so that they can still say goodbye while everything else, which is in `serving`,
    is cancelled.
    """

    def __init__(self, node_id: NodeId, lasting: trio.Nursery, serving: trio.Nursery) -> None:
        super().__init__(node_id)
        self._lasting = lasting
        self._serving = serving
        self._protocols = Multiselect()
        self._connections: dict[NodeId, Connection] = {}

    def serve(self, protocol: StreamProtocol[T], serve: Serve[T]) -> None:
        """As `Transport.serve`."""
        super().serve(protocol, serve)
        self._protocols.add_handler(protocol.name, None)

    async def drop(self, node_id: NodeId) -> None:
        """End the connection to this peer at once, without a word to it; its streams break."""
        connection = self._connections.get(node_id)
        if connection is not None:
            self._lose(connection, "dropped by this node")
        await trio.lowlevel.checkpoint()

    async def _yields(self, known: Peer, newcomer: Peer) -> bool:
        """Whether a connection makes room for another life of its peer; if so, it is gone now. See `p2p.hello`."""
        connection = self._connections.get(known.node_id)
        if connection is None or connection.peer is not known:
            return True
        if outlives(known, newcomer) and await connection.muxer.answers(LIFE_SECONDS):
            return False
        self._lose(connection, "another life of the peer came")
        return True

    async def goodbye(self) -> None:
        """End all connections, each cleanly if that takes no longer than `GOODBYE_SECONDS`."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(GOODBYE_SECONDS):
                async with trio.open_nursery() as nursery:
                    for connection in self._connections.values():
                        nursery.start_soon(connection.muxer.goodbye)
            for connection in list(self._connections.values()):
                self._lose(connection, "this node stops")
                connection.scope.cancel()

    def _keep(self, secured: Secured, peer: Peer, decision: Decision | None) -> None:
        """Give a connection its place, instead of one to the same peer if there is one, and its tasks.

        They tell the peer the decision before anything else, if it waits for one.
        """
        former = self._connections.get(peer.node_id)
        if former is not None:
            self._lose(former, "replaced by a newer connection")
        secured.socket.allowance = None
        connection = Connection(peer, MendedYamux(secured.session, secured.socket), trio.CancelScope(shield=True))
        self._connections[peer.node_id] = connection
        self._add_peer(peer)
        self._lasting.start_soon(self._run, connection, secured, decision)

    async def _run(self, connection: Connection, secured: Secured, decision: Decision | None) -> None:
        muxer = connection.muxer
        with connection.scope:
            async with trio.open_nursery() as nursery:
                if decision is not None:
                    try:
                        await secured.send(decision)
                    except HandshakeFailed as failure:
                        muxer.sever(str(failure))
                nursery.start_soon(muxer.run_writer)
                nursery.start_soon(self._accept_streams, connection)
                await muxer.start()
                nursery.cancel_scope.cancel()
        self._lose(connection, "its tasks ended")

    def _lose(self, connection: Connection, why: str) -> None:
        connection.muxer.sever(why)
        if self._connections.get(connection.peer.node_id) is connection:
            del self._connections[connection.peer.node_id]
        self._remove_peer(connection.peer, connection.muxer.broken_because)

    async def _accept_streams(self, connection: Connection) -> None:
        while True:
            try:
                stream = await connection.muxer.accept_stream()
            except MuxedConnUnavailable:
                return
            if connection.inbound >= STREAMS_MAX:
                self.counters.streams_refused += 1
                YamuxBytes(stream, connection.muxer).reset()
                continue
            connection.inbound += 1
            self._serving.start_soon(self._accept_stream, connection, stream)

    async def _accept_stream(self, connection: Connection, stream: YamuxStream) -> None:
        try:
            accepted = await accept_bytes(connection.muxer, stream, self._protocols)
            if accepted is None:
                self.counters.streams_refused += 1
                return
            carrier, name = accepted
            await self._serve_stream(connection.peer, self._served[name], carrier)
        finally:
            connection.inbound -= 1

    async def _open(self, peer: Peer, protocol_name: str) -> YamuxBytes:
        connection = self._connections.get(peer.node_id)
        if connection is None:
            raise StreamBroken("the connection was lost")
        return await open_bytes(connection.muxer, protocol_name)
