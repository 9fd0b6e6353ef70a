"""The number of BLAS threads follows what the machine does, and trying costs little."""

from hypothesis import given
from hypothesis import strategies as st

from inference.runner.thread_pace import ThreadPace

QUIET = {2: 1.0, 1: 1.25}
BUSY = {2: 6.0, 1: 2.0}


def run(pace: ThreadPace, machine: dict[int, float], steps: int) -> list[int]:
    """The threads of each step on a machine where a step takes as long as it says."""
    used = []
    for _ in range(steps):
        used.append(pace.threads)
        pace.observe(machine[pace.threads])
    return used


def test_a_quiet_machine_uses_all_and_tries_one_rarely() -> None:
    used = run(ThreadPace(2), QUIET, 1000)

    assert used.count(1) <= 1000 // 24 + 1


def test_a_busy_machine_soon_uses_one() -> None:
    used = run(ThreadPace(2), BUSY, 1000)

    assert set(used[2:26]) == {1}
    assert used.count(2) <= 10


@given(st.lists(st.tuples(st.sampled_from(["quiet", "busy"]), st.integers(60, 400)), min_size=1, max_size=6))
def test_it_follows_every_change_within_a_few_dozen_steps(stretches: list[tuple[str, int]]) -> None:
    pace = ThreadPace(2)
    for mood, steps in stretches:
        machine = QUIET if mood == "quiet" else BUSY
        best = min(machine, key=lambda threads: machine[threads])
        run(pace, machine, 400)

        assert run(pace, machine, steps).count(best) >= steps * 0.9


def test_a_stretch_of_company_is_noticed_at_once() -> None:
    pace = ThreadPace(8)
    run(pace, {8: 1.0, 1: 7.0}, 2000)

    used = run(pace, {8: 20.0, 1: 8.0}, 30)

    assert used.count(8) <= 4


def test_with_one_core_there_is_nothing_to_choose() -> None:
    assert set(run(ThreadPace(1), {1: 1.0}, 100)) == {1}
