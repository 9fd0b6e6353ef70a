"""What one node sees: a picture that no later change touches, and counts that follow every change."""

import random
from collections.abc import Callable

import pytest

from node import in_flight
from node.in_flight import InFlight, recount
from node.instances import Phase
from node.records import (
    CANCEL,
    DRAIN,
    MODEL,
    PLACE,
    PROFILE,
    RANK,
    RUNNER,
    SCHEMA,
    SHARD,
    TASK,
    VERDICT,
    WANT,
    CancelIntent,
    Drain,
    Executor,
    ModelRecord,
    PlaceSpec,
    Profile,
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
    Want,
)
from node.tasks import Status
from node.view import View, take_view
from p2p.core import Core
from p2p.lattice import DEAD
from p2p.replica import Member
from tests.sim.cluster import Cluster


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster(3, seed=1, schema=SCHEMA)
    cluster.warm()
    return cluster


def boot(cluster: Cluster, place: int) -> int:
    return cluster.core(place).me.standing.generation.nonce


def view(cluster: Cluster, place: int) -> View:
    core = cluster.core(place)
    return take_view(core.node, core.replica, lambda node: core.believe(node, cluster.now))


def header(cluster: Cluster, *executors: int, attempt: int = 0) -> TaskHeader:
    return TaskHeader(attempt, 7, tuple(Executor(boot(cluster, place), 1) for place in executors), 10, 10, 60)


def test_a_task_from_its_beginning_to_its_end(cluster: Cluster) -> None:
    task = TaskId(boot(cluster, 0), 1)
    cluster.write(0, (TASK, 1), header(cluster, 1, 2))
    assert view(cluster, 0).in_flight == {7: 1}, "the home's own decision counts at once"
    cluster.run(0.1)

    def seen() -> tuple[Status, dict[int, int]]:
        now = view(cluster, 2)
        return now.tasks[task].status, dict(now.in_flight)

    assert seen() == (Status.PENDING, {7: 1})
    cluster.write(1, (RANK, (*task, 0, 0)), RankReport(RankPhase.RUNNING))
    cluster.write(2, (RANK, (*task, 0, 1)), RankReport(RankPhase.OK))
    cluster.run(0.1)
    assert seen() == (Status.RUNNING, {7: 1})
    cluster.write(1, (RANK, (*task, 0, 0)), RankReport(RankPhase.OK))
    cluster.run(0.1)
    assert seen() == (Status.SETTLING, {7: 1})
    cluster.write(0, (VERDICT, 1), Verdict(Terminal.COMPLETE))
    cluster.write(1, (CANCEL, task), CancelIntent("late"))
    cluster.run(0.1)
    assert seen() == (Status.COMPLETE, {})


def test_a_task_that_waits_at_its_home_counts_for_no_instance(cluster: Cluster) -> None:
    cluster.write(0, (TASK, 1), TaskHeader(0, 0, (), 10, 10, 60))
    cluster.run(0.1)

    seen = view(cluster, 1)
    waiting = seen.tasks[TaskId(boot(cluster, 0), 1)]
    assert (waiting.status, waiting.executors, waiting.in_flight, seen.in_flight) == (Status.PENDING, (), False, {})
    assert truth(cluster, 1) == {}


def test_a_report_counts_only_from_the_executor_that_the_header_names(cluster: Cluster) -> None:
    task = TaskId(boot(cluster, 0), 1)
    cluster.write(0, (TASK, 1), header(cluster, 1, attempt=1))
    cluster.write(2, (RANK, (*task, 1, 0)), RankReport(RankPhase.OK))
    cluster.write(1, (RANK, (*task, 0, 0)), RankReport(RankPhase.OK))
    cluster.run(0.1)

    assert view(cluster, 0).tasks[task].status is Status.PENDING


def test_a_dead_nodes_records_are_not_shown_and_its_tasks_not_counted(cluster: Cluster) -> None:
    cluster.write(0, (TASK, 1), header(cluster, 1))
    cluster.write(1, (RUNNER, 1), RunnerRecord(1, RunnerPhase.READY, 7, 0))
    cluster.run(0.1)
    assert [runner.record.phase for runner in view(cluster, 2).runners] == [RunnerPhase.READY]

    cluster.crash(1)
    cluster.run(2)

    seen = view(cluster, 2)
    assert (seen.nodes[cluster.names[1]].shown, seen.runners, seen.in_flight) == ("dead", (), {})
    assert seen.tasks[TaskId(boot(cluster, 0), 1)].executors == (cluster.names[1],)


def test_a_restarted_nodes_old_records_are_gone_at_once(cluster: Cluster) -> None:
    cluster.write(1, (RUNNER, 1), RunnerRecord(1, RunnerPhase.READY, 7, 0))
    cluster.write(1, (TASK, 1), header(cluster, 2))
    cluster.run(0.1)

    cluster.crash(1)
    cluster.nodes[1].wall_offset -= 3e7
    cluster.boot(1, disk=False, contacts=(0,))
    cluster.run(1)

    for place in (0, 2):
        seen = view(cluster, place)
        assert (seen.nodes[cluster.names[1]].shown, seen.runners, seen.in_flight) == ("alive", (), {})


