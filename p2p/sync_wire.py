"""What members say to each other on the sync stream, as types that the one codec checks.

Every frame stands for itself: nodes are named by their 16 bytes each time, never by an index agreed on earlier. A lost,
doubled or replayed frame can then be useless but never be misread, and no stream state has to be kept for reading.

    HELLO    first on each stream: who I am, and the highest I have heard of you, so that you can outbid or refute it
    ROOT     one hash over all that I hold; equal: the exchange ends here
    BUCKETS  32 of them; only rows of unequal buckets are worth sending (a summary of 1,000 members is 45 KB)
    SUMMARY  for each member its standing and how far I have its records
    DELTA    standings and records that you lack
    PING, ACK, PING_REQUEST, NACK: probes, straight or through a helper

A change of a record is `[kind, step, name, value]`, a delete the same with nil for the value. `step` is the distance to the
version before, so that versions in a part ascend by construction and take one byte. Kinds are numbers, their meaning belongs
to whoever publishes; a kind without a known schema is kept and passed on as it came.
"""

import hashlib
from typing import Annotated

from msgspec import Meta, Raw, Struct

from p2p.lattice import Generation, Liveness, Standing
from p2p.wire import FrameCodec, ProtocolViolation

PROTOCOL_VERSION = 1

FRAME_BYTES_MAX = 256 << 10
VALUE_BYTES_MAX = 4 << 10
NAME_CHARACTERS_MAX = 256
NAME_PARTS_MAX = 4
MEMBERS_MAX = 10_000  # rows of a summary, parts of a delta
BUCKETS = 32
ROOT_BYTES = 8
RUMOURS_MAX = 64

Node = Annotated[bytes, Meta(min_length=16, max_length=16)]
Version = Annotated[int, Meta(ge=0, lt=1 << 53)]
Kind = Annotated[int, Meta(ge=1, lt=256)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name = (
    Number
    | Annotated[str, Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
    | Annotated[tuple[Number, ...], Meta(min_length=1, max_length=NAME_PARTS_MAX)]
)
Key = tuple[int, Name]  # kind and name
Sequence = Annotated[int, Meta(ge=0, lt=1 << 32)]
Incarnation = Annotated[int, Meta(ge=0, lt=1 << 32)]
Hash = Annotated[bytes, Meta(min_length=ROOT_BYTES, max_length=ROOT_BYTES)]

NIL = b"\xc0"  # the value of a delete; no record has it


def node16(peer_id: str) -> bytes:
    """A node's name on this wire: the first 16 bytes of SHA-256 of its peer id."""
    return hashlib.sha256(peer_id.encode()).digest()[:16]


class Claim(Struct, frozen=True, array_like=True, gc=False):
    """The highest that the sender holds, or has buried, of the member it greets."""

    generation: Generation
    incarnation: Incarnation
    buried: bool
    liveness: Liveness
    held: bool  # the sender has another stream open, right now, to a node of this name and generation


class Hello(Struct, frozen=True, array_like=True, tag=0, gc=False):
    """First frame of each direction of a stream."""

    protocol_min: Annotated[int, Meta(ge=1, lt=1 << 16)]
    protocol_max: Annotated[int, Meta(ge=1, lt=1 << 16)]
    cluster: Annotated[bytes, Meta(min_length=16, max_length=16)]  # tag made of the cluster's name
    node: Node
    standing: Standing
    claim: Claim | None


class Root(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The sender's whole replica in one hash."""

    root: Hash


class Buckets(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """One hash for each bucket of members, joined into one string."""

    hashes: Annotated[bytes, Meta(min_length=ROOT_BYTES * BUCKETS, max_length=ROOT_BYTES * BUCKETS)]


class Row(Struct, frozen=True, array_like=True, gc=False):
    """What the sender holds of one member."""

    node: Node
    standing: Standing
    version: Version  # of its records; 0 where it has none of this generation


class Summary(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Rows of the members in `buckets` (a bit each). With `reply`, it is complete for these buckets and asks for the same."""

    buckets: Annotated[int, Meta(ge=0, lt=1 << BUCKETS)]
    reply: bool
    rows: Annotated[list[Row], Meta(max_length=MEMBERS_MAX)]


class Change(Struct, frozen=True, array_like=True, gc=False):
    """One written or, where the value is nil, deleted record."""

    kind: Kind
    step: Annotated[int, Meta(ge=1, lt=1 << 53)]
    name: Name
    value: Raw


class Part(Struct, frozen=True, array_like=True, gc=False):
    """One member's standing, and its changes above version `since` up to `upto`.

    Deletes up to `floor` are no longer told one by one: who is below it takes a snapshot, which replaces all there was.
    """

    node: Node
    standing: Standing
    since: Version
    upto: Version
    floor: Version
    snapshot: bool
    changes: list[Change]


class Rumour(Struct, frozen=True, array_like=True, gc=False):
    """Bad news of a member with the name of who found out; several accusers shorten the suspicion."""

    node: Node
    standing: Standing
    accuser: Node
    refused: bool  # its stream broke and its address refuses a new one: the process is gone


class Delta(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """News."""

    rumours: Annotated[list[Rumour], Meta(max_length=RUMOURS_MAX)]
    parts: Annotated[list[Part], Meta(max_length=MEMBERS_MAX)]


class Ping(Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Are you there? `said` is what the sender holds against the receiver, if it does."""

    sequence: Sequence
    said: Standing | None = None


class Ack(Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Yes. `said` is the answer to the ping's `said`."""

    sequence: Sequence
    said: Standing | None = None


class PingRequest(Struct, frozen=True, array_like=True, tag=8, gc=False):
    """Please probe this member for me."""

    sequence: Sequence
    node: Node


class Nack(Struct, frozen=True, array_like=True, tag=9, gc=False):
    """I did as asked and had no answer; but you and I can talk."""

    sequence: Sequence


Message = Hello | Root | Buckets | Summary | Delta | Ping | Ack | PingRequest | Nack
MESSAGES: FrameCodec[Message] = FrameCodec(Message, FRAME_BYTES_MAX)


def check_rows(rows: list[Row]) -> None:
    """Raises: ProtocolViolation where a summary says two things of one member."""
    if len({row.node for row in rows}) != len(rows):
        raise ProtocolViolation("a summary names one member twice")
