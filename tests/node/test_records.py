"""Records on the wire: sizes, bounds, and what a newer node adds."""

import msgspec
import pytest

from node import records
from node.records import (
    SCHEMA,
    Executor,
    Gauge,
    PlaceSpec,
    RankPhase,
    RankReport,
    RunnerPhase,
    RunnerRecord,
    ShardPhase,
    ShardRecord,
    TaskHeader,
    TaskId,
    Terminal,
    Verdict,
)


def size(value: object) -> int:
    return len(msgspec.msgpack.encode(value))


def test_sizes() -> None:
    boot = 1 << 62

    assert size(TaskHeader(0, 1 << 62, (Executor(boot, 1),), 1000, 500, 600)) <= 33
    assert size(TaskHeader(0, 1 << 62, (Executor(boot, 1), Executor(boot, 2)), 1000, 500, 600)) <= 44
    assert size(RankReport(RankPhase.RUNNING)) <= 3
    assert size(Verdict(Terminal.COMPLETE)) <= 3
    assert size(Gauge(8, 2, 4000, 60)) <= 8


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (records.TASK, [0, 1, [[1, 1]] * 65, 1, 1, 1]),
        (records.TASK, [-1, 1, [[1, 1]], 1, 1, 1]),
        (records.RANK, [0, ""]),
        (records.RANK, [6, ""]),
        (records.VERDICT, [3, ""]),
        (records.VERDICT, [7, "x" * 201]),
        (records.RUNNER, [1, 9, 1, 0]),
        (records.PROFILE, ["", "name"]),
        (records.WANT, [1, b"short", 1]),
    ],
)
def test_values_out_of_bounds_are_refused(kind: int, value: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        SCHEMA.readers[kind].value.decode(msgspec.msgpack.encode(value))


def test_fields_of_tomorrow_do_not_disturb() -> None:
    decoded = SCHEMA.readers[records.RUNNER].value.decode(msgspec.msgpack.encode([1, 4, 7, 0, "", 0, 0, 0, 0, 0, "new"]))

    assert decoded == RunnerRecord(1, RunnerPhase.READY, 7, 0)


def test_fields_of_yesterday_are_enough() -> None:
    spec = [1, "hash", "m", [1]]
    runner = SCHEMA.readers[records.RUNNER].value.decode(msgspec.msgpack.encode([1, 4, 7, 0]))
    shard = SCHEMA.readers[records.SHARD].value.decode(msgspec.msgpack.encode([2, 0, spec, 0, ""]))

    assert runner == RunnerRecord(1, RunnerPhase.READY, 7, 0, "", 0, 0, slots=0, context=0, since=0)
    assert shard == ShardRecord(ShardPhase.READY, 0, PlaceSpec(1, "hash", "m", (1,)), created=0)


def test_a_header_without_executors_is_a_task_that_waits() -> None:
    decoded = SCHEMA.readers[records.TASK].value.decode(msgspec.msgpack.encode([0, 0, [], 1, 1, 1]))

    assert decoded == TaskHeader(0, 0, (), 1, 1, 1)


@pytest.mark.parametrize("task", [TaskId(0, 0), TaskId((1 << 63) - 1, 12), TaskId(0xABC, 10**15)])
def test_a_task_has_one_name_outside(task: TaskId) -> None:
    assert TaskId.parse(task.text) == task


@pytest.mark.parametrize(
    "text", ["", "x", "0-1", "00000000000000ab", "00000000000000AB-1", "00000000000000ab-01", "f0000000000000ab-1"]
)
def test_what_is_no_task_is_none(text: str) -> None:
    assert TaskId.parse(text) is None


def test_kinds_are_distinct_and_all_have_a_schema() -> None:
    kinds = {name: value for name, value in vars(records).items() if name.isupper() and isinstance(value, int)}
    kinds = {name: value for name, value in kinds.items() if not name.endswith("_MAX")}

    assert sorted(kinds.values()) == sorted(SCHEMA.readers) == list(range(1, 15))
