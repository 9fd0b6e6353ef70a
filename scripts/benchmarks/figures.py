"""How figures are reduced and printed: medians of interleaved pairs with their spread, percentiles with their counts."""

import math
import statistics
from collections.abc import Callable, Sequence

PAIRS_MIN = 7


def interleaved(ours: Callable[[], float], theirs: Callable[[], float], pairs: int = PAIRS_MIN) -> list[tuple[float, float]]:
    """Measure both in turn, `pairs` times, so that a change of the machine's mood hits both alike."""
    assert pairs >= PAIRS_MIN
    return [(ours(), theirs()) for _ in range(pairs)]


def ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, str]:
    """The median of the pairs' ratios, and the same as text with its spread."""
    ratios = sorted(mine / other for mine, other in pairs)
    median = statistics.median(ratios)
    return median, f"{median:.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} pairs)"


def median(values: Sequence[float], unit: str) -> str:
    """A median with its spread and count."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):.1f} {unit} (from {ordered[0]:.1f} to {ordered[-1]:.1f}, {len(ordered)} runs)"


def p99(values: Sequence[float], unit: str) -> tuple[float, str]:
    """The 99th percentile by nearest rank, and the same as text with median, worst and count."""
    ordered = sorted(values)
    value = ordered[math.ceil(0.99 * len(ordered)) - 1]
    middle = statistics.median(ordered)
    return value, f"{value:.1f} {unit} p99 ({middle:.1f} p50, {ordered[-1]:.1f} worst, {len(ordered)} events)"


def report(name: str, measured: str, wanted: str, *, reached: bool) -> None:
    """Print one figure beside what it should be."""
    print(f"{'ok  ' if reached else 'MISS'} {name}: {measured}; wanted {wanted}", flush=True)
