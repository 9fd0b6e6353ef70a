"""Routing on a replica's real state: only pending and running tasks decide, and they do so the moment they are written."""

import random

import pytest

from node.in_flight import InFlight
from node.records import (
    PLACE,
    RANK,
    SCHEMA,
    SHARD,
    TASK,
    VERDICT,
    Executor,
    PlaceSpec,
    RankPhase,
    RankReport,
    ShardPhase,
    ShardRecord,
    TaskHeader,
    TaskId,
    Terminal,
    Verdict,
)
from node.routing import Candidate, Route, Router
from node.view import View, take_view
from tests.sim.cluster import Cluster

FINISHED, ACTIVE = 138, 7
BUSY_ONCE, BUSY_NOW = 100, 200  # instances; the first did most of what is finished, the second has most of what runs
HOSTS = {BUSY_ONCE: 1, BUSY_NOW: 2}


@pytest.fixture
def cluster() -> Cluster:
    """A home and two nodes with a ready instance each."""
    cluster = Cluster(3, seed=1, schema=SCHEMA)
    cluster.warm()
    for instance_id, place in HOSTS.items():
        spec = PlaceSpec(1, "abc", "smollm2:135m", (boot(cluster, place),))
        cluster.write(place, (PLACE, instance_id), spec)
        cluster.write(place, (SHARD, (instance_id, 0)), ShardRecord(ShardPhase.READY, 1, spec))
    cluster.run(0.1)
    return cluster


def boot(cluster: Cluster, place: int) -> int:
    return cluster.core(place).me.standing.generation.nonce


def view(cluster: Cluster, place: int) -> View:
    core = cluster.core(place)
    return take_view(core.node, core.replica, lambda node: core.believe(node, cluster.now))


def candidates(cluster: Cluster, place: int) -> list[Candidate]:
    seen = view(cluster, place)
    return [
        Candidate(instance.instance_id, instance.shards[0].node, seen.load(instance.instance_id))
        for instance in seen.candidates("abc")
        if instance.shards[0] is not None
    ]


def start(cluster: Cluster, number: int, instance_id: int, home: int = 0) -> TaskId:
    executor = Executor(boot(cluster, HOSTS[instance_id]), 1)
    cluster.write(home, (TASK, number), TaskHeader(0, instance_id, (executor,), 10, 10, 60))
    return TaskId(boot(cluster, home), number)


def finish(cluster: Cluster, task: TaskId, instance_id: int) -> None:
    cluster.write(HOSTS[instance_id], (RANK, (*task, 0, 0)), RankReport(RankPhase.OK))
    cluster.write(0, (VERDICT, task.number), Verdict(Terminal.COMPLETE))


def test_with_138_finished_and_7_active_tasks_the_7_decide(cluster: Cluster) -> None:
    """C1 (exo#1989): counting what has ended would send everything to the instance that has less behind it."""
    core = cluster.core(0)
    index = InFlight(core.replica, lambda node: core.believe(node, cluster.now))
    for node in core.replica.members:
        index.boots.learn(node)
    cluster.watch_changes = lambda place, change: index.update(change) if place == 0 else None
    for number in range(FINISHED):
        instance_id = BUSY_NOW if number % 10 == 0 else BUSY_ONCE
        finish(cluster, start(cluster, number, instance_id), instance_id)
    for number in range(FINISHED, FINISHED + ACTIVE):
        start(cluster, number, BUSY_ONCE if number < FINISHED + 2 else BUSY_NOW)
    cluster.run(0.2)

    for place in range(3):
        seen = view(cluster, place)
        assert len(seen.tasks) == FINISHED + ACTIVE
        assert sum(task.status.terminal for task in seen.tasks.values()) == FINISHED
        assert dict(seen.in_flight) == {BUSY_ONCE: 2, BUSY_NOW: 5}
    assert dict(index.counts) == {BUSY_ONCE: 2, BUSY_NOW: 5}

    router = Router(random.Random(1))
    chosen = []
    for number in range(FINISHED + ACTIVE, FINISHED + ACTIVE + 5):
        choice = router.choose(Route(1), candidates(cluster, 0), cluster.now)
        assert isinstance(choice, Candidate)
        start(cluster, number, choice.instance_id)
        chosen.append(choice.instance_id)

    assert chosen[:3] == [BUSY_ONCE] * 3
    assert sorted(chosen[3:]) == [BUSY_ONCE, BUSY_NOW]


@pytest.mark.parametrize("home", [0, 1])
def test_twenty_at_once_split_before_anybody_has_heard_of_them(cluster: Cluster, home: int) -> None:
    """C5: all at one home, either of a node with an instance or without; no gossip travels in between."""
    router = Router(random.Random(2))
    for number in range(20):
        choice = router.choose(Route(1), candidates(cluster, home), cluster.now)
        assert isinstance(choice, Candidate)
        start(cluster, number, choice.instance_id, home)

    assert dict(view(cluster, home).in_flight) == {BUSY_ONCE: 10, BUSY_NOW: 10}


def test_a_draining_suspect_or_dead_node_gets_nothing_new(cluster: Cluster) -> None:
    cluster.crash(2)
    cluster.run(2)

    assert [c.instance_id for c in candidates(cluster, 0)] == [BUSY_ONCE]
