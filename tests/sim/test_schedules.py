"""Seeded schedules hold, and turn red as soon as one rule is broken."""

from collections import Counter

import pytest

from tests.sim.model import Broken
from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.schedules import SmallLimits, run_schedule

SEEDS = 300
SEEDS_MUTATED_MAX = 1500


def run_all(seeds: range, *, converge: bool | None = None) -> Counter[str]:
    counts: Counter[str] = Counter()
    with SmallLimits():
        for seed in seeds:
            counts += run_schedule(seed, converge=converge)
    return counts


def test_nothing_comes_back_and_nothing_that_ended_changes() -> None:
    counts = run_all(range(SEEDS))

    assert counts["schedules"] == SEEDS
    for fault in ("lose", "reorder", "replay", "restart", "lost disk", "forget", "accuse", "cancel", "retry"):
        assert counts[fault] > SEEDS / 10, fault


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_rule_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)

    with pytest.raises(Broken):
        run_all(range(SEEDS_MUTATED_MAX), converge=True)
