"""One writer's map at its writer and at replicas."""

from collections.abc import Iterator
from itertools import combinations

import pytest
from msgspec.structs import replace

from p2p import namespace as module
from p2p.lattice import ALIVE, Generation, Standing
from p2p.namespace import DELETES_MAX, NAMESPACE_BYTES_MAX, Judgement, Namespace, NamespaceFull, Written
from p2p.replica import Joined, Replica, Schema
from p2p.sync_wire import VALUE_BYTES_MAX, Key
from p2p.wire import ProtocolViolation
from tests.p2p.laws import check_all

NODE = bytes(16)
FIRST, SECOND = Generation(1, 5), Generation(2, 4)
BUDGET = 1 << 20


@pytest.fixture
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELETES_MAX", 2)


def writer(*steps: str, generation: Generation = FIRST) -> Namespace:
    """A namespace after steps such as "a1" (write 1 to a) and "-a" (delete a)."""
    namespace = Namespace(generation)
    for step in steps:
        if step[0] == "-":
            namespace.delete((1, step[1]))
        else:
            namespace.write((1, step[0]), step[1:].encode(), None)
    return namespace


def values(namespace: Namespace) -> dict[str, str]:
    return {str(name): record.value.decode() for (_, name), record in namespace.records.items()}


def replica_of(namespace: Namespace) -> Replica:
    replica = Replica(Schema({}))
    replica.join_standing(NODE, Standing(namespace.generation, 0, ALIVE))
    replica.members[NODE].namespace = namespace
    replica.touch(replica.members[NODE])
    return replica


def pull(ours: Replica, theirs: Replica, budget: int = BUDGET) -> Joined:
    """One exchange in one direction, as the sync would do it."""
    row = ours.row(NODE)
    member = theirs.members[NODE]
    assert row is not None
    since = row.version if row.standing.generation == member.standing.generation else 0
    part, _, _ = theirs.part(NODE, since, budget)
    ours.join_standing(NODE, part.standing)
    return ours.join_records(part, ours.check(part))[0]


def test_a_delta_brings_what_was_written_and_deleted_since() -> None:
    replica, source = replica_of(writer("a1")), replica_of(writer("a1", "b2", "-a", "c3"))

    assert pull(replica, source) is Joined.NEW
    assert values(replica.members[NODE].namespace) == {"b": "2", "c": "3"}
    assert pull(replica, source) is Joined.OLD
    assert replica.root == source.root


def test_a_delta_may_be_cut_anywhere() -> None:
    steps = ("a1", "b2", "-a", "c3", "b4", "a5", "-b", "d6")
    for size in range(len(steps)):
        replica, source = replica_of(writer(*steps[:size])), replica_of(writer(*steps))
        for _ in steps:
            pull(replica, source, budget=1)
            assert replica.members[NODE].namespace.flaw() is None
        assert values(replica.members[NODE].namespace) == {"a": "5", "c": "3", "d": "6"}


def test_a_change_at_or_below_the_version_is_never_applied() -> None:
    namespace = writer("a1", "b2", "-a")
    old = Written((1, "a"), 1, writer("a1").records[1, "a"])

    assert namespace.judge(FIRST, 0, 1, snapshot=False) is Judgement.OLD
    assert namespace.apply([old], 3, 0) == []
    assert values(namespace) == {"b": "2"}


def test_changes_above_a_gap_wait() -> None:
    assert writer("a1").judge(FIRST, 2, 3, snapshot=False) is Judgement.GAP
    assert writer("a1", "b1").judge(FIRST, 2, 3, snapshot=False) is Judgement.APPLY


def test_an_empty_namespace_of_a_new_life_wipes_the_old_one() -> None:
    namespace = writer("a1", "b2")

    assert namespace.judge(SECOND, 0, 0, snapshot=True) is Judgement.REPLACE
    assert values(namespace.replaced(SECOND, [], 0, 0)) == {}
    assert writer(generation=SECOND).judge(FIRST, 0, 9, snapshot=True) is Judgement.OLD


def test_news_of_a_new_boot_alone_wipes_the_old_one() -> None:
    replica = replica_of(writer("a1", "b2"))

    assert replica.join_standing(NODE, Standing(SECOND, 0, ALIVE))
    assert replica.members[NODE].namespace.records == {}


