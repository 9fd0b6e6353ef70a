"""Short forms of what `scripts/benchmarks/replication.py` prints."""

from tests.sim import measures
from tests.sim.measures import p99


def test_repair_alone_reaches_all_in_a_few_rounds() -> None:
    for size, limit, limit_lossy in ((3, 2, 4), (10, 5, 7), (100, 8, 11)):
        times = measures.spread_seconds(size, 1, 6 if size == 100 else 20, push=False)
        lossy = measures.spread_seconds(size, 2, 4 if size == 100 else 20, push=False, exchange_loss=0.25)
        assert (p99(times) <= limit, p99(lossy) <= limit_lossy) == (True, True), (size, times, lossy)


def test_push_reaches_all_at_once() -> None:
    for size, limit in ((3, 0.06), (10, 0.08), (100, 0.25)):
        assert p99(measures.spread_seconds(size, 1, 10, push=True)) <= limit


def test_an_idle_node_sends_little_at_any_size() -> None:
    for size in (2, 3, 10, 100):
        assert measures.idle(size, 20.0).bytes_per_second <= 1000


def test_what_is_held_is_bounded_by_what_lives() -> None:
    few, many = measures.soak((4_000, 16_000))

    assert (few.records, few.deletes) == (many.records, many.deletes)
    assert abs(many.encoded_bytes / few.encoded_bytes - 1) <= 0.05


def test_live_tasks_are_small() -> None:
    assert measures.live_task_bytes(ranks=1) <= 70_000
    assert measures.live_task_bytes(ranks=2) <= 100_000


def test_in_flight_counts_do_not_drift() -> None:
    wrong, left, crashes = measures.drift(10_000)

    assert (wrong, left) == (0, 0)
    assert crashes > 50


def test_entries_are_checked_and_applied_fast_enough_to_notice_a_slip() -> None:
    """No threshold of a number that depends on the machine; the benchmark prints that one."""
    assert measures.entries_per_second(20_000) > 5_000
