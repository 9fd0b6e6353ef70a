"""Instances that fail a home, as they weigh in its choices."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from inference.requests import ErrorCode, Failed, Finished, Load, Usage
from node.affinity import prefixes
from node.routing import Route, Router
from tests.node.routing_examples import DONE, candidates, refuse, run, turns, went


@pytest.fixture
def router() -> Router:
    return Router(random.Random(1))


def test_a_backend_that_fails_at_once_does_not_attract_the_traffic(router: Router) -> None:
    """C16 (olla#144): 100 requests, one every 100 ms, each answered after another attempt at most."""
    bad = 0
    for number in range(100):
        now, route = number * 0.1, Route(1)
        if went(router.choose(route, candidates(0, 0), now)) == 1:
            bad += 1
            router.heard(route, Failed("r", "runner_crashed", "gone"), now + 0.05)
            assert went(router.choose(route, candidates(0, 0), now + 0.05)) == 0
        router.heard(route, DONE, now + 0.06)
    assert bad <= 5

    mended = router.health.barred_until(1)
    assert mended < 10 + 60
    chosen = []
    for number in range(4):
        route = Route(1)
        chosen.append(went(router.choose(route, candidates(0, 0), mended + number)))
        router.heard(route, DONE, mended + number)
    assert Counter(chosen) == {0: 2, 1: 2}


def test_a_stalled_instance_does_not_get_its_prompt_back(router: Router) -> None:
    """C17 (mesh-llm PR#597): the prompt's beginning is held by the one that stalls; only the first request waits for it."""
    (prompt,) = turns(1, words=1000)
    warm = run(router, prompt, candidates(0, 0))
    first = Route(1, prefixes(turns(2, words=1000)[1], "m"))
    assert went(router.choose(first, candidates(0, 0), 1.0)) == warm
    router.lost(first, 11.0, stalled=True)

    assert went(router.choose(first, candidates(0, 0), 11.0)) != warm
    router.heard(first, DONE, 12.0)
    assert {run(router, prompt, candidates(0, 0), 12.0 + number * 5) for number in range(5)} == {1 - warm}


CLIENTS_OWN: list[ErrorCode] = ["context_length_exceeded", "template_error", "invalid_parameter"]


@pytest.mark.parametrize("code", CLIENTS_OWN)
def test_a_clients_mistake_bars_nobody(router: Router, code: ErrorCode) -> None:
    route = Route(1)
    router.choose(route, candidates(0), 0.0)
    router.heard(route, Failed("r", code, "no"), 0.0)

    assert router.health.may_try(0, 0.0)


def fail(router: Router, instance_id: int, now: float) -> None:
    router.lost(Route(1, chosen=candidates(*[0] * (instance_id + 1))[instance_id], sent=now), now)


def test_with_all_barred_the_one_whose_bar_ends_first_is_tried(router: Router) -> None:
    for instance_id, times in enumerate((3, 1, 2)):
        for now in range(times):
            fail(router, instance_id, float(now))

    assert went(router.choose(Route(1), candidates(0, 0, 0), 2.0)) == 1
    assert router.choose(Route(1), candidates(4, 4, 4), 2.0) is None


def test_it_waits_for_one_that_is_well_rather_than_try_one_that_is_not(router: Router) -> None:
    fail(router, 0, 0.0)

    assert router.choose(Route(1), candidates(0, 4), 0.5) is None
    assert not router.pulled(Route(1), candidates(0)[0], 0, 0.5)


def end_refused(router: Router, route: Route) -> None:
    refuse(router, route, Load(1, 4, 0, 0), now=2.0)


def end_dropped(router: Router, route: Route) -> None:
    router.dropped(route)


def end_cancelled(router: Router, route: Route) -> None:
    router.heard(route, Finished("r", "cancelled", Usage(0, 0, 0)), 2.0)


def end_failed(router: Router, route: Route) -> None:
    router.heard(route, Failed("r", "template_error", "no"), 2.0)


@pytest.mark.parametrize("end", [end_refused, end_dropped, end_cancelled, end_failed])
def test_a_trial_that_says_nothing_is_repeated(router: Router, end: Callable[[Router, Route], None]) -> None:
    fail(router, 0, 0.0)
    trial = Route(1)
    assert went(router.choose(trial, candidates(0, 9, slots=0), 2.0)) == 0
    assert went(router.choose(Route(1), candidates(1, 9, slots=0), 2.0)) == 1, "one at a time"

    end(router, trial)

    assert router.health.may_try(0, 2.0)
    assert trial.chosen is None


def test_events_after_the_end_are_ignored(router: Router) -> None:
    route = Route(1)
    router.heard(route, DONE, 0.0)
    router.lost(route, 0.0)
    router.dropped(route)

    assert router.health.may_try(0, 0.0)
