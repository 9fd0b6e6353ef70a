"""In what two replicas differ.

Replicas move while they are looked at, so that a difference may be nothing but a change on its way. What was at one node when
it was first looked at must be at the other by the second look, a repair's time later (`lasting`).

Pure: values in, values out.
"""

from enum import Enum

from msgspec import Struct

from node.dump_document import DumpDocument, MemberDocument, RecordDocument

_LIVENESS = ("alive", "suspect", "dead", "left")

Standing = tuple[int, str, int, int]


class Behind(Enum):
    """Which side lacks something that the other has."""

    OURS = "ours"
    THEIRS = "theirs"
    NEITHER = "neither"  # both can't be right: the same version with another value


class Difference(Struct, frozen=True):
    """One thing that is not the same. `ours` and `theirs` are for people."""

    node: str  # whose records
    what: str  # member, standing, records, or a record's key
    ours: str
    theirs: str
    behind: Behind


def diff(ours: DumpDocument, theirs: DumpDocument) -> list[Difference]:
    """All differences, by member. What each side believes, and which deletes it remembers, is its own affair."""
    found: list[Difference] = []
    our_members = {member.node: member for member in ours.members}
    their_members = {member.node: member for member in theirs.members}
    for node in sorted(our_members.keys() | their_members.keys()):
        a, b = our_members.get(node), their_members.get(node)
        if a is None or b is None:
            behind = Behind.OURS if a is None else Behind.THEIRS
            found.append(Difference(_name(a, b), "member", _presence(a), _presence(b), behind))
        else:
            found += _members(a, b)
    return found


def lasting(ours: tuple[DumpDocument, DumpDocument], theirs: tuple[DumpDocument, DumpDocument]) -> list[Difference]:
    """What one side lacked at the second look of what the other had at the first."""
    there = [found for found in diff(ours[0], theirs[1]) if found.behind is not Behind.OURS]
    here = [found for found in diff(ours[1], theirs[0]) if found.behind is not Behind.THEIRS]
    return sorted({*there, *here}, key=lambda found: (found.node, found.what, found.behind.value))


def _members(a: MemberDocument, b: MemberDocument) -> list[Difference]:
    name = _name(a, b)
    found: list[Difference] = []
    if _standing(a) != _standing(b):
        found.append(Difference(name, "standing", _standing_text(a), _standing_text(b), _lower(_standing(a) < _standing(b))))
    if a.records_generation != b.records_generation:
        lower = _lower(a.records_generation < b.records_generation)
        return [*found, Difference(name, "records", _version_text(a), _version_text(b), lower)]
    if a.max_version != b.max_version:
        lower = _lower(a.max_version < b.max_version)
        found.append(Difference(name, "records", _version_text(a), _version_text(b), lower))
    ours = {record.key: record for record in a.records}
    theirs = {record.key: record for record in b.records}
    for key in sorted(ours.keys() | theirs.keys()):
        behind = _record(ours.get(key), theirs.get(key), a.max_version, b.max_version)
        if behind is not None:
            found.append(Difference(name, key, _record_text(ours.get(key)), _record_text(theirs.get(key)), behind))
    return found


def _record(a: RecordDocument | None, b: RecordDocument | None, our_max: int, their_max: int) -> Behind | None:
    """Who lacks what the other has of one record of one generation, of which each side has all changes up to a version."""
    our_version, their_version = (a.version if a is not None else 0), (b.version if b is not None else 0)
    if our_version == their_version:
        return None if a is None or b is None or a.digest == b.digest else Behind.NEITHER
    if our_version > their_version:
        # Theirs is older, or gone: it is behind unless it has heard of ours already, and then has forgotten it as deleted.
        if their_max < our_version:
            return Behind.THEIRS
        return Behind.OURS if b is None and their_max > our_max else Behind.NEITHER
    if our_max < their_version:
        return Behind.OURS
    return Behind.THEIRS if a is None and our_max > their_max else Behind.NEITHER


def _standing(member: MemberDocument) -> Standing:
    liveness = _LIVENESS.index(member.stored) if member.stored in _LIVENESS else len(_LIVENESS)
    return (*member.generation, member.incarnation, liveness)


def _lower(ours: bool) -> Behind:
    return Behind.OURS if ours else Behind.THEIRS


def _name(*members: MemberDocument | None) -> str:
    """The peer id, if either side knows it."""
    held = [member for member in members if member is not None]
    return next((member.node_id for member in held if member.node_id is not None), held[0].node)


def _presence(member: MemberDocument | None) -> str:
    return "not known" if member is None else f"{_standing_text(member)}, {_version_text(member)}"


def _standing_text(member: MemberDocument) -> str:
    counter, boot = member.generation
    return f"{member.stored} (generation {counter}.{boot}, incarnation {member.incarnation})"


def _version_text(member: MemberDocument) -> str:
    counter, boot = member.records_generation
    return f"version {member.max_version} (generation {counter}.{boot})"


def _record_text(record: RecordDocument | None) -> str:
    return "none" if record is None else f"version {record.version}"
