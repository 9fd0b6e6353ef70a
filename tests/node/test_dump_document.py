"""A replica as people can read it."""

from typing import Any

import msgspec
from msgspec import Struct

from node import records
from node.dump_document import DumpDocument, MemberDocument, RecordDocument, dump_document
from node.records import SCHEMA, Drain, Executor, Profile, TaskHeader, Want
from node.replica_dump import take_dump
from p2p.lattice import DEAD, SUSPECT, Generation
from p2p.sync_wire import Name, node16
from tests.node.cluster_replica import BOOTS, BUSY_INSTANCE, DESK, LAPTOP, NAS, READY_INSTANCE, ClusterReplica, home

EXACT_IN_JSON = 1 << 53


def member(document: DumpDocument, peer_id: str) -> MemberDocument:
    return next(member for member in document.members if member.node == node16(peer_id).hex())


def record(document: DumpDocument, peer_id: str, key: str) -> RecordDocument:
    return next(record for record in member(document, peer_id).records if record.key == key)


def test_who_wrote_what_at_which_version() -> None:
    cluster = home()
    cluster.beliefs[node16(NAS)] = SUSPECT
    namespace = cluster.replica.members[node16(DESK)].namespace
    namespace.delete((records.TASK, 2))
    cluster.replica.touch(cluster.replica.members[node16(DESK)])
    document = dump_document(cluster.dump())

    desk = member(document, DESK)
    assert (document.node_id, document.digest) == (DESK, cluster.replica.root.hex())
    assert (desk.node_id, desk.name, desk.max_version, desk.gc_floor, desk.deletes) == (DESK, "desk", 6, 0, 1)
    assert desk.generation == desk.records_generation == (1_800_000_000, f"{BOOTS[DESK]:016x}")
    assert (member(document, NAS).stored, member(document, NAS).believed) == ("alive", "suspect")
    written = {(kind, name): found.version for (kind, name), found in namespace.records.items()}
    assert sorted(found.version for found in desk.records) == sorted(written.values())


def test_values_have_their_fields_and_names_that_fit_into_json() -> None:
    document = dump_document(home().dump())

    assert record(document, DESK, "task/1").value == {
        "attempt": 0,
        "instance": f"{READY_INSTANCE:016x}",
        "executors": [{"boot": f"{BOOTS[LAPTOP]:016x}", "spawn": 1}],
        "prompt_tokens": 10,
        "max_tokens": 20,
        "deadline": 60,
        "model": "",
    }
    assert record(document, DESK, "verdict/2").value == {"status": "failed", "reason": "the runner ended with signal 9"}
    assert record(document, LAPTOP, f"rank/{BOOTS[DESK]:016x}-1.0/0").value == {"phase": "running", "reason": ""}
    shard = record(document, LAPTOP, f"shard/{BUSY_INSTANCE:016x}.0").value
    assert (shard["phase"], shard["spec"]["targets"]) == ("loading", [f"{BOOTS[LAPTOP]:016x}", f"{BOOTS[NAS]:016x}"])
    assert numbers(msgspec.to_builtins(document)) <= EXACT_IN_JSON


def numbers(document: object) -> int:
    """The largest number anywhere in it."""
    if isinstance(document, dict):
        return max((numbers(value) for value in document.values()), default=0)
    if isinstance(document, list | tuple):
        return max((numbers(value) for value in document), default=0)
    return abs(document) if isinstance(document, int) else 0


NAMES: dict[object, Name] = {int: 1 << 62, str: "name", 2: (1 << 62, 3), 4: (1 << 62, 3, 0, 1)}


def test_every_kind_of_record_has_a_word() -> None:
    cluster = ClusterReplica()
    cluster.join(DESK)
    values: dict[int, Struct] = {
        records.TASK: TaskHeader(0, 1 << 62, (Executor(1 << 62, 1),), 1, 1, 1),
        records.WANT: Want(1, b"\xff" * 16, 2),
        records.PROFILE: Profile(DESK, "desk"),
        records.DRAIN: Drain(),
    }
    for kind, reader in SCHEMA.readers.items():
        cluster.write(DESK, kind, NAMES[reader.name], values.get(kind, records.RankReport(records.RankPhase.OK)))
    shown = member(dump_document(cluster.dump()), DESK).records

    words = {found.key.partition("/")[0] for found in shown}
    assert len(words) == len(SCHEMA.readers)
    assert [word for word in words if word.startswith("kind")] == []
    assert record(dump_document(cluster.dump()), DESK, "want/name").value["writer"] == "ff" * 16


def test_what_this_version_does_not_know_is_shown_as_it_is() -> None:
    cluster = home()
    value = ["a", 1 << 62]
    encoded = msgspec.msgpack.encode(value).hex()
    for name in (7, "seven", (1, 2, 3)):
        cluster.write(DESK, 200, name, value)
    cluster.write(DESK, records.VERDICT, 77, value)  # of a later version of that kind
    document = dump_document(cluster.dump())

    for key in ("kind-200/7", "kind-200/seven", "kind-200/1-2-3", "verdict/77"):
        assert record(document, DESK, key).value == encoded


def test_a_document_survives_its_journey_as_json() -> None:
    document = dump_document(home().dump())

    assert msgspec.json.decode(msgspec.json.encode(document), type=DumpDocument) == document


def test_a_member_is_named_by_its_own_profile_or_by_what_else_is_known() -> None:
    cluster = ClusterReplica()
    for peer_id in (DESK, LAPTOP, NAS):
        cluster.join(peer_id)
    cluster.write(LAPTOP, records.PROFILE, 0, Profile(DESK, "an impostor"))
    document = dump_document(take_dump(DESK, cluster.replica, cluster.believe, peer_ids={node16(NAS): NAS}))

    assert [member(document, peer_id).node_id for peer_id in (DESK, LAPTOP, NAS)] == [DESK, None, NAS]


def test_records_of_a_life_that_ended_are_told_from_those_of_this_one() -> None:
    cluster = home()
    cluster.replica.members[node16(NAS)].standing = cluster.replica.members[node16(NAS)].standing._replace(
        generation=Generation(1_800_000_001, BOOTS[NAS]), liveness=DEAD
    )
    nas = member(dump_document(cluster.dump()), NAS)

    assert (nas.generation[0], nas.records_generation[0], nas.stored) == (1_800_000_001, 1_800_000_000, "dead")


def test_counters_are_passed_on() -> None:
    cluster = home()
    counters: Any = {"frames_in": 3}
    dump = take_dump(DESK, cluster.replica, cluster.believe, counters=counters)
    counters["frames_in"] = 4

    assert dump_document(dump).counters == {"frames_in": 3}
