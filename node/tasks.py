"""A task, folded from the records of all who take part in it, and what each of them decides.

    home       writes the header (a new attempt replaces it) and, once, the verdict
    executors  write how far their rank is
    anybody    may write the wish to cancel

No record has two writers, so there is nothing to merge but by the joins below. A terminal status is whatever the home's verdict
says; it never changes and never goes back, whatever else arrives. Complete is said only when the LAST rank is done and all are
ok; a wish to cancel that comes later changes nothing, because the verdict is there already.

Pure: values in, values out.
"""

from collections.abc import Mapping
from enum import IntEnum

from msgspec import Struct

from node.records import RankPhase, RankReport, TaskHeader, TaskId, Terminal, Verdict
from p2p.lattice import join_maps, join_under

VERDICT_LINGER_SECONDS = 10.0  # a verdict can be read for so long at least
VERDICT_LINGER_SECONDS_MAX = 60.0  # and no longer, whatever its ranks do
OUTCOMES_MAX = 4096


class Status(IntEnum):
    """A task's status, in the order in which it may move within an attempt."""

    PENDING = 0
    QUEUED = 1
    RUNNING = 2
    SETTLING = 3
    CANCELLED = 4
    TIMED_OUT = 5
    FAILED = 6
    COMPLETE = 7

    @property
    def terminal(self) -> bool:
        """Whether it can never change again."""
        return self >= Status.CANCELLED

    @property
    def shown(self) -> str:
        """The word for people."""
        if self <= Status.QUEUED:
            return "pending"
        return "running" if self <= Status.SETTLING else self.name.lower()


class Task(Struct, frozen=True):
    """What is known of a task: the product of a verdict, a cancel flag, and the ranks' phases under their attempt."""

    verdict: Verdict | None = None
    cancelled: bool = False
    attempt: int = 0
    ranks: tuple[RankPhase | None, ...] = ()


def join_verdicts(ours: Verdict | None, theirs: Verdict | None) -> Verdict | None:
    """The verdict with the stronger evidence; among equals the smaller reason, so that the join has no order."""
    if ours is None or theirs is None:
        return ours or theirs
    if ours.status != theirs.status:
        return max(ours, theirs, key=lambda verdict: verdict.status)
    return min(ours, theirs, key=lambda verdict: verdict.reason)


def join_phases(ours: RankPhase | None, theirs: RankPhase | None) -> RankPhase | None:
    """The further phase of one rank."""
    if ours is None or theirs is None:
        return ours or theirs
    return max(ours, theirs)


def join_ranks(ours: tuple[RankPhase | None, ...], theirs: tuple[RankPhase | None, ...]) -> tuple[RankPhase | None, ...]:
    """Rank by rank."""
    length = max(len(ours), len(theirs))
    joined = join_maps(dict(enumerate(ours)), dict(enumerate(theirs)), join_phases)
    return tuple(joined[rank] for rank in range(length))


def join_tasks(ours: Task, theirs: Task) -> Task:
    """Join of what two sides know of one task; ranks of a lower attempt are fenced."""
    attempt, ranks = join_under((ours.attempt, ours.ranks), (theirs.attempt, theirs.ranks), join_ranks)
    return Task(join_verdicts(ours.verdict, theirs.verdict), ours.cancelled or theirs.cancelled, attempt, ranks)


def fold(header: TaskHeader, verdict: Verdict | None, cancelled: bool, reports: Mapping[int, RankReport]) -> Task:
    """A task from its records; `reports` are those of the header's attempt, by rank."""
    ranks = tuple(reports[rank].phase if rank in reports else None for rank in range(len(header.executors)))
    return Task(verdict, cancelled, header.attempt, ranks)


def status(task: Task) -> Status:
    """The verdict wherever there is one; else as far as the ranks are."""
    if task.verdict is not None:
        return Status(int(task.verdict.status))
    if not task.ranks:  # it waits at its home
        return Status.PENDING
    if task.cancelled or all(is_done(phase) for phase in task.ranks):
        return Status.SETTLING
    furthest = max(phase or 0 for phase in task.ranks)
    return Status(min(furthest, Status.RUNNING))


