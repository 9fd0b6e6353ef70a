"""What `node dump` shows: a replica as a document that people and programs can read. See `node.replica_dump`.

A record is named as in `node.records`: `task/12`, `shard/<instance>.<rank>`. Numbers that name something (boots, instances) are
16 hexadecimal digits, since many readers of JSON have no room for 63 bits.

Pure: values in, values out.
"""

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import msgspec
from msgspec import Struct

from node import records
from node.records import SCHEMA, TaskId
from node.replica_dump import DumpedMember, DumpedRecord, ReplicaDump
from p2p.lattice import Generation
from p2p.sync_wire import Name

_BOOT_OR_INSTANCE = frozenset({"boot", "instance", "targets"})  # fields whose numbers are names


class RecordDocument(Struct, frozen=True, kw_only=True):
    """One record. `value` has the fields of its kind; of a kind that is not known here it is msgpack in hexadecimal."""

    key: str  # kind/name
    version: int
    digest: str  # of the bytes in which the value travels: nodes of two versions may show one value differently
    value: Any


class MemberDocument(Struct, frozen=True, kw_only=True):
    """What one member wrote, and what is held of it."""

    node: str  # 32 hexadecimal digits
    node_id: str | None
    name: str
    generation: tuple[int, str]  # counter, boot
    incarnation: int
    stored: str  # the worst that was said of it, as all replicas store it
    believed: str | None  # what this node takes it for
    records_generation: tuple[int, str]
    max_version: int
    gc_floor: int  # deletes up to it are forgotten
    deletes: int  # remembered above it
    records: tuple[RecordDocument, ...]


class DumpDocument(Struct, frozen=True, kw_only=True):
    """A replica. Two nodes with the same digest hold the same."""

    node_id: str
    digest: str
    members: tuple[MemberDocument, ...]
    graves: int  # members that were forgotten
    counters: dict[str, int]


def dump_document(dump: ReplicaDump) -> DumpDocument:
    """A dump for people."""
    members = (_member(member) for member in dump.members)
    return DumpDocument(
        node_id=dump.head.node_id,
        digest=dump.head.root.hex(),
        members=tuple(sorted(members, key=lambda member: member.node)),
        graves=dump.head.graves,
        counters=dump.head.counters,
    )


def _member(member: DumpedMember) -> MemberDocument:
    standing = member.standing
    shown = tuple(_record(record) for record in member.records)
    profile = next((record.value for record in shown if record.key == "profile/0"), None)
    return MemberDocument(
        node=member.node.hex(),
        node_id=member.peer_id or None,
        name=str(profile["name"]) if isinstance(profile, dict) else "",
        generation=_generation(standing.generation),
        incarnation=standing.incarnation,
        stored=standing.liveness.name.lower(),
        believed=member.believed.name.lower() if member.believed is not None else None,
        records_generation=_generation(member.records_generation),
        max_version=member.max_version,
        gc_floor=member.floor,
        deletes=member.deletes,
        records=tuple(sorted(shown, key=lambda record: record.key)),
    )


def _generation(generation: Generation) -> tuple[int, str]:
    return generation.counter, _hexadecimal(generation.nonce)


def _record(record: DumpedRecord) -> RecordDocument:
    value = bytes(record.value)
    reader = SCHEMA.readers.get(record.kind)
    shown: object = value.hex()
    if reader is not None:
        with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):  # of a later version than this one
            shown = _plain(reader.value.decode(value))
    digest = hashlib.blake2b(value, digest_size=8).hexdigest()
    return RecordDocument(key=_key(record.kind, record.name), version=record.version, digest=digest, value=shown)


def _plain(value: object, *, names_something: bool = False) -> object:
    """What JSON has for it, fields by name."""
    if isinstance(value, Struct):
        fields = value.__struct_fields__
        return {name: _plain(getattr(value, name), names_something=name in _BOOT_OR_INSTANCE) for name in fields}
    if isinstance(value, records.Executor):
        return {"boot": _hexadecimal(value.boot), "spawn": value.spawn}
    if isinstance(value, tuple | list):
        return [_plain(item, names_something=names_something) for item in value]
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, bytes):
        return value.hex()
    return _hexadecimal(value) if names_something and isinstance(value, int) else value


def _hexadecimal(number: int) -> str:
    return f"{number:016x}"


def _key(kind: int, name: Name) -> str:
    word, text = _KINDS.get(kind, (f"kind-{kind}", _any))
    try:
        return f"{word}/{text(name)}"
    except (TypeError, ValueError):  # a name of another shape than this version knows
        return f"{word}/{_any(name)}"


def _any(name: Any) -> str:  # noqa: ANN401 - what it is, is for each kind to say
    return "-".join(map(str, name)) if isinstance(name, tuple) else str(name)


def _id(name: Any) -> str:  # noqa: ANN401 - see `_any`
    return _hexadecimal(name)


def _task(name: Any) -> str:  # noqa: ANN401 - see `_any`
    return TaskId(*name).text


def _rank_of_task(name: Any) -> str:  # noqa: ANN401 - see `_any`
    home, number, attempt, rank = name
    return f"{TaskId(home, number).text}.{attempt}/{rank}"


def _rank_of_instance(name: Any) -> str:  # noqa: ANN401 - see `_any`
    instance, rank = name
    return f"{_hexadecimal(instance)}.{rank}"


_KINDS: Mapping[int, tuple[str, Callable[[Any], str]]] = {
    records.TASK: ("task", _any),
    records.RANK: ("rank", _rank_of_task),
    records.VERDICT: ("verdict", _any),
    records.CANCEL: ("cancel", _task),
    records.GAUGE: ("gauge", _any),
    records.RUNNER: ("run", _any),
    records.SHARD: ("shard", _rank_of_instance),
    records.PLACE: ("place", _id),
    records.WANT: ("want", _any),
    records.PROFILE: ("profile", _any),
    records.STOP_ORDER: ("stop", _any),
    records.MODEL: ("model", _any),
    records.NET: ("net", _id),
    records.DRAIN: ("drain", _any),
}
