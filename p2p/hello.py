"""What two nodes say to each other before a connection counts, and the rule that leaves one connection for each pair.

Both send a `Hello` at once. The node with the lower id alone decides (`keep`): so, when both dial at the same time, the same
one of the two connections is kept at both ends, and no stream was ever opened on the other. The other node awaits the
decision, one message. Versions need no decision: each end sees from the two hellos whether they have one in common.
"""

from typing import Annotated

import msgspec

from p2p.ids import NodeId
from p2p.stream import Peer
from p2p.transport import Versions
from p2p.wire import FrameCodec

HELLO_BYTES_MAX = 4096
ADDRESSES_MAX = 16
ADDRESS_CHARACTERS_MAX = 200
BOOT_BYTES = 8
# Longer than any handshake takes. A peer does not dial while it holds a connection, so a dial from one whose connection is
# older than this says that it lost that one.
SIMULTANEOUS_SECONDS = 10.0

Version = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
ListenAddress = Annotated[str, msgspec.Meta(max_length=ADDRESS_CHARACTERS_MAX)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Versions spoken, the life of the sender's process (random), and where it listens. Later versions may append fields."""

    version_min: Version
    version_max: Version
    boot: Annotated[bytes, msgspec.Meta(min_length=BOOT_BYTES, max_length=BOOT_BYTES)]
    addresses: Annotated[tuple[ListenAddress, ...], msgspec.Meta(max_length=ADDRESSES_MAX)] = ()

    @property
    def versions(self) -> Versions:
        """The range as a value."""
        return Versions(self.version_min, self.version_max)


class Decision(msgspec.Struct, frozen=True, array_like=True, tag="decision"):
    """The lower id's: whether this connection is kept, or closed in favour of one that the two have already."""

    keep: bool


HELLO_CODEC: FrameCodec[Hello | Decision] = FrameCodec(Hello | Decision, HELLO_BYTES_MAX)


def hello(boot: bytes, addresses: tuple[str, ...], versions: Versions) -> Hello:
    """The hello to send, with as many of the addresses as it may hold."""
    fitting = tuple(address for address in addresses if len(address) <= ADDRESS_CHARACTERS_MAX)
    return Hello(versions.lowest, versions.highest, boot, fitting[:ADDRESSES_MAX])


def decides(our_id: NodeId, their_id: NodeId) -> bool:
    """Whether this node decides which connection of the two is kept."""
    return our_id < their_id


def keep(existing: Peer | None, boot: bytes, now: float) -> bool:
    """The decider's rule for a connection just made, where `existing` is the one that it holds to the same peer.

    The first one stays, unless it is of a former life of the peer or too old to be half of a simultaneous dial.
    """
    return existing is None or existing.boot != boot or now - existing.since > SIMULTANEOUS_SECONDS
