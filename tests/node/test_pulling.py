"""Which homes a head with room asks: the longest waiting first, and nobody starves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.pulling import HOMES_MAX, PULL_SECONDS_MAX, HomeLine, Pulls, next_pulls

A, B, C = b"a", b"b", b"c"


def test_one_of_each_in_turn_the_longest_waiting_first() -> None:
    lines = {A: HomeLine(10, 3.0), B: HomeLine(1, 1.0), C: HomeLine(2, 2.0)}

    assert next_pulls(lines, 1) == {B: 1}
    assert next_pulls(lines, 2) == {B: 1, C: 1}
    assert next_pulls(lines, 6) == {B: 1, C: 2, A: 3}
    assert next_pulls(lines, 99) == {B: 1, C: 2, A: 10}
    assert next_pulls(lines, 0) == next_pulls({}, 3) == {}


def test_what_was_asked_is_not_asked_again_until_it_came_or_too_long_ago() -> None:
    pulls = Pulls()
    pulls.told(A, 5, 0.0, 0.0)
    assert pulls.next(2, 0.0) == {A: 2}
    assert pulls.next(2, 0.1) == {}
    assert pulls.next(3, 0.1) == {A: 1}

    for _ in range(3):
        pulls.came(A, accepted=True)
    pulls.told(A, 2, 0.0, 0.2)
    assert pulls.next(1, 0.2) == {A: 1}
    assert pulls.deadline() == 0.2 + PULL_SECONDS_MAX
    assert pulls.next(1, 0.2 + PULL_SECONDS_MAX) == {A: 1}, "nothing came of it"


def test_who_was_refused_is_not_asked_again_before_something_has_ended() -> None:
    pulls = Pulls()
    pulls.told(A, 1, 0.0, 0.0)
    assert pulls.next(1, 0.0) == {A: 1}
    pulls.came(A, accepted=False)
    pulls.told(A, 1, 0.1, 0.1)
    assert pulls.next(1, 0.1) == {}
    pulls.told(B, 1, 0.0, 0.1)
    assert pulls.next(1, 0.1) == {B: 1}

    pulls.came(B, accepted=True)
    pulls.told(B, 0, 0.0, 0.2)
    pulls.ended()
    assert pulls.next(1, 0.2) == {A: 1}


@pytest.mark.parametrize("silence", ["none wait", "gone"])
def test_a_home_without_a_line_is_forgotten(silence: str) -> None:
    pulls = Pulls()
    pulls.told(A, 3, 0.0, 0.0)
    pulls.next(1, 0.0)
    if silence == "gone":
        pulls.gone(A)
    else:
        pulls.told(A, 0, 0.0, 0.0)

    assert pulls.next(4, 0.0) == {}
    assert pulls.deadline() == float("inf")


def test_an_age_counts_from_when_it_is_told() -> None:
    pulls = Pulls()
    pulls.told(A, 1, 5.0, 10.0)
    pulls.told(B, 1, 7.0, 11.0)

    assert pulls.next(1, 11.0) == {B: 1}


def test_homes_are_bounded() -> None:
    pulls = Pulls()
    for number in range(HOMES_MAX + 5):
        pulls.told(number.to_bytes(2, "big"), 1, 0.0, 0.0)
        pulls.came(number.to_bytes(2, "big"), accepted=False)
    pulls.ended()

    assert len(pulls.next(2 * HOMES_MAX, 0.0)) == HOMES_MAX


@given(st.dictionaries(st.binary(min_size=1, max_size=2), st.tuples(st.integers(0, 9), st.floats(0, 9))), st.integers(0, 50))
def test_as_many_as_there_is_room_for_and_each_its_share(lines: dict[bytes, tuple[int, float]], free: int) -> None:
    waiting = {home: HomeLine(*line) for home, line in lines.items()}

    pulls = next_pulls(waiting, free)

    assert sum(pulls.values()) == min(free, sum(line.count for line in waiting.values()))
    for home, count in pulls.items():
        assert count <= waiting[home].count
        for other, line in waiting.items():
            assert pulls.get(other, 0) >= min(line.count, count - 1), "a share for each"


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_nobody_starves(arrivals: list[int]) -> None:
    """One place, one pull a second: a request waits no longer than all that came before it take."""
    pulls = Pulls()
    homes: list[list[float]] = [[], [], []]
    for now, arrived in enumerate(arrivals):
        homes[arrived].append(float(now))
        homes[0].append(float(now))
        for number, line in enumerate(homes):
            pulls.told(bytes([number]), len(line), now - line[0] if line else 0.0, float(now))
        (taken,) = pulls.next(1, float(now))
        pulls.came(taken, accepted=True)
        oldest = min(line[0] for line in homes if line)
        assert homes[taken[0]].pop(0) == oldest
