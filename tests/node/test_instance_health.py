"""Instances that fail get nothing for a growing while, then one request on trial."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.requests import ErrorCode
from node.instance_health import BAR_SECONDS_MAX, INSTANCES_MAX, TRIAL_SECONDS_MAX, InstanceHealth, at_fault

ONE = 1


def fail_again(health: InstanceHealth, now: float) -> float:
    """Try at the end of the bar and fail; returns how long it is barred then."""
    now = max(now, health.barred_until(ONE))
    assert health.may_try(ONE, now)
    health.sent(ONE, now)
    assert health.failed(ONE, sent=now, now=now + 0.05)
    return health.barred_until(ONE) - (now + 0.05)


def test_bars_double_to_a_minute_and_a_regular_end_clears_them() -> None:
    health = InstanceHealth()
    bars = [fail_again(health, 0.0) for _ in range(9)]
    assert bars == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60])

    now = health.barred_until(ONE)
    health.sent(ONE, now)
    health.served(ONE, sent=now)
    assert health.may_try(ONE, now)
    assert fail_again(health, now) == pytest.approx(1)


def test_after_the_bar_one_request_is_on_trial_until_its_first_token() -> None:
    health = InstanceHealth()
    fail_again(health, 0.0)
    assert not health.may_try(ONE, 1.0)
    assert health.may_try(ONE, 2.0)
    health.sent(ONE, 2.0)
    assert not health.may_try(ONE, 3.0)

    health.answering(ONE, sent=2.0)
    assert health.may_try(ONE, 3.0)
    assert not health.failed(ONE, sent=0.0, now=3.0), "what was sent before the first failure is no news"
    assert health.failed(ONE, sent=2.0, now=4.0), "it fails after its first token, so it was not well"
    assert health.barred_until(ONE) == 6.0


def test_a_trial_without_a_verdict_makes_way_for_the_next() -> None:
    health = InstanceHealth()
    fail_again(health, 0.0)
    health.sent(ONE, 2.0)
    health.undecided(ONE, sent=1.0)
    assert not health.may_try(ONE, 2.0), "another request's end is not the trial's"
    health.undecided(ONE, sent=2.0)
    assert health.may_try(ONE, 2.0)

    health.sent(ONE, 3.0)
    assert not health.may_try(ONE, 3.0 + TRIAL_SECONDS_MAX - 1)
    assert health.may_try(ONE, 3.0 + TRIAL_SECONDS_MAX), "nothing was heard of it"


def test_a_crash_with_many_requests_on_it_is_one_failure() -> None:
    health = InstanceHealth()
    news = [health.failed(ONE, sent=0.1 * number, now=5.0) for number in range(10)]

    assert news == [True, *[False] * 9]
    assert health.barred_until(ONE) == 6.0


def test_an_old_streams_good_end_does_not_speak_for_new_requests() -> None:
    health = InstanceHealth()
    health.failed(ONE, sent=1.0, now=2.0)
    health.answering(ONE, sent=0.5)
    health.served(ONE, sent=0.5)

    assert not health.may_try(ONE, 2.5)


def test_a_stall_bars_for_the_whole_minute() -> None:
    """C17 (mesh-llm PR#597): only the first request waits for the limit."""
    health = InstanceHealth()
    health.failed(ONE, sent=0.0, now=10.0, stalled=True)

    assert health.barred_until(ONE) == 10.0 + BAR_SECONDS_MAX


def test_a_clients_mistake_is_not_the_instances_fault() -> None:
    faults: dict[ErrorCode, bool] = {
        "context_length_exceeded": False,
        "template_error": False,
        "invalid_parameter": False,
        "timed_out": False,
        "runner_stopped": False,
        "engine_error": True,
        "runner_crashed": True,
    }

    assert {code: at_fault(code) for code in faults} == faults


def test_its_memory_is_bounded() -> None:
    health = InstanceHealth()
    for number in range(2 * INSTANCES_MAX):
        health.failed(number, sent=0.0, now=1.0)

    barred = [number for number in range(2 * INSTANCES_MAX) if not health.may_try(number, 1.5)]
    assert barred == list(range(INSTANCES_MAX, 2 * INSTANCES_MAX))


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["failed", "stalled", "answering", "served", "undecided"]))))
def test_whatever_happens_it_is_tried_again_within_a_minute(steps: list[tuple[float, str]]) -> None:
    health = InstanceHealth()
    now = 0.0
    for wait, what in itertools.chain(steps, [(0.0, "failed")]):
        now += wait
        if health.may_try(ONE, now):
            health.sent(ONE, now)
        if what in {"failed", "stalled"}:
            health.failed(ONE, sent=now, now=now, stalled=what == "stalled")
        elif what == "answering":
            health.answering(ONE, sent=now)
        elif what == "served":
            health.served(ONE, sent=now)
        else:
            health.undecided(ONE, sent=now)
    assert health.may_try(ONE, now + 60)
