"""The rules on which the replicated state stands, each broken on purpose; some check has to turn red for each."""

from collections.abc import Callable

import pytest

from node import tasks
from node.records import RankPhase, Terminal, Verdict
from node.tasks import Status, Task
from p2p import replica as replica_module
from p2p.lattice import Generation, Grave, Standing
from p2p.membership import Membership
from p2p.namespace import Judgement, Namespace, Written
from p2p.replica import Replica
from tests.sim import model

Mutation = Callable[[pytest.MonkeyPatch], None]


def version_before_generation(patch: pytest.MonkeyPatch) -> None:
    """A new life's records are dropped where an old one's had a higher version; its news alone wipes nothing either."""
    right = Namespace.judge
    joins = Replica.join_standing

    def join_standing(self: Replica, node: bytes, standing: Standing) -> bool:
        before = self.members[node].namespace if node in self.members else None
        new = joins(self, node, standing)
        if before is not None and node in self.members:
            self.members[node].namespace = before
            self._mark(self.members[node])
        return new

    def judge(self: Namespace, generation: Generation, since: int, upto: int, snapshot: bool) -> Judgement:
        return Judgement.OLD if upto <= self.max_version else right(self, generation, since, upto, snapshot)

    patch.setattr(Namespace, "judge", judge)
    patch.setattr(Replica, "join_standing", join_standing)


def grave_without_incarnation(patch: pytest.MonkeyPatch) -> None:
    """A member that was buried by mistake is locked out."""

    def rises_from(grave: Grave, standing: Standing) -> bool:
        return standing.generation > grave.generation

    patch.setattr(replica_module, "rises_from", rises_from)


def refute_by_generation(patch: pytest.MonkeyPatch) -> None:
    """Any claim, even an old one, makes a healthy node's records start over."""
    right = Membership._answer

    def answer(self: Membership, claim: Standing, now: float) -> bool:
        ours = self._replica.members[self._own].standing
        if claim > ours and claim.generation == ours.generation:
            claim = claim._replace(generation=Generation(ours.generation.counter, ours.generation.nonce + 1))
        return right(self, claim, now)

    patch.setattr(Membership, "_answer", answer)


def floor_stays(patch: pytest.MonkeyPatch) -> None:
    """Deletes fall out of the log, and nobody who missed them is told."""
    right = Namespace._raise_floor

    def raise_floor(self: Namespace, floor: int) -> None:
        before = self.floor
        right(self, floor)
        self.floor = before

    patch.setattr(Namespace, "_raise_floor", raise_floor)


def old_changes_apply(patch: pytest.MonkeyPatch) -> None:
    """Changes at or below the version are applied again."""

    def judge(self: Namespace, generation: Generation, since: int, upto: int, snapshot: bool) -> Judgement:
        if generation != self.generation:
            return Judgement.REPLACE if generation > self.generation and snapshot else Judgement.OLD
        return Judgement.REPLACE if snapshot else Judgement.APPLY

    def apply(self: Namespace, changes: list[Written], upto: int, floor: int) -> list[Written]:
        for change in changes:
            self._put(change)
        self.max_version = max(self.max_version, upto)
        self._raise_floor(floor)
        return changes

    patch.setattr(Namespace, "judge", judge)
    patch.setattr(Namespace, "apply", apply)


def alive_beats_dead(patch: pytest.MonkeyPatch) -> None:
    """At an equal incarnation whatever was heard last is believed."""
    right = Replica.join_standing

    def join_standing(self: Replica, node: bytes, standing: Standing) -> bool:
        member = self.members.get(node)
        if member is not None and member.standing[:2] == standing[:2] and standing != member.standing:
            member.standing = standing
            self._mark(member)
            return True
        return right(self, node, standing)

    patch.setattr(Replica, "join_standing", join_standing)


def patch_tasks(patch: pytest.MonkeyPatch, name: str, wrong: object) -> None:
    patch.setattr(tasks, name, wrong)
    patch.setattr(model, name, wrong, raising=False)


def status_forgets_the_verdict(patch: pytest.MonkeyPatch) -> None:
    """A rank that still runs makes an ended task run again."""
    right = tasks.status

    def status(task: Task) -> Status:
        if RankPhase.RUNNING in task.ranks or RankPhase.QUEUED in task.ranks:
            return Status.RUNNING
        return right(task)

    patch_tasks(patch, "status", status)


def cancel_overwrites(patch: pytest.MonkeyPatch) -> None:
    """A late cancel rewrites an answer that was delivered."""
    right = tasks.settle

    def settle(task: Task, *, timed_out: bool, reason: str = "") -> Verdict | None:
        if task.cancelled and task.verdict is not None and task.verdict.status is not Terminal.CANCELLED:
            return Verdict(Terminal.CANCELLED)
        return right(task, timed_out=timed_out, reason=reason)

    patch_tasks(patch, "settle", settle)


def first_rank_completes(patch: pytest.MonkeyPatch) -> None:
    """A task is complete as soon as any rank is."""
    right = tasks.settle

    def settle(task: Task, *, timed_out: bool, reason: str = "") -> Verdict | None:
        if task.verdict is None and RankPhase.OK in task.ranks:
            return Verdict(Terminal.COMPLETE)
        return right(task, timed_out=timed_out, reason=reason)

    patch_tasks(patch, "settle", settle)


MUTATIONS: list[Mutation] = [
    version_before_generation,
    grave_without_incarnation,
    refute_by_generation,
    floor_stays,
    old_changes_apply,
    alive_beats_dead,
    status_forgets_the_verdict,
    cancel_overwrites,
    first_rank_completes,
]
