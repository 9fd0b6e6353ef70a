"""Two replicas compared, at rest and in motion."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from node.dump_diff import Behind, diff, lasting
from node.dump_document import DumpDocument, dump_document
from node.records import VERDICT, Terminal, Verdict
from node.replica_dump import take_dump
from p2p.lattice import DEAD, Generation, Standing
from p2p.sync_wire import node16
from tests.node.cluster_replica import BOOTS, DESK, LAPTOP, NAS, ClusterReplica, home

Step = tuple[int, bool]  # the record's number, and whether it is written or deleted


def at(history: list[Step], steps: int) -> DumpDocument:
    """What a replica shows that has so many of one writer's changes; what they write differs from step to step."""
    cluster = ClusterReplica()
    cluster.join(DESK)
    member = cluster.replica.members[node16(DESK)]
    for step, (number, is_written) in enumerate(history[:steps]):
        if is_written:
            cluster.write(DESK, VERDICT, number, Verdict(Terminal.FAILED, str(step)))
        else:
            member.namespace.delete((VERDICT, number))
    cluster.replica.touch(member)
    return dump_document(cluster.dump())


def version(dump: DumpDocument) -> int:
    return dump.members[0].max_version


histories = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12)


@given(histories, st.data())
def test_of_two_replicas_the_one_with_fewer_changes_is_behind(history: list[Step], data: st.DataObject) -> None:
    ours, theirs = (at(history, data.draw(st.integers(0, len(history)))) for _ in range(2))
    found = diff(ours, theirs)

    if version(ours) == version(theirs):
        assert found == []
        assert ours.digest == theirs.digest
    else:
        lower = Behind.OURS if version(ours) < version(theirs) else Behind.THEIRS
        assert {difference.behind for difference in found} == {lower}


@given(histories, st.data())
def test_what_was_here_must_be_there_by_the_second_look(history: list[Step], data: st.DataObject) -> None:
    looks = [sorted(data.draw(st.tuples(*[st.integers(0, len(history))] * 2))) for _ in range(2)]
    ours, theirs = (tuple(at(history, steps) for steps in side) for side in looks)
    found = lasting((ours[0], ours[1]), (theirs[0], theirs[1]))

    expected = set()
    if version(ours[1]) < version(theirs[0]):
        expected.add(Behind.OURS)
    if version(theirs[1]) < version(ours[0]):
        expected.add(Behind.THEIRS)
    assert {difference.behind for difference in found} == expected


def test_the_same_replica_at_two_nodes_is_no_difference_whatever_they_believe() -> None:
    here, there = home(), home()
    there.beliefs[node16(LAPTOP)] = DEAD

    assert diff(dump_document(here.dump()), dump_document(there.dump(NAS))) == []


def test_members_and_standings() -> None:
    here, there = home(), home()
    there.join("12D3KooWNew", boot=5)
    there.join(NAS, liveness=DEAD)
    here.join(LAPTOP, boot=BOOTS[LAPTOP] + 1)
    found = {(one.node, one.what): one for one in diff(dump_document(here.dump()), dump_document(there.dump()))}

    new = found[node16("12D3KooWNew").hex(), "member"]
    assert (new.ours, new.behind) == ("not known", Behind.OURS)
    assert found[NAS, "standing"].behind is Behind.OURS
    assert found[NAS, "standing"].theirs.startswith("dead (generation 1800000000.")
    assert found[LAPTOP, "standing"].behind is Behind.THEIRS


def test_two_values_at_one_version_can_not_both_be_right() -> None:
    here, there = home(), home()
    here.write(DESK, VERDICT, 9, Verdict(Terminal.COMPLETE))
    there.write(DESK, VERDICT, 9, Verdict(Terminal.FAILED))
    ours, theirs = dump_document(here.dump()), dump_document(there.dump())

    assert ours.digest == theirs.digest, "the digest is of versions"
    (found,) = diff(ours, theirs)
    assert (found.node, found.what, found.behind) == (DESK, "verdict/9", Behind.NEITHER)
    assert lasting((ours, ours), (theirs, theirs)) == [found]


@pytest.mark.parametrize("mine", [True, False])
def test_a_record_that_is_missing_below_a_version_that_is_held_is_a_contradiction(mine: bool) -> None:
    whole = at([(0, True), (1, True), (2, True)], 3)
    (member,) = whole.members
    holed = structs.replace(whole, members=(structs.replace(member, records=member.records[1:]),))
    pair = (holed, whole) if mine else (whole, holed)

    assert [found.behind for found in diff(*pair)] == [Behind.NEITHER]


def test_records_of_two_generations_are_not_compared_one_by_one() -> None:
    here, there = home(), home()
    member = there.replica.members[node16(DESK)]
    member.namespace.begin_anew(Generation(1_900_000_000, BOOTS[DESK]))
    member.standing = Standing(member.namespace.generation, 0, member.standing.liveness)
    there.write(DESK, VERDICT, 1, Verdict(Terminal.COMPLETE))
    found = diff(dump_document(here.dump()), dump_document(there.dump()))

    assert [(one.what, one.behind) for one in found] == [("standing", Behind.OURS), ("records", Behind.OURS)]


def test_a_dump_of_a_moving_replica_is_of_one_moment() -> None:
    cluster = home()
    before = take_dump(DESK, cluster.replica, cluster.believe)
    shown = dump_document(before)
    cluster.write(DESK, VERDICT, 1, Verdict(Terminal.COMPLETE))

    assert dump_document(before) == shown
    assert diff(shown, dump_document(cluster.dump())) != []
    assert all(a.node < b.node for a, b in pairwise(shown.members))
    assert msgspec.json.encode(shown)