def test_a_raised_counter_of_the_same_boot_keeps_what_is_there_until_all_of_it_comes() -> None:
    replica, source = replica_of(writer("a1", "b2")), replica_of(writer("a1", "b2", "-a"))
    raised = Generation(7, FIRST.nonce)
    source.members[NODE].namespace.begin_anew(raised)
    source.join_standing(NODE, Standing(raised, 0, ALIVE))

    replica.join_standing(NODE, Standing(raised, 0, ALIVE))

    member = replica.members[NODE]
    assert (values(member.namespace), member.current, member.version) == ({"a": "1", "b": "2"}, True, 0)
    pull(replica, source)
    assert (values(member.namespace), member.version) == ({"b": "2"}, 3)


@pytest.mark.usefixtures("small_log")
def test_a_peer_behind_the_log_of_deletes_gets_a_snapshot_that_replaces() -> None:
    steps = ("a1", "b1", "c1", "d1", "-a", "-b", "-c")
    source = replica_of(writer(*steps))
    replica = replica_of(writer(*steps[:4]))

    assert source.members[NODE].namespace.floor == 5
    assert source.part(NODE, 4, BUDGET)[0].snapshot
    assert not source.part(NODE, 5, BUDGET)[0].snapshot
    assert pull(replica, source) is Joined.NEW
    assert values(replica.members[NODE].namespace) == {"d": "1"}


def test_the_log_of_deletes_is_bounded() -> None:
    namespace = Namespace(FIRST)
    for number in range(3 * DELETES_MAX):
        namespace.write((1, number), b"x", None)
        namespace.delete((1, number))

    assert (len(namespace.deletes), len(namespace.records)) == (DELETES_MAX, 0)
    assert namespace.flaw() is None


def test_what_does_not_fit_is_refused_and_urgent_room_is_kept() -> None:
    namespace = Namespace(FIRST)
    with pytest.raises(NamespaceFull, match="above the cap"):
        namespace.write((1, 0), bytes(VALUE_BYTES_MAX + 1), None)
    number = 0
    while namespace.weight + 2000 < NAMESPACE_BYTES_MAX - 50_000:
        number += 1
        namespace.write((1, number), bytes(1000), None, reserve=50_000)
    with pytest.raises(NamespaceFull, match="records are full"):
        namespace.write((1, 0), bytes(3000), None, reserve=50_000)

    before = (namespace.max_version, namespace.weight)
    namespace.write((1, 0), bytes(3000), None)
    assert (namespace.max_version, namespace.flaw()) == (before[0] + 1, None)
    namespace.write((1, 0), bytes(1000), None, reserve=50_000)  # in the place of a larger one


Plain = tuple[Generation, int, frozenset[tuple[Key, int, bytes]]]


def plain(namespace: Namespace) -> Plain:
    records = frozenset((key, record.version, record.value) for key, record in namespace.records.items())
    return namespace.generation, namespace.max_version, records


def histories() -> Iterator[Namespace]:
    """Two lives of one writer, the second begins empty, at each of their versions."""
    first = ("a1", "b1", "-a", "a2", "c1", "-b", "-a", "b3", "c2")
    second = ("b7", "d1", "-b", "a1", "-d", "b8", "c5", "-a")
    for size in range(len(first) + 1):
        yield writer(*first[:size])
    for size in range(len(second) + 1):
        yield writer(*second[:size], generation=SECOND)


@pytest.mark.usefixtures("small_log")
def test_namespaces_are_a_lattice() -> None:
    """All triples of replicas of two short lives, joined by the very parts that travel."""
    states = {plain(namespace): namespace for namespace in histories()}

    def join(ours: Plain, theirs: Plain) -> Plain:
        replica, source = replica_of(copy(states[ours])), replica_of(copy(states[theirs]))
        pull(replica, source)
        return plain(replica.members[NODE].namespace)

    assert check_all(list(states), join) == 19**3


def copy(namespace: Namespace) -> Namespace:
    twin = Namespace(namespace.generation)
    twin.max_version, twin.floor, twin.weight = namespace.max_version, namespace.floor, namespace.weight
    twin.records, twin.deletes = dict(namespace.records), dict(namespace.deletes)
    return twin


def test_equal_versions_mean_equal_records() -> None:
    states = [plain(namespace) for namespace in histories()]

    assert all(one[:2] != other[:2] for one, other in combinations(states, 2))


def test_a_part_that_contradicts_itself_is_refused_whole() -> None:
    source = replica_of(writer("a1", "b2", "-a"))
    part, _, _ = source.part(NODE, 1, BUDGET)
    replica = replica_of(writer("a1"))
    for bad in (
        replace(part, floor=2),
        replace(part, since=4),
        replace(part, upto=2),
        replace(part, snapshot=True),
        replace(part, changes=[part.changes[0], part.changes[0]], upto=9),
    ):
        with pytest.raises(ProtocolViolation):
            replica.check(bad)
    assert len(replica.check(part)) == 2
