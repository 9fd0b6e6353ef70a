"""What `node status` and `node dump` say in words."""

import pytest
from msgspec import structs

from node.cluster_tables import (
    EventLines,
    Section,
    difference_section,
    dump_sections,
    duration,
    labels,
    size,
    status_sections,
)
from node.documents import IncompatibleDocument, StateDocument, StateEvent, UnreachableDocument
from node.dump_diff import Behind, Difference
from node.dump_document import dump_document
from node.records import PROFILE, TASK, Profile, TaskHeader
from node.state_changes import Ledger
from node.state_document import state_document
from p2p.lattice import DEAD
from p2p.sync_wire import node16
from tests.node.cluster_replica import DESK, LAPTOP, NAS, READY_INSTANCE, ClusterReplica, about, executor, home, task_of

READY = f"{READY_INSTANCE:016x}"


def shown(cluster: ClusterReplica) -> StateDocument:
    return state_document(cluster.view(), about())


def sections(state: StateDocument, now: float = 1_800_000_200.0) -> dict[str, Section]:
    return {section.title: section for section in status_sections(state, now) if section.rows}


def test_status() -> None:
    tables = sections(shown(home()))

    assert list(tables) == ["nodes", "instances", "runners", "tasks in flight"]
    assert tables["nodes"].rows == (
        ("desk (this one)", "Desk0001", "alive", "M2 Pro", "12.9 GB of 17.2 GB", ""),
        ("laptop", "Laptop02", "alive", "M2 Pro", "12.9 GB of 17.2 GB", "smollm2:135m"),
        ("nas", "Nas00003", "draining", "M2 Pro", "12.9 GB of 17.2 GB", ""),
    )
    assert tables["instances"].rows[0] == ("smollm2:135m", READY, "ready", "laptop", "1", "")
    assert tables["instances"].rows[1][3] == "laptop + nas"
    assert tables["runners"].rows[0] == (f"{READY}.0", "laptop", "smollm2:135m", "running", "100 s", "2/8", "")
    assert tables["runners"].rows[1][3:] == ("loading 40 %", "", "", "weights")
    assert [row[1:] for row in tables["tasks in flight"].rows] == [
        ("pending", "big:7b", "nas", "", "1"),
        ("running", "smollm2:135m", "desk", "laptop", "0"),
    ]
    for section in tables.values():
        assert {len(row) for row in section.rows} == {len(section.headings)}


def test_who_is_not_reached_is_shown_with_the_reason_a8_a10() -> None:
    target = UnreachableDocument(
        target="nas.local:4001", addresses=("nas.local:4001",), reason="connection refused", failures=3, next_try_seconds=1.6
    )
    known = structs.replace(target, target=NAS, reason="no route to it")
    old = IncompatibleDocument(node_id="12D3KooWOld", versions="2", remote="10.0.0.7:4001")
    tables = sections(structs.replace(shown(home()), unreachable=(target, known), incompatible=(old,)))

    assert [row[0] for row in tables["not reached from here"].rows] == ["nas.local:4001", "nas"]
    assert tables["not reached from here"].rows[0][2:] == ("connection refused", "3", "in 2 s")
    assert tables["incompatible versions"].rows == (("12D3KooWOld", "10.0.0.7:4001", "2"),)


def test_nodes_of_one_name_are_told_apart() -> None:
    assert labels({"xxDesk0001": "mac", "xxLaptop02": "mac", "xxNas00003": "nas", "xxNone0004": ""}) == {
        "xxDesk0001": "mac (Desk0001)",
        "xxLaptop02": "mac (Laptop02)",
        "xxNas00003": "nas",
        "xxNone0004": "None0004",
    }


def test_a_dead_node_is_shown_as_such() -> None:
    cluster = home()
    cluster.beliefs[node16(LAPTOP)] = DEAD
    tables = sections(shown(cluster))

    assert list(tables) == ["nodes", "tasks in flight"]
    assert tables["nodes"].rows[1][:3] == ("laptop", "Laptop02", "dead")


def test_dump() -> None:
    cluster = home()
    members, records, counters = dump_sections(dump_document(cluster.dump()))

    assert members.rows[0][0] in {"desk", "laptop", "nas"}
    assert {row[1] for row in members.rows} == {DESK, LAPTOP, NAS}
    assert len(records.rows) == sum(len(member.namespace.records) for member in cluster.replica.members.values())
    assert ("nas", "drain/0", "2", '{"since": 0}') in records.rows
    assert counters.rows == ()
    for section in (members, records):
        assert {len(row) for row in section.rows} == {len(section.headings)}


def test_differences() -> None:
    found = [Difference(DESK, "records", "version 3", "version 5", Behind.OURS)]

    assert difference_section(found).rows == (("Desk0001", "records", "version 3", "version 5"),)


def test_changes_in_words() -> None:
    cluster, ledger, words = home(), Ledger(), EventLines()

    def told() -> list[str]:
        seen = ledger.revision
        ledger.update(shown(cluster))
        event = ledger.since(seen)
        assert event is not None
        return list(words.lines(event))

    (first,) = told()
    assert first.startswith("3 nodes, 2 instances, 3 tasks, digest ")
    cluster.write(DESK, TASK, 4, TaskHeader(0, READY_INSTANCE, (executor(LAPTOP),), 1, 1, 1))
    assert told() == [f"task {task_of(DESK, 4).text} at laptop: pending"]
    cluster.beliefs[node16(LAPTOP)] = DEAD
    cluster.write(NAS, PROFILE, 0, Profile(NAS, "attic"))
    lines = told()
    assert [line for line in lines if line.startswith("node")] == ["node laptop: dead", "node attic: draining"]
    assert f"instance {READY}: gone" in lines
    assert f"runner {READY}.0: gone" in lines


def test_news_of_what_is_not_reached() -> None:
    target = UnreachableDocument(target="x:1", addresses=(), reason="no answer", failures=1, next_try_seconds=1.0)
    event = StateEvent(revision=2, digest="0", unreachable=(target,))

    assert list(EventLines().lines(event)) == ["not reached: x:1: no answer"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7300, "2 h"), (200_000, "2 d")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes() -> None:
    assert size(16 << 30) == "17.2 GB"
