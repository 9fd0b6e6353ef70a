"""The cluster as one node's decisions see it: brought up to date by every change, and cheap to ask.

Tasks come and go a thousand times as often as instances do. So who and what is there (`Roster`) is folded anew only after a
change that concerns it, and what is in flight is an index that each change moves a little (`node.in_flight`).
"""

from collections.abc import Callable, Mapping

from msgspec import Struct

from node.in_flight import Believe, InFlight
from node.instances import Instance, Phase
from node.records import CANCEL, RANK, TASK, VERDICT, Executor, Gauge, RunnerRecord
from node.routing import Candidate
from node.view import Roster, RunnerView, take_roster
from p2p.effects import Changed
from p2p.replica import Replica

_OF_TASKS = frozenset({TASK, RANK, VERDICT, CANCEL})


class Target(Struct, frozen=True):
    """What a home must know of an instance to send it a task."""

    candidate: Candidate
    head: bytes  # the node of rank 0
    boot: int
    epoch: int
    model_hash: str
    executors: tuple[Executor, ...]


class ClusterView:
    """One node's picture. Feed it every `Changed`; `on_change` is called after those that concern instances or counts."""

    def __init__(self, own: bytes, replica: Replica, believe: Believe) -> None:
        self.own = own
        self.in_flight = InFlight(replica, believe)
        self.on_change: list[Callable[[], None]] = []
        self._replica = replica
        self._believe = believe
        self._roster: Roster | None = None
        for node in replica.members:
            self.in_flight.update(Changed(node, None))

    def update(self, change: Changed) -> None:
        """Take a change in."""
        before = self.in_flight.changes
        self.in_flight.update(change)
        concerned = not change.changes or any(written.key[0] not in _OF_TASKS for written in change.changes)
        if concerned:
            self._roster = None
        if concerned or self.in_flight.changes != before:
            for callback in tuple(self.on_change):
                callback()

    @property
    def roster(self) -> Roster:
        """Who and what is there now."""
        if self._roster is None:
            self._roster = take_roster(self._replica, self._believe)
        return self._roster

    def names(self) -> dict[str, dict[str, list[Instance]]]:
        """Instances that serve or will, by the name of their model and its hash."""
        found: dict[str, dict[str, list[Instance]]] = {}
        for instance in self.roster.instances.values():
            if instance.phase <= Phase.READY:
                spec = instance.spec
                found.setdefault(spec.model, {}).setdefault(spec.model_hash, []).append(instance)
        return found

    def targets(self, model_hash: str, reserved: Mapping[int, int]) -> list[Target]:
        """Where a task of this model may go; `reserved` places, by instance, count as taken."""
        roster = self.roster
        runners = {(runner.node, runner.number): runner for runner in roster.runners}
        found = []
        for instance in roster.candidates(model_hash):
            target = self._target(instance, runners, reserved.get(instance.instance_id, 0))
            if target is not None:
                found.append(target)
        return found

    def _target(self, instance: Instance, runners: Mapping[tuple[bytes, int], RunnerView], taken: int) -> Target | None:
        found = [runners.get((s.node, s.record.runner)) for s in instance.shards if s is not None]
        head = instance.head
        if head is None or any(runner is None for runner in found):
            return None  # its runners are told of in another record, which is on its way
        views = [runner for runner in found if runner is not None]
        executors = tuple(
            Executor(s.boot, r.record.spawn) for s, r in zip(instance.shards, views, strict=True) if s is not None
        )
        first: RunnerRecord = views[0].record
        gauge: Gauge | None = views[0].gauge
        candidate = Candidate(
            instance_id=instance.instance_id,
            node=head.node,
            in_flight=self.in_flight.counts[instance.instance_id] + taken,
            slots=first.slots,
            tokens_per_second=gauge.tokens_per_second if gauge is not None else 0,
            context=first.context,
        )
        return Target(candidate, head.node, head.boot, instance.epoch, instance.spec.model_hash, executors)