def is_done(phase: RankPhase | None) -> bool:
    """Whether a rank has come to its end."""
    return phase is not None and phase >= RankPhase.ABORTED


def in_flight(task: Task, *, home_alive: bool, executors_alive: bool) -> bool:
    """Pending or running, its home and its executors alive; nothing else is in flight."""
    return home_alive and executors_alive and not status(task).terminal


# What the home decides.


def settle(task: Task, *, timed_out: bool, reason: str = "") -> Verdict | None:
    """The verdict that the home now writes; None while there is nothing to say, and for ever once it is said.

    Only the last rank's end makes a task complete: while one rank is missing, the others' ok is not the task's. A task that
    waits at its home has no rank whose end would have to be awaited.
    """
    if task.verdict is not None:
        return None
    if task.cancelled and not task.ranks:
        return Verdict(Terminal.CANCELLED, reason)
    if not task.ranks or not all(is_done(phase) for phase in task.ranks):
        return Verdict(Terminal.TIMED_OUT, reason) if timed_out else None
    if all(phase is RankPhase.OK for phase in task.ranks):
        return Verdict(Terminal.COMPLETE)
    if RankPhase.FAILED in task.ranks:
        return Verdict(Terminal.FAILED, reason)
    return Verdict(Terminal.TIMED_OUT if timed_out and not task.cancelled else Terminal.CANCELLED, reason)


def home_collects(task: Task, verdict_age: float, *, executors_gone: bool) -> bool:
    """Whether the home deletes header and verdict: old enough to have been read, and nobody is at work on it any more."""
    if task.verdict is None or verdict_age < VERDICT_LINGER_SECONDS:
        return False
    settled = executors_gone or all(is_done(phase) for phase in task.ranks)
    return settled or verdict_age >= VERDICT_LINGER_SECONDS_MAX


# What an executor decides.


class HomeSight(Struct, frozen=True):
    """What an executor sees of a task's home."""

    alive: bool  # not dead, and of the boot that the task belongs to
    version: int  # how far the home's records are here
    header: TaskHeader | None


def executor_aborts(sight: HomeSight, attempt: int, *, cancelled: bool, submitted_version: int) -> bool:
    """Whether an executor stops: cancelled, fenced by a newer attempt, or nobody waits for it.

    The task's header may be missing here only because it isn't here yet: the home's version at its submission tells.
    """
    if cancelled or not sight.alive:
        return True
    if sight.header is None:
        return sight.version >= submitted_version
    return sight.header.attempt > attempt


def executor_collects(sight: HomeSight, attempt: int, *, submitted_version: int) -> bool:
    """Whether an executor deletes its rank's record: the home has dropped the task or the attempt, or is gone."""
    return executor_aborts(sight, attempt, cancelled=False, submitted_version=submitted_version)


def canceller_collects(sight: HomeSight, verdict: Verdict | None) -> bool:
    """Whether a wish to cancel is taken back: its answer, or the absence of its task, is to be seen."""
    return verdict is not None or not sight.alive or (sight.header is None and sight.version > 0)


class Outcomes:
    """An executor's memory of what it was given by one boot of a home: a submission is run at most once.

    What is older than the memory is refused as too old, never run.
    """

    def __init__(self) -> None:
        self._attempts: dict[int, int] = {}  # by task number: the highest attempt that was taken
        self._floor = 0  # numbers below are too old

    def takes(self, task: TaskId, attempt: int) -> bool:
        """Whether to run this attempt, which is then remembered; False for one that was taken before or is too old."""
        number = task.number
        if number < self._floor or attempt <= self._attempts.get(number, -1):
            return False
        self._attempts[number] = attempt
        while len(self._attempts) > OUTCOMES_MAX:
            oldest = min(self._attempts)
            del self._attempts[oldest]
            self._floor = max(self._floor, oldest + 1)
        return True
