"""The records of one member: a versioned map that it alone writes, and every replica of it.

Each write and each delete takes the next version, so `(generation, key, version)` determines the value and two replicas never
hold a conflict, only more or less. The invariant of a replica, on which all else rests:

    for each key of the writer, the replica holds its current record, or the current version is above `max_version`.

Deletes are kept in a log of bounded length, complete above `floor`. Whoever is at or above the floor is told changes in version
order, cut anywhere; whoever is below takes a snapshot, which replaces everything it had. Changes at or below `max_version` are
never applied. Hence a delete can't be undone by anything that was under way: a delta that still holds the record ends at or
below the version of every replica that saw the delete, and a replica that didn't see it can only get past it by a delta that
contains it or by a snapshot. `(generation, max_version)` is itself the tombstone, and it needs no clock.

Pure: no clock, no randomness, no IO.
"""

from enum import Enum

from msgspec import Struct

from p2p.lattice import Generation
from p2p.sync_wire import FRAME_BYTES_MAX, VALUE_BYTES_MAX, Key, Name

DELETES_MAX = 1024
# A snapshot of a whole namespace fits a frame, with room for its header and the frame's.
NAMESPACE_BYTES_MAX = FRAME_BYTES_MAX - (4 << 10)
# Bytes of a record around its name and value: array, kind, step of up to nine bytes.
RECORD_BYTES = 12


class NamespaceFull(Exception):
    """The writer's records would no longer fit a frame, or this one is too long."""


class Record(Struct, frozen=True, gc=False):
    """A value at its version, as the msgpack it came in; `content` is what its schema made of it, None for unknown kinds."""

    version: int
    value: bytes
    content: object
    weight: int  # bytes it takes in a frame, at most


class Written(Struct, frozen=True, gc=False):
    """A change as replicas apply it; `record` is None for a delete."""

    key: Key
    version: int
    record: Record | None

    @property
    def weight(self) -> int:
        """Bytes it takes in a frame, at most."""
        return self.record.weight if self.record is not None else RECORD_BYTES + name_bytes(self.key[1])


class Judgement(Enum):
    """What is to be done with a part, decided before anything is changed."""

    OLD = "nothing in it is new here"
    GAP = "it starts above what is held here"
    APPLY = "it goes on from what is held here"
    REPLACE = "it takes the place of what is held here"


def name_bytes(name: Name) -> int:
    """Upper bound of a name's length in msgpack."""
    if isinstance(name, int):
        return 9
    if isinstance(name, str):
        return 5 + 4 * len(name)
    return 1 + 9 * len(name)


