"""A task is what its records make it; its end never changes."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.records import Executor, RankPhase, RankReport, TaskHeader, TaskId, Terminal, Verdict
from node.tasks import (
    OUTCOMES_MAX,
    HomeSight,
    Outcomes,
    Status,
    Task,
    canceller_collects,
    executor_aborts,
    executor_collects,
    fold,
    home_collects,
    in_flight,
    join_tasks,
    join_verdicts,
    settle,
    status,
)
from tests.p2p.laws import check_all, check_triple

Q, R, A, F, OK = RankPhase.QUEUED, RankPhase.RUNNING, RankPhase.ABORTED, RankPhase.FAILED, RankPhase.OK
VERDICTS = (None, *(Verdict(terminal) for terminal in Terminal))
TWO = TaskHeader(0, 7, (Executor(1, 1), Executor(2, 1)), 10, 10, 60)


def tasks(attempts: int, phases: tuple[RankPhase | None, ...]) -> list[Task]:
    return [
        Task(verdict, cancelled, attempt, ranks)
        for verdict, cancelled, attempt in product(VERDICTS, (False, True), range(attempts))
        for ranks in product(phases, repeat=2)
    ]


def test_tasks_are_a_lattice() -> None:
    assert check_all(tasks(2, (None, R, OK)), join_tasks) == 180**3


reasons = st.sampled_from(("", "a", "b"))
verdicts = st.none() | st.builds(Verdict, st.sampled_from(Terminal), reasons)
any_task = st.builds(
    Task, verdicts, st.booleans(), st.integers(0, 3), st.lists(st.none() | st.sampled_from(RankPhase), max_size=3).map(tuple)
)


@given(any_task, any_task, any_task)
def test_tasks_of_any_size_are_a_lattice(a: Task, b: Task, c: Task) -> None:
    check_triple(a, b, c, join_tasks)


def test_an_end_is_absorbing() -> None:
    """Over all pairs of small tasks: joining anything to an ended one leaves it ended, and never lower."""
    states = tasks(2, (None, R, F, OK))
    for one, other in product(states, repeat=2):
        if status(one).terminal:
            assert status(join_tasks(one, other)) >= status(one)


@pytest.mark.parametrize(
    ("ours", "theirs", "joined"),
    [
        (None, Terminal.CANCELLED, Terminal.CANCELLED),
        (Terminal.CANCELLED, Terminal.TIMED_OUT, Terminal.TIMED_OUT),
        (Terminal.CANCELLED, Terminal.FAILED, Terminal.FAILED),
        (Terminal.TIMED_OUT, Terminal.FAILED, Terminal.FAILED),
        (Terminal.CANCELLED, Terminal.COMPLETE, Terminal.COMPLETE),
        (Terminal.TIMED_OUT, Terminal.COMPLETE, Terminal.COMPLETE),
        (Terminal.FAILED, Terminal.COMPLETE, Terminal.COMPLETE),
    ],
)
def test_facts_beat_decisions(ours: Terminal | None, theirs: Terminal, joined: Terminal) -> None:
    verdict = Verdict(ours) if ours is not None else None

    assert join_verdicts(verdict, Verdict(theirs)) == Verdict(joined)
    assert join_verdicts(Verdict(theirs), verdict) == Verdict(joined)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((None, None), Status.PENDING),
        ((Q, None), Status.QUEUED),
        ((R, Q), Status.RUNNING),
        ((OK, None), Status.RUNNING),
        ((OK, R), Status.RUNNING),
        ((OK, OK), Status.SETTLING),
        ((OK, F), Status.SETTLING),
    ],
)
def test_status_follows_the_ranks(ranks: tuple[RankPhase | None, ...], expected: Status) -> None:
    reports = {rank: RankReport(phase) for rank, phase in enumerate(ranks) if phase is not None}

    assert status(fold(TWO, None, cancelled=False, reports=reports)) is expected


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_task_that_waits_at_its_home_is_pending_until_its_verdict(cancelled: bool) -> None:
    waiting = fold(TaskHeader(0, 0, (), 10, 10, 60), None, cancelled=cancelled, reports={})

    assert status(waiting) is Status.PENDING
    assert settle(waiting, timed_out=True) == Verdict(Terminal.CANCELLED if cancelled else Terminal.TIMED_OUT)
    assert settle(waiting, timed_out=False) == (Verdict(Terminal.CANCELLED) if cancelled else None)


def test_statuses_as_people_see_them() -> None:
    assert [state.shown for state in Status] == [
        *("pending", "pending", "running", "running"),
        *("cancelled", "timed_out", "failed", "complete"),
    ]


@pytest.mark.parametrize(
    ("ranks", "cancelled", "timed_out", "expected"),
    [
        ((OK, None), False, False, None),
        ((OK, R), True, False, None),
        ((OK, OK), False, False, Terminal.COMPLETE),
        ((OK, OK), True, False, Terminal.COMPLETE),
        ((OK, OK), False, True, Terminal.COMPLETE),
        ((OK, F), False, False, Terminal.FAILED),
        ((A, F), True, False, Terminal.FAILED),
        ((A, A), True, False, Terminal.CANCELLED),
        ((A, A), False, True, Terminal.TIMED_OUT),
        ((R, None), False, True, Terminal.TIMED_OUT),
    ],
)
def test_only_the_last_rank_completes_a_task(
    ranks: tuple[RankPhase | None, ...], cancelled: bool, timed_out: bool, expected: Terminal | None
) -> None:
    verdict = settle(Task(None, cancelled, 0, ranks), timed_out=timed_out)

    assert (verdict.status if verdict is not None else None) == expected


def test_a_verdict_is_written_once() -> None:
    for verdict, cancelled, timed_out in product(VERDICTS[1:], (False, True), (False, True)):
        assert settle(Task(verdict, cancelled, 0, (OK, F)), timed_out=timed_out) is None


def test_reports_of_another_attempt_are_fenced() -> None:
    old, new = Task(None, False, 0, (OK, OK)), Task(None, False, 1, (R, None))

    assert status(join_tasks(old, new)) is Status.RUNNING
    assert join_tasks(new, old) == new


def test_only_what_is_pending_or_running_is_in_flight() -> None:
    for task in tasks(1, (None, R, OK)):
        assert in_flight(task, home_alive=True, executors_alive=True) == (task.verdict is None)
        assert not in_flight(task, home_alive=False, executors_alive=True)
        assert not in_flight(task, home_alive=True, executors_alive=False)


def test_the_home_keeps_a_verdict_until_it_can_have_been_read() -> None:
    done, busy = Task(Verdict(Terminal.COMPLETE), False, 0, (OK, OK)), Task(Verdict(Terminal.TIMED_OUT), False, 0, (R, OK))

    assert not home_collects(Task(None, True, 0, (OK, OK)), 99.0, executors_gone=True)
    assert not home_collects(done, 9.9, executors_gone=False)
    assert home_collects(done, 10.0, executors_gone=False)
    assert not home_collects(busy, 59.0, executors_gone=False)
    assert home_collects(busy, 59.0, executors_gone=True)
    assert home_collects(busy, 60.0, executors_gone=False)


def test_an_executor_stops_when_nobody_waits() -> None:
    def aborts(sight: HomeSight, *, cancelled: bool = False) -> bool:
        return executor_aborts(sight, 0, cancelled=cancelled, submitted_version=5)

    assert not aborts(HomeSight(True, 5, TWO))
    assert aborts(HomeSight(True, 5, TWO), cancelled=True)
    assert aborts(HomeSight(False, 9, None))
    assert aborts(HomeSight(True, 6, None))
    assert not aborts(HomeSight(True, 4, None)), "the header may still be on its way"
    assert aborts(HomeSight(True, 6, TaskHeader(1, 7, TWO.executors, 10, 10, 60))), "a newer attempt fences this one"
    assert not executor_collects(HomeSight(True, 4, None), 0, submitted_version=5)
    assert executor_collects(HomeSight(True, 5, None), 0, submitted_version=5)


def test_a_wish_to_cancel_is_taken_back_once_it_is_answered() -> None:
    assert not canceller_collects(HomeSight(True, 5, TWO), None)
    assert canceller_collects(HomeSight(True, 5, TWO), Verdict(Terminal.COMPLETE))
    assert canceller_collects(HomeSight(True, 5, None), None)
    assert canceller_collects(HomeSight(False, 0, None), None)
    assert not canceller_collects(HomeSight(True, 0, None), None)


def test_an_executor_takes_an_attempt_once_and_nothing_too_old() -> None:
    outcomes = Outcomes()

    assert outcomes.takes(TaskId(1, 10), 0)
    assert not outcomes.takes(TaskId(1, 10), 0)
    assert outcomes.takes(TaskId(1, 10), 1)
    assert not outcomes.takes(TaskId(1, 10), 0)
    for number in range(11, 11 + OUTCOMES_MAX):
        assert outcomes.takes(TaskId(1, number), 0)
    assert not outcomes.takes(TaskId(1, 10), 2), "it was forgotten, and may have run"
    assert len(outcomes._attempts) == OUTCOMES_MAX
