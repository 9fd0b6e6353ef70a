"""A node's copy of everything: each member's standing and records, its own among them.

The replica moves only up: by its own node's writes and by joins. It knows no peers, no timers and no opinion of its own; who is
asked, told, probed and believed is decided in `sync` and `membership`.

Pure: no clock, no randomness, no IO.
"""

import hashlib
from collections.abc import Iterable, Mapping
from enum import Enum
from struct import Struct as Layout

import msgspec
from msgspec import Raw, Struct

from p2p.lattice import ALIVE, DEAD, Grave, Standing, rises_from
from p2p.namespace import NAMESPACE_BYTES_MAX, RECORD_BYTES, Judgement, Namespace, Record, Written, name_bytes
from p2p.sync_wire import BUCKETS, MEMBERS_MAX, NIL, VALUE_BYTES_MAX, Change, Name, Part, Row
from p2p.wire import ProtocolViolation

GRAVES_MAX = 10_000
# What others may make this node hold: members, the records of one (twice what its writer may have, since old ones may lie
# beside new ones where a delta was cut), and of all. Beyond it nothing is taken in; what is held stays right, only
# incomplete.
NAMESPACE_WEIGHT_MAX = 2 * NAMESPACE_BYTES_MAX
REPLICA_WEIGHT_MAX = 256 << 20
PART_BYTES = 80  # of a part around its changes, at most


class _Reader(Struct, frozen=True):
    name: type[int] | type[str] | int
    value: msgspec.msgpack.Decoder[object]


class Schema:
    """For each known kind what its names are (numbers, strings, or tuples of so many numbers) and the type of its values.

    Records of other kinds are kept and passed on unread.
    """

    def __init__(self, kinds: Mapping[int, tuple[type[int] | type[str] | int, object]]) -> None:
        self.readers = {kind: _Reader(name, msgspec.msgpack.Decoder(value)) for kind, (name, value) in kinds.items()}


class Joined(Enum):
    """What became of a part."""

    OLD = "nothing new"
    NEW = "something new"
    GAP = "changes before these are missing here"
    BURIED = "about a forgotten member, and not above its grave"
    FULL = "more than this node is willing to hold"


class Member(Struct, gc=True, weakref=False):
    """One member as this replica holds it."""

    node: bytes
    standing: Standing
    namespace: Namespace
    mark: int = 0  # its share of the root

    @property
    def version(self) -> int:
        """How far its records of its present generation are here."""
        return self.namespace.max_version if self.namespace.generation == self.standing.generation else 0

    @property
    def current(self) -> bool:
        """Whether the records are of the boot that now runs: an outbid counter alone doesn't make them old."""
        return self.namespace.generation.nonce == self.standing.generation.nonce


