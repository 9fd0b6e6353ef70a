"""A replica as it lies in memory, taken at one moment: records with their values as the bytes in which they travel.

Taking it costs no more than walking over it, so it is done between two other things in the node's thread; what is made of it
(`node.dump_document`) needs that thread no more. It also is what goes over the network (`node.dump_stream`): whoever asks
reads the values by its own lights, which may be newer.

Pure: values in, values out.
"""

from collections.abc import Callable, Mapping
from typing import Annotated

from msgspec import Meta, Raw, Struct

from node.records import PROFILE, Profile
from p2p.lattice import Generation, Liveness, Standing
from p2p.replica import NAMESPACE_WEIGHT_MAX, Member, Replica
from p2p.sync_wire import MEMBERS_MAX, ROOT_BYTES, Kind, Name, Node, Version, node16

RECORDS_MAX = NAMESPACE_WEIGHT_MAX // 12  # a record weighs more than its 12 bytes around name and value
COUNTERS_MAX = 256

PeerId = Annotated[str, Meta(max_length=128)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]


class DumpedRecord(Struct, frozen=True, array_like=True):
    """One record; `value` is msgpack."""

    kind: Kind
    name: Name
    version: Version
    value: Raw


class DumpedMember(Struct, frozen=True, array_like=True, tag=1):
    """One member's standing and records."""

    node: Node
    peer_id: PeerId  # empty where it is not known
    standing: Standing
    believed: Liveness | None  # by the node whose replica it is
    records_generation: Generation  # not that of the standing while a new life's records are on their way
    max_version: Version
    floor: Version
    deletes: Count  # remembered
    records: Annotated[tuple[DumpedRecord, ...], Meta(max_length=RECORDS_MAX)]


class DumpHead(Struct, frozen=True, array_like=True, tag=0):
    """What is said of the whole."""

    node_id: PeerId
    root: Annotated[bytes, Meta(min_length=ROOT_BYTES, max_length=ROOT_BYTES)]
    members: Annotated[int, Meta(ge=0, le=MEMBERS_MAX)]
    graves: Count
    counters: Annotated[dict[str, Count], Meta(max_length=COUNTERS_MAX)]


class ReplicaDump(Struct, frozen=True):
    """A whole replica."""

    head: DumpHead
    members: tuple[DumpedMember, ...]


def take_dump(
    node_id: str,
    replica: Replica,
    believe: Callable[[bytes], Liveness | None],
    *,
    peer_ids: Mapping[bytes, str] = {},
    counters: Mapping[str, int] = {},
) -> ReplicaDump:
    """The replica of the node `node_id` as it is now. `peer_ids` are of those that have no profile in it."""
    known = {**peer_ids, node16(node_id): node_id}
    members = tuple(_member(member, believe(node), known.get(node, "")) for node, member in replica.members.items())
    return ReplicaDump(DumpHead(node_id, replica.root, len(members), len(replica.graves), dict(counters)), members)


def _member(member: Member, believed: Liveness | None, known: str) -> DumpedMember:
    namespace = member.namespace
    profile = namespace.records.get((PROFILE, 0))
    claimed = profile.content.peer_id if profile is not None and isinstance(profile.content, Profile) else ""
    return DumpedMember(
        member.node,
        claimed if node16(claimed) == member.node else known,
        member.standing,
        believed,
        namespace.generation,
        namespace.max_version,
        namespace.floor,
        len(namespace.deletes),
        tuple(
            DumpedRecord(kind, name, record.version, Raw(record.value)) for (kind, name), record in namespace.records.items()
        ),
    )