class Namespace:
    """One member's records at one generation, at its writer or at a replica.

    `records` and `deletes` are ordered by version: a change takes its key out and puts it in at the end.
    """

    __slots__ = ("deletes", "floor", "generation", "max_version", "records", "weight")

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.max_version = 0
        self.floor = 0  # `deletes` is complete above it
        self.records: dict[Key, Record] = {}
        self.deletes: dict[Key, int] = {}
        self.weight = 0  # sum over records and deletes

    def __repr__(self) -> str:
        counter, nonce = self.generation
        return f"<Namespace {counter}.{nonce:x} at {self.max_version}: {len(self.records)} records, floor {self.floor}>"

    # The writer's side.

    def write(self, key: Key, value: bytes, content: object, reserve: int = 0) -> None:
        """Write a record at the next version; `reserve` bytes of room are left for others.

        Raises: NamespaceFull, and nothing is changed.
        """
        if len(value) > VALUE_BYTES_MAX:
            raise NamespaceFull(f"a record of {len(value)} bytes is above the cap of {VALUE_BYTES_MAX}")
        weight = RECORD_BYTES + name_bytes(key[1]) + len(value)
        before = self.records.get(key)
        if self.weight + weight - (before.weight if before else 0) > NAMESPACE_BYTES_MAX - reserve:
            raise NamespaceFull(f"this node's records are full ({self.weight} of {NAMESPACE_BYTES_MAX} bytes)")
        self.max_version += 1
        self._put(Written(key, self.max_version, Record(self.max_version, value, content, weight)))

    def delete(self, key: Key) -> bool:
        """Delete a record at the next version; False where there is none."""
        if key not in self.records:
            return False
        self.max_version += 1
        self._put(Written(key, self.max_version, None))
        return True

    def begin_anew(self, generation: Generation) -> None:
        """Go on under a higher generation of the same boot: the writer outbids what is left of an earlier life."""
        assert generation > self.generation
        self.generation = generation

    # Both sides.

    def _put(self, change: Written) -> None:
        key, version, record = change.key, change.version, change.record
        before = self.records.pop(key, None)
        if before is not None:
            self.weight -= before.weight
        elif self.deletes.pop(key, None) is not None:
            self.weight -= RECORD_BYTES + name_bytes(key[1])
        if record is not None:
            self.records[key] = record
            self.weight += record.weight
            return
        self.deletes[key] = version
        self.weight += RECORD_BYTES + name_bytes(key[1])
        if len(self.deletes) > DELETES_MAX:
            self._raise_floor(next(iter(self.deletes.values())))

    def _raise_floor(self, floor: int) -> None:
        if floor <= self.floor:
            return
        self.floor = floor
        while self.deletes:
            key, version = next(iter(self.deletes.items()))
            if version > floor:
                return
            del self.deletes[key]
            self.weight -= RECORD_BYTES + name_bytes(key[1])

    def above(self, since: int) -> list[Written]:
        """All changes above a version at or above the floor, in version order."""
        assert since >= self.floor
        found: list[Written] = []
        deletes: list[Written] = []
        for key, record in reversed(self.records.items()):
            if record.version <= since:
                break
            found.append(Written(key, record.version, record))
        for key, version in reversed(self.deletes.items()):
            if version <= since:
                break
            deletes.append(Written(key, version, None))
        if deletes:
            found += deletes
            found.sort(key=_version)
        else:
            found.reverse()
        return found

    def whole(self) -> list[Written]:
        """All records in version order: what a snapshot holds."""
        return [Written(key, record.version, record) for key, record in self.records.items()]

    # The replica's side.

    def judge(self, generation: Generation, since: int, upto: int, snapshot: bool) -> Judgement:
        """What to do with changes `(since, upto]` of a generation.

        The generation is looked at before any version: an empty namespace of a new life (upto 0) wipes what an old one left.
        """
        if generation != self.generation:
            if generation < self.generation:
                return Judgement.OLD
            return Judgement.REPLACE if snapshot else Judgement.GAP
        if upto <= self.max_version:
            return Judgement.OLD
        if snapshot:
            return Judgement.REPLACE
        return Judgement.GAP if since > self.max_version else Judgement.APPLY

    def apply(self, changes: list[Written], upto: int, floor: int) -> list[Written]:
        """Apply what was judged APPLY; returns the changes that were new here."""
        start = self.max_version
        fresh = changes if not changes or changes[0].version > start else [c for c in changes if c.version > start]
        for change in fresh:
            self._put(change)
        self.max_version = upto
        self._raise_floor(floor)
        return fresh

    def replaced(self, generation: Generation, changes: list[Written], upto: int, floor: int) -> "Namespace":
        """The namespace that takes this one's place, by what was judged REPLACE."""
        fresh = Namespace(generation)
        for change in changes:
            fresh._put(change)
        fresh.max_version = upto
        fresh._raise_floor(floor)
        return fresh

    def flaw(self) -> str | None:
        """Which of the invariants of one namespace is broken, if any is; for checkers."""
        versions = [record.version for record in self.records.values()]
        if versions != sorted(set(versions)) or list(self.deletes.values()) != sorted(set(self.deletes.values())):
            return "records or deletes are not in version order"
        if any(version > self.max_version for version in [*versions, *self.deletes.values()]):
            return "a record is above max_version"
        if any(version <= self.floor for version in self.deletes.values()) or self.floor > self.max_version:
            return "the floor is above a delete or above max_version"
        if len(self.deletes) > DELETES_MAX or self.records.keys() & self.deletes.keys():
            return "the log of deletes is too long or a key is both there and deleted"
        weight = sum(r.weight for r in self.records.values())
        if self.weight != weight + sum(RECORD_BYTES + name_bytes(key[1]) for key in self.deletes):
            return "the weight is not that of the records and deletes"
        return None


def _version(change: Written) -> int:
    return change.version