class Replica:
    """All members, and hashes over them that are kept up in constant time a change."""

    def __init__(self, schema: Schema) -> None:
        self.members: dict[bytes, Member] = {}
        self.graves: dict[bytes, Grave] = {}  # oldest burial first, GRAVES_MAX at most
        self.roots = [0] * BUCKETS
        self.weight = 0  # bytes of all records that others wrote, as they travel
        self._readers = schema.readers

    @property
    def root(self) -> bytes:
        """One hash over standings and versions of all members: the digest."""
        root = 0
        for bucket in self.roots:
            root ^= bucket
        return root.to_bytes(8, "big")

    @property
    def bucket_roots(self) -> bytes:
        """The hashes of the buckets, one after the other."""
        return b"".join(root.to_bytes(8, "big") for root in self.roots)

    # Joins.

    def join_standing(self, node: bytes, standing: Standing) -> bool:
        """Join what is said of a member; True where that is new here.

        A boot that ended takes its records along: they are wiped as soon as anybody tells of the new one.
        """
        member = self.members.get(node)
        if member is None:
            if len(self.members) >= MEMBERS_MAX:
                return False
            grave = self.graves.get(node)
            if grave is not None:
                if not rises_from(grave, standing):
                    return False
                del self.graves[node]
            self._mark(self._enter(node, standing))
            return True
        if standing <= member.standing:
            return False
        member.standing = standing
        generation = standing.generation
        if generation.nonce != member.namespace.generation.nonce and generation > member.namespace.generation:
            self.weight -= member.namespace.weight
            member.namespace = Namespace(generation)
        self._mark(member)
        return True

    def join_records(self, part: Part, changes: list[Written]) -> tuple[Joined, list[Written] | None]:
        """Join the records of a checked part whose standing was joined; also the changes, None for "all of them"."""
        member = self.members.get(part.node)
        if member is None or part.standing.generation < member.standing.generation:
            return (Joined.BURIED if member is None else Joined.OLD), []
        namespace, generation = member.namespace, part.standing.generation
        judgement = namespace.judge(generation, part.since, part.upto, part.snapshot)
        if judgement in {Judgement.APPLY, Judgement.REPLACE}:
            before = namespace.weight
            added = sum(change.weight for change in changes)
            kept = before if judgement is Judgement.APPLY else 0
            if kept + added > NAMESPACE_WEIGHT_MAX or self.weight - before + kept + added > REPLICA_WEIGHT_MAX:
                return Joined.FULL, []
            fresh: list[Written] | None = None
            if judgement is Judgement.APPLY:
                fresh = namespace.apply(changes, part.upto, part.floor)
            else:
                member.namespace = namespace.replaced(generation, changes, part.upto, part.floor)
            self.weight += member.namespace.weight - before
            self._mark(member)
            return Joined.NEW, fresh
        return (Joined.GAP if judgement is Judgement.GAP else Joined.OLD), []

    def check(self, part: Part) -> list[Written]:
        """Read a part's changes, without applying any.

        Raises: ProtocolViolation where anything in it breaks a rule.
        """
        version, upto = part.since, part.upto
        if (version or part.floor != upto) if part.snapshot else not part.floor <= version <= upto:
            raise ProtocolViolation("a part's versions contradict each other")
        changes: list[Written] = []
        readers = self._readers
        for change in part.changes:
            version += change.step
            key = (change.kind, change.name)
            value = bytes(change.value)
            if value == NIL:
                changes.append(Written(key, version, None))
                continue
            reader = readers.get(change.kind)
            content = _read(reader, change.name, value) if reader is not None else None
            size = RECORD_BYTES + name_bytes(change.name) + len(value)
            changes.append(Written(key, version, Record(version, value, content, size)))
        _check_changes(part, changes, version)
        return changes

    # What to tell.

    def part(self, node: bytes, since: int, budget: int) -> tuple[Part, int, bool]:
        """News of a member for a peer that has its records up to `since`, 0 where it has none of this generation.

        Whatever starts at 0 is a snapshot: it may take the place of an older generation's records, at once and whole. Returns
        the part, its size in bytes at most, and whether it had to be cut to keep the budget.
        """
        member = self.members[node]
        namespace, standing = member.namespace, member.standing
        if namespace.generation != standing.generation:
            return Part(node, standing, 0, 0, 0, False, []), PART_BYTES, False
        if not since or since < namespace.floor:
            changes, size = namespace.whole(), PART_BYTES
            upto = namespace.max_version
            size += sum(change.record.weight for change in changes if change.record is not None)
            return Part(node, standing, 0, upto, upto, True, _steps(changes, 0)), size, False
        upto = namespace.max_version
        if since >= upto:
            return Part(node, standing, upto, upto, min(namespace.floor, upto), False, []), PART_BYTES, False
        changes, size = [], PART_BYTES
        cut = False
        for change in namespace.above(since):
            size += change.weight
            if size > budget and changes:
                cut, upto = True, changes[-1].version
                break
            changes.append(change)
        return Part(node, standing, since, upto, namespace.floor, False, _steps(changes, since)), min(size, budget), cut

    def rows(self, buckets: int) -> list[Row]:
        """A row for each member in the given buckets."""
        return [
            Row(member.node, member.standing, member.version)
            for member in self.members.values()
            if buckets >> bucket_of(member.node) & 1
        ]

    def row(self, node: bytes) -> Row | None:
        """One member's row, None for one never heard of.

        Whoever tells of a buried member is told that it is dead: then that is so everywhere, or the member refutes it.
        """
        member = self.members.get(node)
        if member is not None:
            return Row(node, member.standing, member.version)
        grave = self.graves.get(node)
        return None if grave is None else Row(node, Standing(grave.generation, grave.incarnation, DEAD), 0)

    def highest(self, node: bytes) -> tuple[Standing, bool] | None:
        """The highest known of a member, and whether that is its grave."""
        member = self.members.get(node)
        if member is not None:
            return member.standing, False
        grave = self.graves.get(node)
        return None if grave is None else (Standing(grave.generation, grave.incarnation, ALIVE), True)

    # Its own node's changes, and forgetting.

    def touch(self, member: Member) -> None:
        """Bring the hashes up to date after a change that was made in place by the member's own node."""
        self._mark(member)

    def bury(self, node: bytes) -> None:
        """Forget a member but for its grave."""
        member = self.members.pop(node)
        self.weight -= member.namespace.weight
        self.roots[bucket_of(node)] ^= member.mark
        self.graves.pop(node, None)
        self.graves[node] = Grave(member.standing.generation, member.standing.incarnation)
        while len(self.graves) > GRAVES_MAX:
            del self.graves[next(iter(self.graves))]

    def _enter(self, node: bytes, standing: Standing) -> Member:
        member = Member(node, standing, Namespace(standing.generation))
        self.members[node] = member
        return member

    def _mark(self, member: Member) -> None:
        mark = row_hash(member.node, member.standing, member.version)
        self.roots[bucket_of(member.node)] ^= member.mark ^ mark
        member.mark = mark


