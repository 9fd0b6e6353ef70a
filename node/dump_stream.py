"""A replica over the network, for a peer that holds the cluster's key and does not take part: the protocol `dump/1`.

One stream, one answer: a head, then each member, then the end. Whoever asks opens no sync stream and says nowhere that it
listens, so that it becomes no member and nobody dials it.
"""

from collections.abc import Callable

import trio

from node.config import Config
from node.replica_dump import DumpedMember, DumpHead, ReplicaDump
from p2p.cluster_key import Cluster, cluster
from p2p.identity import Identity
from p2p.replica import NAMESPACE_WEIGHT_MAX, REPLICA_WEIGHT_MAX
from p2p.stream import Stream, StreamProtocol, TransportError
from p2p.transport import ProtocolRefused, Transport, Unreachable
from p2p.wire import FrameCodec, ProtocolViolation

FRAME_BYTES_MAX = NAMESPACE_WEIGHT_MAX + (4 << 10)  # a member whole, with room for its standing
TELL_SECONDS = 30.0  # for one dump, also where the reader is slow
TELLING_MAX = 4  # dumps at once; each holds on to the records that it tells
ASK_SECONDS = 40.0

DumpFrame = DumpHead | DumpedMember
DUMP = StreamProtocol[DumpFrame]("dump/1", FrameCodec(DumpFrame, FRAME_BYTES_MAX))


class DumpFailed(Exception):
    """A peer's replica can't be had; `str()` is one sentence."""


class DumpTeller:
    """Answers with this node's replica: `transport.serve(DUMP, DumpTeller(take).serve)`. Made in trio."""

    def __init__(self, take: Callable[[], ReplicaDump]) -> None:
        self._take = take
        self._places = trio.CapacityLimiter(TELLING_MAX)

    async def serve(self, stream: Stream[DumpFrame]) -> None:
        """Tell it once."""
        with trio.move_on_after(TELL_SECONDS) as scope:
            async with self._places:
                dump = self._take()
                await stream.send(dump.head)
                for member in dump.members:
                    await stream.send(member)
                await stream.close_send()
        if scope.cancelled_caught:
            stream.reset()


async def ask(transport: Transport, address: str) -> ReplicaDump:
    """The replica of the node at a multiaddr or `host:port`.

    Raises: DumpFailed.
    """
    with trio.move_on_after(ASK_SECONDS):
        peer = await transport.dial(address)
        if isinstance(peer, Unreachable):
            raise DumpFailed(f"{address} can't be reached: {peer.reason}")
        try:
            async with await transport.open(peer.node_id, DUMP) as stream:
                return await _read(stream)
        except ProtocolRefused:
            raise DumpFailed(f"the node at {address} does not show its replica: is it of an older version?") from None
        except (TransportError, ProtocolViolation, trio.EndOfChannel) as error:
            raise DumpFailed(f"the dump of {address} broke off: {str(error) or 'it ended early'}") from None
    raise DumpFailed(f"{address} did not show its replica within {ASK_SECONDS:g} seconds")


async def _read(stream: Stream[DumpFrame]) -> ReplicaDump:
    """Raises: what receiving raises; ProtocolViolation where this is no dump."""
    head = await stream.receive()
    if not isinstance(head, DumpHead):
        raise ProtocolViolation("it began without a head")
    members: list[DumpedMember] = []
    held = 0
    async for member in stream:
        if not isinstance(member, DumpedMember):
            raise ProtocolViolation("it has two heads")
        held += sum(len(record.value) for record in member.records)
        if len(members) == head.members or held > REPLICA_WEIGHT_MAX:
            raise ProtocolViolation("there is more of it than a replica has")
        members.append(member)
    if len(members) != head.members:
        raise trio.EndOfChannel
    return ReplicaDump(head, tuple(members))


def cluster_of(config: Config) -> Cluster:
    """The cluster that a configuration names.

    Raises: ClusterKeyError.
    """
    return cluster(config.cluster, config.cluster_key.hex() if config.cluster_key is not None else None)


async def ask_as_stranger(address: str, cluster: Cluster) -> ReplicaDump:
    """The replica of the node at `address`, asked over the network by a node that exists for that alone. Imports libp2p.

    Raises: DumpFailed.
    """
    from p2p.libp2p_transport import open_transport  # noqa: PLC0415 - takes more than a second

    outcome: ReplicaDump | DumpFailed
    async with open_transport(Identity.new(), [], cluster) as transport:
        try:
            outcome = await ask(transport, address)
        except DumpFailed as failure:  # raised again below, where no nursery can wrap it
            outcome = failure
    if isinstance(outcome, DumpFailed):
        raise outcome
    return outcome
