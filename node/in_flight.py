"""How many tasks each instance has in flight: the size of a set, kept up change by change.

In flight is a task without a verdict whose home and whose attempt's executors are of boots that run and are not held for dead.
A task that waits at its home has no executors yet, and counts for no instance.
Nothing is added on submission and taken off at the end, so nothing can be lost, repeated or left over: a crash takes a node's
tasks out because their boot is gone, a false suspicion leaves them in, and a finished task has a verdict.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from node.records import TASK, VERDICT, TaskHeader, TaskId
from p2p.effects import Changed
from p2p.lattice import Liveness
from p2p.replica import Member, Replica
from p2p.sync_wire import Key

Believe = Callable[[bytes], Liveness | None]


def counts_in_flight(header: TaskHeader, *, ended: bool, home: int, running: Callable[[int], bool]) -> bool:
    """Whether a task is in flight at its header's instance.

    `home` is its home's boot, `running` tells of a boot whether it is there and not dead.
    """
    executors = header.executors
    return not ended and bool(executors) and running(home) and all(running(executor.boot) for executor in executors)


class Boots:
    """Which boot each node runs, and whether it is held for dead or gone."""

    def __init__(self, replica: Replica, believe: Believe) -> None:
        self._replica = replica
        self._believe = believe
        self._nodes: dict[int, bytes] = {}
        self._of: dict[bytes, int] = {}

    def learn(self, node: bytes) -> tuple[int, ...]:
        """Bring one node up to date; the boots of it that were or are concerned."""
        member = self._replica.members.get(node)
        before = self._of.get(node)
        after = member.standing.generation.nonce if member is not None else None
        if before is not None and before != after:
            self._nodes.pop(before, None)
        if after is None:
            self._of.pop(node, None)
        else:
            self._nodes[after] = node
            self._of[node] = after
        return tuple(boot for boot in (before, after) if boot is not None)

    def node(self, boot: int) -> bytes | None:
        """The node of a boot that runs."""
        return self._nodes.get(boot)

    def running(self, boot: int) -> bool:
        """Whether a boot is some node's present one, and that node neither dead nor gone."""
        node = self._nodes.get(boot)
        if node is None:
            return False
        belief = self._believe(node)
        return belief is not None and belief < Liveness.DEAD


class InFlight:
    """The index of one node's replica. Feed it every `Changed` effect; `counts` is right after each."""

    def __init__(self, replica: Replica, believe: Believe) -> None:
        self._replica = replica
        self.boots = Boots(replica, believe)
        self.counts: Counter[int] = Counter()  # by instance
        self.changes = 0  # of any count
        self._headers: dict[TaskId, TaskHeader] = {}
        self._counted: dict[TaskId, int] = {}  # the instance for which a task is counted now
        self._concerned: dict[int, dict[TaskId, None]] = {}  # by boot, of homes and executors alike

    def update(self, change: Changed) -> None:
        """Take in what a change says."""
        boots = self.boots.learn(change.node)
        member = self._replica.members.get(change.node)
        if change.changes is None:
            self._reread(member, boots)
        elif member is not None:
            for written in change.changes:
                kind, name = written.key
                if kind in {TASK, VERDICT} and isinstance(name, int):
                    self._refresh(TaskId(member.namespace.generation.nonce, name), member)
        if not change.changes:
            for boot in boots:
                for task in list(self._concerned.get(boot, ())):
                    self._recount(task)

    def _reread(self, member: Member | None, boots: tuple[int, ...]) -> None:
        """Any of a home's records may have changed."""
        for boot in boots:
            for task in [task for task in self._concerned.get(boot, ()) if task.home == boot]:
                self._refresh(task, member)
        for number in _task_numbers(member):
            assert member is not None
            self._refresh(TaskId(member.namespace.generation.nonce, number), member)

    def header(self, task: TaskId) -> TaskHeader | None:
        """A task's header, where its home's records have one."""
        return self._headers.get(task)

    def _refresh(self, task: TaskId, home: Member | None) -> None:
        """Read a task's records again."""
        record = None
        if home is not None and home.namespace.generation.nonce == task.home:
            record = home.namespace.records.get((TASK, task.number))
        header = record.content if record is not None else None
        before = self._headers.pop(task, None)
        if before is not None and before is not header:
            for boot in _boots_of(task, before):
                concerned = self._concerned[boot]
                concerned.pop(task, None)
                if not concerned:
                    del self._concerned[boot]
        if isinstance(header, TaskHeader):
            self._headers[task] = header
            for boot in _boots_of(task, header):
                self._concerned.setdefault(boot, {})[task] = None
        self._recount(task)

    def _recount(self, task: TaskId) -> None:
        header = self._headers.get(task)
        node = self.boots.node(task.home)
        member = self._replica.members.get(node) if node is not None else None
        instance = None
        if header is not None and member is not None:
            ended = (VERDICT, task.number) in member.namespace.records
            if counts_in_flight(header, ended=ended, home=task.home, running=self.boots.running):
                instance = header.instance
        before = self._counted.pop(task, None)
        self.changes += before != instance
        if before is not None:
            self.counts[before] -= 1
            if not self.counts[before]:
                del self.counts[before]
        if instance is not None:
            self._counted[task] = instance
            self.counts[instance] += 1


def recount(replica: Replica, believe: Believe) -> Counter[int]:
    """The same counts from nothing but the replica: the definition, against which the index is tested."""
    boots = Boots(replica, believe)
    for node in replica.members:
        boots.learn(node)
    counts: Counter[int] = Counter()
    for member in replica.members.values():
        if not member.current:
            continue
        home = member.namespace.generation.nonce
        for number in _task_numbers(member):
            header = member.namespace.records[TASK, number].content
            ended = (VERDICT, number) in member.namespace.records
            if isinstance(header, TaskHeader) and counts_in_flight(header, ended=ended, home=home, running=boots.running):
                counts[header.instance] += 1
    return counts


def _boots_of(task: TaskId, header: TaskHeader) -> tuple[int, ...]:
    return tuple(
        dict.fromkeys((task.home, *(executor.boot for executor in header.executors)))
    )  # a home may be its own executor


def _task_numbers(member: Member | None) -> Iterator[int]:
    keys: list[Key] = [] if member is None else list(member.namespace.records)
    for kind, name in keys:
        if kind == TASK and isinstance(name, int):
            yield name
