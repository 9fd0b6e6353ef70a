"""Joins are idempotent, commutative, associative, and never lose anything."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.lattice import (
    ALIVE,
    COUNTER_MAX,
    DEAD,
    INCARNATION_MAX,
    LEFT,
    NONCE_MAX,
    SUSPECT,
    Generation,
    Grave,
    Liveness,
    Standing,
    join_maps,
    join_standings,
    join_under,
    rises_from,
)
from tests.p2p.laws import check_all, check_triple

OLD, NEW = Generation(1, 9), Generation(2, 3)

generations = st.builds(Generation, st.integers(0, COUNTER_MAX), st.integers(0, NONCE_MAX))
standings = st.builds(Standing, generations, st.integers(0, INCARNATION_MAX), st.sampled_from(Liveness))


def test_standings_over_a_small_domain() -> None:
    states = [
        Standing(generation, incarnation, liveness)
        for generation, incarnation, liveness in product((OLD, Generation(2, 1), NEW), range(3), Liveness)
    ]

    assert check_all(states, join_standings) == 36**3


@given(standings, standings, standings)
def test_standings(a: Standing, b: Standing, c: Standing) -> None:
    check_triple(a, b, c, join_standings)


def maps_of_largest(ours: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
    return join_maps(ours, theirs, max)


@given(*[st.dictionaries(st.sampled_from("abc"), st.integers(0, 3))] * 3)
def test_maps(a: dict[str, int], b: dict[str, int], c: dict[str, int]) -> None:
    check_triple(a, b, c, maps_of_largest)


Headed = tuple[int, frozenset[int]]


def under(ours: Headed, theirs: Headed) -> Headed:
    return join_under(ours, theirs, frozenset.union)


def test_values_under_a_head_over_a_small_domain() -> None:
    sets = [frozenset(i for i in range(3) if bits >> i & 1) for bits in range(8)]

    assert check_all(list(product(range(3), sets)), under) == 24**3


@pytest.mark.parametrize(
    ("have", "receive", "result"),
    [
        # The table of the membership lattice, at equal, lower and higher incarnations.
        ((0, ALIVE), (1, ALIVE), (1, ALIVE)),
        ((1, ALIVE), (0, SUSPECT), (1, ALIVE)),
        ((1, ALIVE), (1, SUSPECT), (1, SUSPECT)),
        ((1, ALIVE), (1, DEAD), (1, DEAD)),
        ((1, ALIVE), (1, LEFT), (1, LEFT)),
        ((1, SUSPECT), (1, ALIVE), (1, SUSPECT)),
        ((1, SUSPECT), (2, ALIVE), (2, ALIVE)),
        ((1, SUSPECT), (1, DEAD), (1, DEAD)),
        ((1, DEAD), (1, ALIVE), (1, DEAD)),
        ((1, DEAD), (1, SUSPECT), (1, DEAD)),
        ((1, DEAD), (2, SUSPECT), (2, SUSPECT)),
        ((1, DEAD), (2, ALIVE), (2, ALIVE)),
        ((1, DEAD), (1, LEFT), (1, LEFT)),
        ((1, LEFT), (1, DEAD), (1, LEFT)),
        ((1, LEFT), (1, ALIVE), (1, LEFT)),
        ((1, LEFT), (2, ALIVE), (2, ALIVE)),
    ],
)
def test_the_worse_news_wins_until_the_member_raises_its_incarnation(
    have: tuple[int, Liveness], receive: tuple[int, Liveness], result: tuple[int, Liveness]
) -> None:
    assert join_standings(Standing(OLD, *have), Standing(OLD, *receive)) == Standing(OLD, *result)


def test_a_new_generation_stands_above_every_incarnation_of_an_older_one() -> None:
    assert join_standings(Standing(OLD, INCARNATION_MAX, LEFT), Standing(NEW, 0, ALIVE)) == Standing(NEW, 0, ALIVE)


def test_only_what_is_above_its_grave_returns() -> None:
    grave = Grave(OLD, 4)

    assert not rises_from(grave, Standing(OLD, 4, ALIVE))
    assert not rises_from(grave, Standing(OLD, 4, LEFT))
    assert not rises_from(grave, Standing(Generation(0, 99), 9, ALIVE))
    assert rises_from(grave, Standing(OLD, 5, ALIVE))
    assert rises_from(grave, Standing(NEW, 0, ALIVE))
