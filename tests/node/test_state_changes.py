"""Whoever watches the state sees all of it, however slowly it reads, and nothing is kept for it."""

from collections.abc import Iterable
from typing import Any

import msgspec
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from trio.testing import MockClock

from node.documents import RemovedDocument, StateDocument, StateEvent, TaskDocument, UnreachableDocument
from node.state_changes import INTERVAL_SECONDS, Ledger, StateChanges
from node.state_document import state_document
from tests.node.cluster_replica import about, home

EMPTY = StateDocument(node_id="me", cluster="home", nodes=(), instances=(), runners=(), tasks=(), in_flight={}, digest="0")


def task(number: int, status: str) -> TaskDocument:
    return TaskDocument(
        task_id=f"t{number}", status=status, model=None, instance_id=None, accepted_by="me", executed_by=None, attempt=0,
        reason="", prompt_tokens=1, max_tokens=1,
    )  # fmt: skip


def with_tasks(tasks: Iterable[tuple[int, str]], **fields: Any) -> StateDocument:  # noqa: ANN401 - of any type
    return structs.replace(EMPTY, tasks=tuple(task(number, status) for number, status in tasks), **fields)


def plain(state: StateDocument) -> object:
    return msgspec.json.decode(msgspec.json.encode(state))


class Reader:
    """Puts the state together from events, as a program outside would: from JSON, list by list."""

    def __init__(self) -> None:
        self.seen = 0
        self.state: dict[str, Any] = {}
        self.events = 0
        self.wholes = 0

    def take(self, event: StateEvent) -> None:
        document = msgspec.json.decode(msgspec.json.encode(event))
        self.events += 1
        self.seen = document["revision"]
        if "state" in document:
            self.wholes += 1
            self.state = document["state"]
        for name, key in (("nodes", "node_id"), ("instances", "instance_id"), ("runners", "runner_id"), ("tasks", "task_id")):
            entries = {entry[key]: entry for entry in self.state[name]}
            entries |= {entry[key]: entry for entry in document.get(name, ())}
            gone = document.get("removed", {}).get(name, ())
            self.state[name] = [entries[entry_id] for entry_id in sorted(entries) if entry_id not in gone]
        for name in ("digest", "in_flight", "unreachable", "incompatible"):
            self.state[name] = document.get(name, self.state[name])


states = st.builds(
    with_tasks,
    st.dictionaries(st.integers(0, 4), st.sampled_from(("pending", "running"))).map(lambda tasks: sorted(tasks.items())),
    in_flight=st.dictionaries(st.just("i"), st.integers(0, 2)),
    digest=st.sampled_from("ab"),
)


@given(st.lists(states, min_size=1), st.data())
def test_readers_of_any_pace_end_with_the_state(history: list[StateDocument], data: st.DataObject) -> None:
    ledger = Ledger(removals_max=3)
    readers = [Reader() for _ in range(3)]
    for state in history:
        ledger.update(state)
        for reader in readers:
            if data.draw(st.booleans()):
                event = ledger.since(reader.seen)
                if event is not None:
                    reader.take(event)
                assert reader.state == plain(state)
    for reader in readers:
        event = ledger.since(reader.seen)
        if event is not None:
            reader.take(event)
        assert reader.state == plain(history[-1])
        assert ledger.since(reader.seen) is None


def test_an_event_holds_only_what_changed() -> None:
    ledger = Ledger()
    ledger.update(with_tasks([(1, "pending"), (2, "pending")]))
    ledger.update(with_tasks([(1, "pending"), (2, "running")], digest="1"))

    event = ledger.since(1)
    assert event is not None
    assert msgspec.json.decode(msgspec.json.encode(event)) == {
        "revision": 2,
        "digest": "1",
        "tasks": [msgspec.to_builtins(task(2, "running"))],
    }


def test_what_is_as_it_was_makes_no_event_though_the_next_try_is_nearer() -> None:
    def state(failures: int, seconds: float, reason: str = "no route to it") -> StateDocument:
        target = UnreachableDocument(target="x", addresses=(), reason=reason, failures=failures, next_try_seconds=seconds)
        return structs.replace(EMPTY, unreachable=(target,))

    ledger = Ledger()
    ledger.update(state(1, 0.5))
    ledger.update(state(2, 4.0))
    assert ledger.since(1) is None
    ledger.update(state(3, 5.0, "connection refused"))
    event = ledger.since(1)
    assert event is not None
    assert event.unreachable == state(3, 5.0, "connection refused").unreachable


def test_whoever_missed_a_removal_that_is_forgotten_gets_everything() -> None:
    ledger = Ledger(removals_max=2)
    ledger.update(with_tasks((number, "pending") for number in range(5)))
    for number in range(1, 5):
        ledger.update(with_tasks((other, "pending") for other in range(number, 5)))

    missed_two, missed_four = ledger.since(3), ledger.since(1)
    assert missed_two is not None
    assert missed_four is not None
    assert (missed_two.state, missed_two.removed) == (None, RemovedDocument(tasks=("t2", "t3")))
    assert missed_four.state is not None
    assert len(ledger._removed) == 2


class Source:
    """A state that a test moves on, and how often it was looked at."""

    def __init__(self) -> None:
        self.count = 0
        self.looks = 0
        self.changes = StateChanges(self.look)

    def look(self) -> StateDocument:
        self.looks += 1
        return with_tasks([(1, f"{self.count}")], digest=str(self.count))

    def move(self) -> None:
        self.count += 1
        self.changes.touch()


async def test_changes_come_at_a_bounded_rate_and_end_with_the_last(autojump_clock: MockClock) -> None:
    source = Source()
    told: list[StateEvent] = []

    async def read() -> None:
        async with source.changes.read() as events:
            async for event in events:
                told.append(event)  # noqa: PERF401 - one by one, since it never ends

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        nursery.start_soon(read)
        for _ in range(1000):
            source.move()
            await trio.sleep(0.001)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()

    events_max = 1.0 / INTERVAL_SECONDS + 2
    assert 5 <= source.looks <= events_max, "two readers share what was looked at"
    assert len(told) <= 2 * events_max
    assert [event.tasks[0].status for event in told[-2:]] == ["1000", "1000"]


async def test_a_slow_reader_is_told_of_the_moment_at_which_it_reads(autojump_clock: MockClock) -> None:
    source = Source()
    async with source.changes.read() as events:
        first = await anext(events)
        for _ in range(100):
            source.move()
            await trio.sleep(1)
        second = await anext(events)

    assert first.state is not None
    assert [entry.status for entry in second.tasks] == ["100"]


async def test_while_nobody_watches_nothing_is_computed(autojump_clock: MockClock) -> None:
    source = Source()
    for _ in range(10):
        source.move()
        await trio.sleep(1)
    assert source.looks == 0
    async with source.changes.read() as events:
        event = await anext(events)
    assert event.state is not None
    assert (source.looks, event.state.digest) == (1, "10")


async def test_a_reader_waits_until_something_changes(autojump_clock: MockClock) -> None:
    source = Source()
    async with source.changes.read() as events:
        await anext(events)
        source.changes.touch()  # for nothing
        with trio.move_on_after(60) as waited:
            await anext(events)
    assert waited.cancelled_caught
    assert source.looks <= 2


def test_a_whole_state_travels_as_changes() -> None:
    ledger = Ledger()
    ledger.update(EMPTY)
    cluster = home()
    state = state_document(cluster.view(), about())
    ledger.update(state)

    event = ledger.since(1)
    assert event is not None
    assert (event.nodes, event.instances, event.runners, event.tasks) == (
        state.nodes, state.instances, state.runners, state.tasks,
    )  # fmt: skip
