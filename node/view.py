"""A frozen picture of the cluster as one node sees it, with the questions that decisions ask of it.

The replica holds what everybody wrote; the view says what that means: records of boots that are gone and of nodes held for dead
are left out, tasks and instances are folded, counts derived. Nothing in a view ever changes; a decision that reads one is a
pure function.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from node.in_flight import Believe, Boots, counts_in_flight
from node.instances import Instance, Phase, Shard, newest_wants
from node.instances import fold as fold_instance
from node.records import (
    CANCEL,
    DRAIN,
    GAUGE,
    MODEL,
    PLACE,
    PROFILE,
    RANK,
    RUNNER,
    SHARD,
    TASK,
    VERDICT,
    WANT,
    Gauge,
    ModelRecord,
    PlaceSpec,
    Profile,
    RankReport,
    RunnerRecord,
    ShardRecord,
    TaskHeader,
    TaskId,
    Verdict,
    Want,
)
from node.tasks import Status, Task, fold, status
from p2p.lattice import ALIVE, DEAD, Generation, Liveness
from p2p.replica import Member, Replica


class NodeView(Struct, frozen=True):
    """A member."""

    node: bytes
    generation: Generation
    liveness: Liveness
    draining: bool
    profile: Profile | None
    models: Mapping[str, ModelRecord]  # by hash

    @property
    def shown(self) -> str:
        """Its status for people."""
        return "draining" if self.draining and self.liveness is ALIVE else self.liveness.name.lower()


class RunnerView(Struct, frozen=True):
    """A runner, of a node that lives."""

    node: bytes
    number: int
    record: RunnerRecord
    gauge: Gauge | None


class TaskView(Struct, frozen=True):
    """A task whose home lives."""

    task_id: TaskId
    home: bytes
    header: TaskHeader
    state: Task
    status: Status
    executors: tuple[bytes | None, ...]  # by rank; None: that boot is gone; none at all while the task waits at its home
    in_flight: bool  # at its instance
    reason: str


class Roster(Struct, frozen=True):
    """Who and what is there: the cluster without its tasks, which change far more often."""

    nodes: Mapping[bytes, NodeView]
    runners: tuple[RunnerView, ...]
    instances: Mapping[int, Instance]

    def candidates(self, model_hash: str) -> list[Instance]:
        """Ready instances of a model, all of whose nodes are alive and take new work."""
        return [
            instance
            for instance in self.instances.values()
            if instance.phase is Phase.READY
            and instance.spec.model_hash == model_hash
            and all(shard is not None and self._takes_work(shard.node) for shard in instance.shards)
        ]

    def _takes_work(self, node: bytes) -> bool:
        seen = self.nodes.get(node)
        return seen is not None and seen.liveness is ALIVE and not seen.draining


class View(Struct, frozen=True):
    """The cluster at one moment."""

    own: bytes
    roster: Roster
    tasks: Mapping[TaskId, TaskView]
    wants: Mapping[str, Want]
    in_flight: Mapping[int, int]  # by instance, only those that have any
    digest: str

    @property
    def nodes(self) -> Mapping[bytes, NodeView]:
        """Members by name."""
        return self.roster.nodes

    @property
    def runners(self) -> tuple[RunnerView, ...]:
        """Runners of nodes that live."""
        return self.roster.runners

    @property
    def instances(self) -> Mapping[int, Instance]:
        """Instances that are not gone."""
        return self.roster.instances

    def candidates(self, model_hash: str) -> list[Instance]:
        """See `Roster.candidates`."""
        return self.roster.candidates(model_hash)

    def load(self, instance_id: int) -> int:
        """Tasks in flight at an instance."""
        return self.in_flight.get(instance_id, 0)


def take_roster(replica: Replica, believe: Believe) -> Roster:
    """Who and what is there at this moment."""
    nodes = {node: _node(member, believe(node)) for node, member in replica.members.items()}
    current = [member for member in replica.members.values() if member.current]
    return Roster(
        nodes,
        tuple(runner for member in current if nodes[member.node].liveness < DEAD for runner in _runners(member)),
        _instances(current, nodes),
    )


def take_view(own: bytes, replica: Replica, believe: Believe) -> View:
    """The picture of this moment."""
    boots = Boots(replica, believe)
    for node in replica.members:
        boots.learn(node)
    roster = take_roster(replica, believe)
    live = [m for m in replica.members.values() if m.current and roster.nodes[m.node].liveness < DEAD]
    tasks = _tasks(live, boots)
    in_flight: dict[int, int] = {}
    for task in tasks.values():
        if task.in_flight:
            in_flight[task.header.instance] = in_flight.get(task.header.instance, 0) + 1
    return View(
        own=own,
        roster=roster,
        tasks=tasks,
        wants=newest_wants(_wants(replica.members.values())),
        in_flight=in_flight,
        digest=replica.root.hex(),
    )


def _node(member: Member, belief: Liveness | None) -> NodeView:
    records = member.namespace.records if member.current else {}
    profile = records.get((PROFILE, 0))
    models = {
        str(name): record.content
        for (kind, name), record in records.items()
        if kind == MODEL and isinstance(record.content, ModelRecord)
    }
    content = profile.content if profile is not None else None
    return NodeView(
        member.node,
        member.standing.generation,
        DEAD if belief is None else belief,
        (DRAIN, 0) in records,
        content if isinstance(content, Profile) else None,
        models,
    )


def _runners(member: Member) -> Iterable[RunnerView]:
    records = member.namespace.records
    for (kind, name), record in records.items():
        if kind == RUNNER and isinstance(name, int) and isinstance(record.content, RunnerRecord):
            gauge = records.get((GAUGE, name))
            content = gauge.content if gauge is not None else None
            yield RunnerView(member.node, name, record.content, content if isinstance(content, Gauge) else None)


def _instances(members: list[Member], nodes: Mapping[bytes, NodeView]) -> dict[int, Instance]:
    specs: dict[int, PlaceSpec] = {}
    shards: dict[int, dict[int, Shard]] = {}
    for member in members:
        alive = nodes[member.node].liveness < DEAD
        for (kind, name), record in member.namespace.records.items():
            if kind == PLACE and isinstance(name, int) and isinstance(record.content, PlaceSpec) and alive:
                specs[name] = record.content
            elif kind == SHARD and isinstance(name, tuple) and isinstance(record.content, ShardRecord):
                instance_id, rank = name
                boot = member.namespace.generation.nonce
                shards.setdefault(instance_id, {})[rank] = Shard(record.content, member.node, boot, alive)
    folded = {iid: fold_instance(iid, specs.get(iid), shards.get(iid, {})) for iid in {**specs, **shards}}
    return {iid: instance for iid, instance in folded.items() if instance is not None and instance.phase is not Phase.GONE}


def _tasks(members: list[Member], boots: Boots) -> dict[TaskId, TaskView]:
    cancelled: dict[TaskId, None] = {}
    reports: dict[TaskId, dict[tuple[int, int, int], RankReport]] = {}
    for member in members:
        boot = member.namespace.generation.nonce
        for (kind, name), record in member.namespace.records.items():
            if kind == CANCEL and isinstance(name, tuple):
                cancelled[TaskId(*name)] = None
            elif kind == RANK and isinstance(name, tuple) and isinstance(record.content, RankReport):
                home, number, attempt, rank = name
                reports.setdefault(TaskId(home, number), {})[attempt, rank, boot] = record.content
    tasks: dict[TaskId, TaskView] = {}
    for member in members:
        home = member.namespace.generation.nonce
        for (kind, name), record in member.namespace.records.items():
            if kind == TASK and isinstance(name, int) and isinstance(record.content, TaskHeader):
                task_id = TaskId(home, name)
                found = reports.get(task_id, {})
                tasks[task_id] = _task(task_id, member, record.content, found, cancelled=task_id in cancelled, boots=boots)
    return tasks


def _task(
    task_id: TaskId,
    home: Member,
    header: TaskHeader,
    reports: Mapping[tuple[int, int, int], RankReport],
    *,
    cancelled: bool,
    boots: Boots,
) -> TaskView:
    record = home.namespace.records.get((VERDICT, task_id.number))
    verdict = record.content if record is not None and isinstance(record.content, Verdict) else None
    # A rank is told of by its executor and nobody else, and for the header's attempt only.
    ours = {
        rank: reports[header.attempt, rank, executor.boot]
        for rank, executor in enumerate(header.executors)
        if (header.attempt, rank, executor.boot) in reports
    }
    state = fold(header, verdict, cancelled, ours)
    reason = verdict.reason if verdict is not None else ""
    return TaskView(
        task_id,
        home.node,
        header,
        state,
        status(state),
        tuple(boots.node(executor.boot) for executor in header.executors),
        counts_in_flight(header, ended=verdict is not None, home=task_id.home, running=boots.running),
        reason,
    )


def _wants(members: Iterable[Member]) -> Iterable[tuple[str, Want]]:
    for member in members:
        for (kind, name), record in member.namespace.records.items():
            if kind == WANT and isinstance(name, str) and isinstance(record.content, Want):
                yield name, record.content
