"""What a node says of itself: everything that is, nothing else, and each step in its order."""

from pathlib import Path

import msgspec
import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from inference.models import Model
from inference.runner_state import RunnerState
from node.local_runners import Down, OnItsWay, Up
from node.own_records import OWN_KINDS, LocalFacts, NodeFacts, difference, own_records
from node.records import (
    DRAIN,
    GAUGE,
    MODEL,
    PROFILE,
    REASON_BYTES_MAX,
    RUNNER,
    SHARD,
    STOP_ORDER,
    RunnerPhase,
    RunnerRecord,
    ShardPhase,
    ShardRecord,
    StopOrder,
    StopPhase,
)
from p2p.effects import Changed
from tests.node.memory_runner import MemoryDevice, open_bench

MODEL_HERE = Model(
    model_hash="ab" * 32,
    name="m",
    path=Path("/m"),
    architecture="llama",
    parameters=1,
    weight_bytes=1,
    layers=1,
    context_length=4096,
    quantization="none",
)
READY = RunnerState(runner_id="r", status="ready", since=5.0, spawn=2, pid=7)
LOCAL = LocalFacts(
    instance_id=9, number=1, asked="m", created=3.0, pinned=True, phase=Up(0, 4, 0), state=READY, model=MODEL_HERE
)
NODE = NodeFacts(
    node_id="12D3",
    boot=77,
    name="desk",
    addresses=("/ip4/10.0.0.1/tcp/1",),
    device="cpu",
    memory_bytes=1 << 30,
    memory_limit_bytes=1 << 29,
    version="1",
    draining=False,
    models=(MODEL_HERE,),
    instances=(LOCAL,),
)


def test_a_ready_instance() -> None:
    records = own_records(NODE)
    assert set(records) == {(PROFILE, 0), (MODEL, "ab" * 32), (RUNNER, 1), (SHARD, (9, 0)), (GAUGE, 1)}
    runner, shard = records[RUNNER, 1], records[SHARD, (9, 0)]
    assert isinstance(runner, RunnerRecord)
    assert isinstance(shard, ShardRecord)
    assert (runner.spawn, runner.phase, runner.since) == (2, RunnerPhase.READY, 5)
    assert (shard.phase, shard.epoch, shard.spec.targets, shard.spec.pinned) == (ShardPhase.READY, 2, (77,), True)


def test_a_model_that_is_not_on_disk_yet_has_no_shard() -> None:
    local = msgspec.structs.replace(LOCAL, phase=OnItsWay("being fetched", 1, 2), state=None, model=None)
    records = own_records(msgspec.structs.replace(NODE, instances=(local,), draining=True))
    assert {kind for kind, _ in records} == {PROFILE, MODEL, RUNNER, DRAIN}


@pytest.mark.parametrize("reason", ["no memory", "ü" * REASON_BYTES_MAX])
def test_one_that_is_down_says_why_as_far_as_a_record_takes_it(reason: str) -> None:
    local = msgspec.structs.replace(LOCAL, phase=Down(reason), state=None)
    shard = own_records(msgspec.structs.replace(NODE, instances=(local,)))[SHARD, (9, 0)]
    assert isinstance(shard, ShardRecord)
    assert shard.phase is ShardPhase.REFUSED
    assert len(shard.reason.encode()) <= REASON_BYTES_MAX
    assert shard.reason[0] == reason[0]


def test_what_is_not_wanted_any_more_goes_and_what_is_of_other_kinds_stays() -> None:
    wanted = own_records(NODE)
    present = [*wanted, (SHARD, (8, 0)), (1, 5), (DRAIN, 0)]
    assert difference(wanted, present) == [(SHARD, (8, 0)), (DRAIN, 0)]
    assert 1 not in OWN_KINDS


async def test_the_end_of_a_runner_is_told_step_by_step(autojump_clock: MockClock) -> None:
    device = MemoryDevice()
    device.may_load.set()
    device.may_resolve.set()
    told: list[tuple[int, int]] = []
    async with open_bench(device) as bench:
        bench.node.run_model("m")
        await wait_all_tasks_blocked()

        def note(change: Changed) -> None:
            for written in change.changes or ():
                content = written.record.content if written.record is not None else None
                if isinstance(content, StopOrder | RunnerRecord):
                    told.append((written.key[0], content.phase))

        bench.node.facts.on_changed.append(note)
        await bench.runners.stop()
    assert told == [
        (STOP_ORDER, StopPhase.RUNNING),
        (STOP_ORDER, StopPhase.ACKNOWLEDGED),
        (RUNNER, RunnerPhase.SHUTTING_DOWN),
        (STOP_ORDER, StopPhase.COMPLETE),
        (RUNNER, RunnerPhase.SHUTDOWN),
    ]
