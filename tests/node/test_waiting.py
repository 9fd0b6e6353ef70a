"""When a client may come back."""

from hypothesis import given
from hypothesis import strategies as st

from node.waiting import RETRY_SECONDS_UNKNOWN, remaining_seconds, retry_seconds


def test_when_to_come_back() -> None:
    assert retry_seconds([], 4, 32) == RETRY_SECONDS_UNKNOWN
    assert retry_seconds([8.0], running=4, waiting=8) == 16
    assert retry_seconds([0.01], running=4, waiting=8) == 1
    assert retry_seconds([500.0], running=1, waiting=8) == 60
    assert remaining_seconds(10.0, 25, 100) == 30
    assert remaining_seconds(10.0, 0, 0) == RETRY_SECONDS_UNKNOWN


@given(st.lists(st.floats(0, 1e6)), st.integers(0, 100), st.integers(0, 100), st.integers(0, 10), st.integers(0, 10))
def test_it_is_always_between_a_second_and_a_minute(
    durations: list[float], running: int, waiting: int, done: int, total: int
) -> None:
    assert 1 <= retry_seconds(durations, running, waiting) <= 60
    assert 1 <= remaining_seconds(sum(durations), done, total) <= 60
