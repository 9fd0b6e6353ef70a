"""What two nodes say to each other before a connection counts, and the rule that leaves one connection for each pair.

Both send a `Hello` at once. The node with the lower id alone decides (`keep`): so, when both dial at the same time, the same
one of the two connections is kept at both ends, and no stream was ever opened on the other. The other node awaits the
decision, one message. Versions need no decision: each end sees from the two hellos whether they have one in common.

Two processes can have one identity: a node that was killed and started again, of whose end a neighbour has not heard, or a
copied data directory that runs beside its original. Of two that live, the one that started first stays:

- Where the two meet each other, their hellos tell which one is older; the other one has met its `clash` and stops.
- A third node that has a connection to one of them says so in its hello (`holds`) when the other one comes. Then it finds out,
  and says before any decision (`OtherLife`), whether the one that it knows is the older one and answers. If so, the newcomer is
  turned away, and the older one never notices; one that is turned away so for longer than `DOUBLE_SECONDS` stops. If not,
  the connection that it had makes room at once.
"""

from typing import Annotated

import msgspec

from p2p.ids import NodeId
from p2p.stream import Peer
from p2p.transport import Versions
from p2p.wire import FrameCodec

HELLO_BYTES_MAX = 4096
UPTIME_MILLISECONDS_MAX = 1 << 53
ADDRESSES_MAX = 16
ADDRESS_CHARACTERS_MAX = 200
BOOT_BYTES = 8
# Longer than any handshake takes. A peer does not dial while it holds a connection, so a dial from one whose connection is
# older than this says that it lost that one.
SIMULTANEOUS_SECONDS = 10.0
LIFE_SECONDS = 0.5  # for a known life to answer, where another one wants its place
# Two processes that started within this are told apart by their boots: neighbours, each with its own delays, must judge alike.
TOGETHER_SECONDS = 1.0

Version = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
ListenAddress = Annotated[str, msgspec.Meta(max_length=ADDRESS_CHARACTERS_MAX)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Versions spoken, the life of the sender's process (`boot`, its own), and where it listens.

    `uptime`: milliseconds since that process started, on a clock that no setting of the wall clock moves. `holds`: the life of
    the receiver to which the sender has a connection now, if any. Later versions may append fields.
    """

    version_min: Version
    version_max: Version
    boot: Annotated[bytes, msgspec.Meta(min_length=BOOT_BYTES, max_length=BOOT_BYTES)]
    addresses: Annotated[tuple[ListenAddress, ...], msgspec.Meta(max_length=ADDRESSES_MAX)] = ()
    uptime: Annotated[int, msgspec.Meta(ge=0, le=UPTIME_MILLISECONDS_MAX)] = 0
    holds: Annotated[bytes, msgspec.Meta(max_length=BOOT_BYTES)] = b""

    @property
    def versions(self) -> Versions:
        """The range as a value."""
        return Versions(self.version_min, self.version_max)


class Decision(msgspec.Struct, frozen=True, array_like=True, tag="decision"):
    """The lower id's: whether this connection is kept, or closed in favour of one that the two have already."""

    keep: bool


class OtherLife(msgspec.Struct, frozen=True, array_like=True, tag="life"):
    """Whether the life of the receiver that the sender's hello spoke of has to stay: then this connection ends."""

    stays: bool


Greeting = Hello | OtherLife | Decision
HELLO_CODEC: FrameCodec[Greeting] = FrameCodec(Greeting, HELLO_BYTES_MAX)


def hello(
    boot: bytes, addresses: tuple[str, ...], versions: Versions, *, uptime_seconds: float = 0.0, holds: Peer | None = None
) -> Hello:
    """The hello to send, with as many of the addresses as it may hold."""
    fitting = tuple(address for address in addresses if len(address) <= ADDRESS_CHARACTERS_MAX)
    milliseconds = min(max(0, int(uptime_seconds * 1000)), UPTIME_MILLISECONDS_MAX)
    held = holds.boot if holds is not None else b""
    return Hello(versions.lowest, versions.highest, boot, fitting[:ADDRESSES_MAX], milliseconds, held)


def decides(our_id: NodeId, their_id: NodeId) -> bool:
    """Whether this node decides which connection of the two is kept."""
    return our_id < their_id


def precedes(began: float, boot: bytes, other_began: float, other_boot: bytes) -> bool:
    """Whether the first of two lives of one node is the one that stays: it started earlier (both on one clock)."""
    if abs(began - other_began) < TOGETHER_SECONDS:
        return boot < other_boot
    return began < other_began


def outlives(known: Peer, newcomer: Peer) -> bool:
    """Whether the life of a peer that is connected stays when another one comes, if it lives."""
    return known.boot != newcomer.boot and precedes(known.began, known.boot, newcomer.began, newcomer.boot)


def keep(existing: Peer | None, newcomer: Peer) -> bool:
    """The decider's rule for a connection just made, where `existing` is the one that it holds to the same peer.

    The first one stays, unless it is of another life that does not outlive this one, or too old to be half of a simultaneous
    dial.
    """
    if existing is None:
        return True
    if existing.boot != newcomer.boot:
        return not outlives(existing, newcomer)
    return newcomer.since - existing.since > SIMULTANEOUS_SECONDS
