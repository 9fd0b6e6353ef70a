"""The restart policy: growing delays, a budget for each window of time."""

from hypothesis import given
from hypothesis import strategies as st

from inference.restart import Crash, RestartPolicy, counted, restart_delay

POLICY = RestartPolicy(crashes_max=5, window_seconds=60, delay_first_seconds=0.1, delay_factor=4, delay_max_seconds=3)


def ready(*times: float) -> tuple[Crash, ...]:
    return tuple(Crash(at, was_ready=True) for at in times)


def never_ready(*times: float) -> tuple[Crash, ...]:
    return tuple(Crash(at, was_ready=False) for at in times)


def test_delays_grow_up_to_a_limit_until_the_budget_is_spent() -> None:
    crashes = ready(1, 2, 3, 4, 5)
    delays = [restart_delay(POLICY, crashes[:count], now=5) for count in range(1, 6)]
    assert delays == [0.1, 0.4, 1.6, 3, None]


def test_a_crash_now_and_then_is_forgiven() -> None:
    crashes: tuple[Crash, ...] = ()
    for hour in range(100):
        now = hour * 3600.0
        crashes = counted(POLICY, (*crashes, Crash(now, was_ready=True)), now)
        assert restart_delay(POLICY, crashes, now) == 0.1
        assert len(crashes) == 1


def test_spawns_that_never_get_ready_are_given_up_however_long_each_takes() -> None:
    crashes: tuple[Crash, ...] = ()
    delays = []
    for spawn in range(5):
        now = spawn * 1000.0
        crashes = counted(POLICY, (*crashes, *never_ready(now)), now)
        delays.append(restart_delay(POLICY, crashes, now))
    assert delays == [0.1, 0.4, 1.6, 3, None]


def test_one_that_got_ready_ends_such_a_run() -> None:
    crashes = (*never_ready(0, 1000, 2000), *ready(3000))
    assert counted(POLICY, crashes, now=3000) == ready(3000)


CRASHES = st.lists(st.tuples(st.floats(0, 1000), st.booleans()), min_size=1, max_size=12).map(
    lambda rows: tuple(Crash(at, was_ready) for at, was_ready in sorted(rows))
)


@given(CRASHES, st.floats(0, 100))
def test_what_is_forgotten_makes_no_difference(crashes: tuple[Crash, ...], later: float) -> None:
    now = crashes[-1].at
    kept = counted(POLICY, crashes, now)
    assert restart_delay(POLICY, kept, now) == restart_delay(POLICY, crashes, now)
    assert len(kept) <= POLICY.crashes_max
    following = Crash(now + later, was_ready=True)
    assert restart_delay(POLICY, (*kept, following), now + later) == restart_delay(POLICY, (*crashes, following), now + later)


@given(CRASHES)
def test_the_budget_is_never_exceeded(crashes: tuple[Crash, ...]) -> None:
    now = crashes[-1].at
    recent = [crash for crash in crashes if now - crash.at < POLICY.window_seconds]
    delay = restart_delay(POLICY, crashes, now)
    if len(recent) >= POLICY.crashes_max:
        assert delay is None
    if delay is not None:
        assert POLICY.delay_first_seconds <= delay <= POLICY.delay_max_seconds
