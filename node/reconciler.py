"""Keeps this node's own records as they should be, and takes back those that nobody needs any more.

It is level-triggered: what should be there is worked out anew from what is (`node.own_records`), at each change and once a
second, and the difference is written. A change that went unnoticed costs a second, never a wrong record for long.
"""

from collections.abc import Callable, MutableMapping
from typing import Protocol

import trio

from node.cluster_view import ClusterView
from node.home_task import HomeTask, verdict_of
from node.own_records import NodeFacts, difference, own_records
from node.records import CANCEL, GAUGE, RANK, TASK, VERDICT, RankReport, TaskId, Terminal, Verdict
from node.task_home import TaskHome
from node.tasks import HomeSight, Task, canceller_collects, executor_collects, home_collects
from p2p.core import Core
from p2p.effects import Changed
from p2p.ids import NodeId
from p2p.lattice import Liveness
from p2p.replica import Member
from p2p.sync_wire import Key, Name

SWEEP_SECONDS = 1.0
GAUGE_SECONDS = 0.5  # between two values of one runner's gauge


class Facts(Protocol):
    """The replicated state as the node uses it; `p2p.gossip.Gossip` is one."""

    core: Core
    on_changed: list[Callable[[Changed], None]]

    def write(self, kind: int, name: Name, value: object, *, urgent: bool = False) -> None:
        """Publish a record. Raises: NamespaceFull, of what is not urgent."""

    def delete(self, kind: int, name: Name) -> None:
        """Take one back."""

    def believe(self, node: bytes) -> Liveness | None:
        """What this node takes a member for."""

    def node_id(self, node: bytes) -> NodeId | None:
        """The peer id of a member, where it is known."""

    def watch(self, node: bytes) -> None:
        """Keep a stream to this member for one more reason."""

    def unwatch(self, node: bytes) -> None:
        """One reason less."""


class Reconciler:
    """One node's."""

    def __init__(
        self,
        facts: Facts,
        view: ClusterView,
        own_facts: Callable[[], NodeFacts],
        home: TaskHome,
        submitted: MutableMapping[tuple[TaskId, int], int],
    ) -> None:
        self.on_collect: list[Callable[[TaskId], None]] = []  # called before an ended task's records are taken back
        self._facts = facts
        self._view = view
        self._own_facts = own_facts
        self._home = home
        self._submitted = submitted  # of attempts of other homes that run here or did: how far the home was
        self._gauges_at: dict[Key, float] = {}

    @property
    def _own(self) -> Member:
        return self._facts.core.me

    def publish(self) -> None:
        """Write what is not as it should be."""
        wanted = own_records(self._own_facts())
        now = trio.current_time()
        present = self._own.namespace.records
        for key, value in wanted.items():
            if key[0] == GAUGE:
                if key in present and now < self._gauges_at.get(key, 0.0):
                    continue
                self._gauges_at[key] = now + GAUGE_SECONDS
            self._facts.write(*key, value, urgent=True)
        for key in difference(wanted, list(present)):
            self._facts.delete(*key)
            self._gauges_at.pop(key, None)

    async def run(self) -> None:
        """For ever."""
        while True:
            self.publish()
            self._sweep(trio.current_time())
            await trio.sleep(SWEEP_SECONDS)

    def _sweep(self, now: float) -> None:
        for task, since in list(self._home.ended.items()):
            if task.published is None or self._collected(task, now - since):
                del self._home.ended[task]
        for kind, name in list(self._own.namespace.records):
            if kind == RANK and isinstance(name, tuple):
                self._sweep_rank(name)
            elif kind == CANCEL and isinstance(name, tuple):
                task_id = TaskId(*name)
                sight, verdict = self._sight(task_id)
                if canceller_collects(sight, verdict):
                    self._facts.delete(CANCEL, name)

    def _collected(self, task: HomeTask, age: float) -> bool:
        """Take an ended task's records back, once others have had the time to read them."""
        header = task.published
        assert header is not None
        status, _ = verdict_of(task.end)
        ranks = tuple(self._report(task.task_id, header.attempt, rank, e.boot) for rank, e in enumerate(header.executors))
        gone = not all(self._view.in_flight.boots.running(executor.boot) for executor in header.executors)
        state = Task(Verdict(Terminal(status)), False, header.attempt, tuple(r.phase if r is not None else None for r in ranks))
        if not home_collects(state, age, executors_gone=gone):
            return False
        for callback in tuple(self.on_collect):
            callback(task.task_id)
        self._facts.delete(TASK, task.task_id.number)
        self._facts.delete(VERDICT, task.task_id.number)
        return True

    def _report(self, task_id: TaskId, attempt: int, rank: int, boot: int) -> RankReport | None:
        node = self._view.in_flight.boots.node(boot)
        member = self._facts.core.replica.members.get(node) if node is not None else None
        record = member.namespace.records.get((RANK, (*task_id, attempt, rank))) if member is not None else None
        return record.content if record is not None and isinstance(record.content, RankReport) else None

    def _sweep_rank(self, name: tuple[int, ...]) -> None:
        home, number, attempt, _ = name
        task_id = TaskId(home, number)
        sight, _ = self._sight(task_id)
        if executor_collects(sight, attempt, submitted_version=self._submitted.get((task_id, attempt), 0)):
            self._facts.delete(RANK, name)
            self._submitted.pop((task_id, attempt), None)

    def _sight(self, task_id: TaskId) -> tuple[HomeSight, Verdict | None]:
        return home_sight(self._facts.core, self._view, task_id)


def home_sight(core: Core, view: ClusterView, task_id: TaskId) -> tuple[HomeSight, Verdict | None]:
    """What is seen from here of a task's home, and the task's verdict if that is here."""
    node = view.in_flight.boots.node(task_id.home)
    member = core.replica.members.get(node) if node is not None else None
    if member is None or not view.in_flight.boots.running(task_id.home):
        return HomeSight(False, 0, None), None
    record = member.namespace.records.get((VERDICT, task_id.number))
    verdict = record.content if record is not None and isinstance(record.content, Verdict) else None
    return HomeSight(True, member.namespace.max_version, view.in_flight.header(task_id)), verdict