def test_nodes_models_and_wants(cluster: Cluster) -> None:
    cluster.write(0, (PROFILE, 0), Profile("12D3", "desk", ("/ip4/127.0.0.1/tcp/1",)))
    cluster.write(0, (MODEL, "abc"), ModelRecord("smollm2:135m", 1, 30, 8192))
    cluster.write(1, (DRAIN, 0), Drain())
    cluster.write(1, (WANT, "smollm2:135m"), Want(1, cluster.names[1], 2))
    cluster.write(0, (WANT, "smollm2:135m"), Want(2, cluster.names[0], 0))
    cluster.run(0.1)

    seen = view(cluster, 2)

    desk = seen.nodes[cluster.names[0]]
    assert desk.profile is not None
    assert (desk.profile.name, list(desk.models)) == ("desk", ["abc"])
    assert seen.nodes[cluster.names[1]].shown == "draining"
    assert seen.wants["smollm2:135m"].replicas == 0


def test_candidates_are_ready_instances_of_nodes_that_take_work(cluster: Cluster) -> None:
    spec = PlaceSpec(1, "abc", "smollm2:135m", (boot(cluster, 0), boot(cluster, 1)))
    cluster.write(2, (PLACE, 9), spec)
    cluster.write(0, (SHARD, (9, 0)), ShardRecord(ShardPhase.READY, 1, spec))
    cluster.run(0.1)
    assert (view(cluster, 2).instances[9].phase, view(cluster, 2).candidates("abc")) == (Phase.PROPOSED, [])

    cluster.write(1, (SHARD, (9, 1)), ShardRecord(ShardPhase.READY, 1, spec))
    cluster.run(0.1)
    seen = view(cluster, 2)
    assert [i.instance_id for i in seen.candidates("abc")] == [9]
    assert seen.load(9) == 0

    cluster.write(1, (DRAIN, 0), Drain())
    cluster.run(0.1)
    assert view(cluster, 2).candidates("abc") == []
    assert [i.instance_id for i in seen.candidates("abc")] == [9], "a view never changes"


def bury(cluster: Cluster, place: int, other: Member) -> None:
    """Let one node wrongly take another for dead."""

    def declare(core: Core, now: float) -> None:
        core.membership.learn(other.node, other.standing._replace(liveness=DEAD), None, now)

    cluster.call(place, declare)


def truth(cluster: Cluster, place: int) -> dict[int, int]:
    """The counts from nothing but a node's replica."""
    core = cluster.core(place)
    return recount(core.replica, lambda node: core.believe(node, cluster.now))


def follow(cluster: Cluster, place: int) -> InFlight:
    """An index of a node's replica as it is now; it knows of no task yet."""
    core = cluster.core(place)
    index = InFlight(core.replica, lambda node: core.believe(node, cluster.now))
    for node in core.replica.members:
        index.boots.learn(node)
    return index


def drift(seed: int, steps: int) -> int:
    """Random tasks, crashes, suspicions and collections; the steps after which an index differed from a recount."""
    chance = random.Random(seed)
    cluster = Cluster(4, seed, schema=SCHEMA)
    cluster.warm()
    indexes = {place: follow(cluster, place) for place in range(4)}
    cluster.watch_changes = lambda place, change: indexes[place].update(change) if place in indexes else None
    wrong = 0
    for step in range(steps):
        place, roll = chance.randrange(4), chance.random()
        if roll < 0.1:
            cluster.write(place, (TASK, chance.randrange(40)), header(cluster, attempt=step))
        elif roll < 0.4:
            cluster.write(place, (TASK, chance.randrange(40)), header(cluster, chance.randrange(4), attempt=step))
        elif roll < 0.6:
            cluster.write(place, (VERDICT, chance.randrange(40)), Verdict(Terminal.COMPLETE))
        elif roll < 0.8:
            number = chance.randrange(40)
            cluster.write(place, (TASK, number), None)
            cluster.write(place, (VERDICT, number), None)
        elif roll < 0.9:
            core = cluster.core(place)
            other = core.replica.members.get(cluster.names[chance.randrange(4)])
            if other is not None and other is not core.me:
                bury(cluster, place, other)
        elif roll < 0.92:
            cluster.crash(place)
            indexes.pop(place)
            cluster.boot(place, contacts=((place + 1) % 4,))
            indexes[place] = follow(cluster, place)
        cluster.run(chance.choice((0.0, 0.005, 0.1)))
        wrong += sum(index.counts != truth(cluster, observer) for observer, index in indexes.items())
    return wrong


def test_the_counts_are_those_of_a_recount_after_every_step() -> None:
    assert sum(drift(seed, 150) for seed in range(6)) == 0


def test_counting_finished_tasks_is_found(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: a task with a verdict stays in flight."""
    right = in_flight.counts_in_flight

    def wrong(header: TaskHeader, *, ended: bool, home: int, running: Callable[[int], bool]) -> bool:
        return right(header, ended=False, home=home, running=running)

    monkeypatch.setattr("node.view.counts_in_flight", wrong)

    with pytest.raises(AssertionError):
        test_a_task_from_its_beginning_to_its_end(cluster)
