"""Anything may happen to a few cores and to every frame they ever sent; bare dicts say what must be."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.sim.model import Model
from tests.sim.schedules import SmallLimits

SIZE = 4
places = st.integers(0, SIZE - 1)
indexes = st.integers(0, 63)
names = st.one_of(st.integers(0, 3), st.sampled_from(["a", "b"]), st.just((1, 2)))


class Replication(RuleBasedStateMachine):
    """Write, delete, exchange, drop, duplicate, reorder, restart, lose the disk, forget, replay."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = SmallLimits()
        self.limits.__enter__()
        self.model = Model(SIZE, random.Random(0))

    @rule(place=places, name=names, value=st.integers(0, 9))
    def write(self, place: int, name: int | str | tuple[int, ...], value: int) -> None:
        self.model.write(place, name, value)

    @rule(place=places, name=names)
    def delete(self, place: int, name: int | str | tuple[int, ...]) -> None:
        self.model.delete(place, name)

    @rule(place=places)
    def push(self, place: int) -> None:
        self.model.flush(place)

    @rule(place=places, other=places)
    def begin_repair(self, place: int, other: int) -> None:
        self.model.compare(place, other)

    @rule(place=places, other=places)
    def exchange(self, place: int, other: int) -> None:
        self.model.exchange(place, other)

    @precondition(lambda self: self.model.fresh)
    @rule(index=indexes)
    def deliver(self, index: int) -> None:
        self.model.deliver(index)

    @precondition(lambda self: self.model.fresh)
    @rule(index=indexes)
    def drop(self, index: int) -> None:
        self.model.lose(index)

    @rule(index=st.integers(0, 9999))
    def replay_or_duplicate(self, index: int) -> None:
        self.model.replay(index)

    @rule(place=places, disk=st.booleans())
    def restart(self, place: int, disk: bool) -> None:
        self.model.restart(place, disk=disk)

    @rule(place=places, other=places)
    def forget(self, place: int, other: int) -> None:
        self.model.forget(place, other)

    @rule(place=places, other=places, dead=st.booleans())
    def accuse(self, place: int, other: int, dead: bool) -> None:
        self.model.accuse(place, other, dead=dead)

    @invariant()
    def everything_holds(self) -> None:
        for place in range(SIZE):
            self.model.check(place)

    def teardown(self) -> None:
        try:
            self.model.converge()
        finally:
            self.limits.__exit__()


@pytest.fixture
def profile() -> settings:
    return settings(max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


def test_replicas_hold_what_was_written_whatever_happens(profile: settings) -> None:
    run_state_machine_as_test(Replication, settings=profile)