_ROW = Layout(">QQIBQ")


def row_hash(node: bytes, standing: Standing, version: int) -> int:
    """A member's share of the root, 64 bits."""
    (counter, nonce), incarnation, liveness = standing
    packed = _ROW.pack(counter, nonce, incarnation, liveness, version)
    return int.from_bytes(hashlib.blake2b(node + packed, digest_size=8).digest(), "big")


def bucket_of(node: bytes) -> int:
    """The bucket of a member."""
    return node[0] % BUCKETS


_NIL = Raw(NIL)


def _read(reader: _Reader, name: Name, value: bytes) -> object:
    """Check a known kind's name and value against their types."""
    expected = reader.name
    if not isinstance(name, expected) if isinstance(expected, type) else not isinstance(name, tuple) or len(name) != expected:
        raise ProtocolViolation("bad record: its name is not of its kind's shape")
    try:
        return reader.value.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"bad record: {error}") from error


def _check_changes(part: Part, changes: list[Written], last: int) -> None:
    if not changes:
        return
    if last > part.upto:
        raise ProtocolViolation("a change is above its part's end")
    if len({change.key for change in changes}) != len(changes):
        raise ProtocolViolation("a part changes one record twice")
    records = [change.record for change in changes if change.record is not None]
    if part.snapshot and len(records) != len(changes):
        raise ProtocolViolation("a snapshot has no deletes")
    if any(len(record.value) > VALUE_BYTES_MAX for record in records):
        raise ProtocolViolation(f"a record is above the cap of {VALUE_BYTES_MAX} bytes")


def _steps(changes: Iterable[Written], since: int) -> list[Change]:
    steps: list[Change] = []
    for change in changes:
        (kind, name), version, record = change.key, change.version, change.record
        steps.append(Change(kind, version - since, name, _NIL if record is None else Raw(record.value)))
        since = version
    return steps
