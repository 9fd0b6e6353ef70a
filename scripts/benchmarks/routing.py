"""How far routing on old views is from a router that knows everything: `scripts/bench routing [--long]`.

The simulation calls the very functions that nodes call. Waits are 99th percentiles in units of the mean service time, each
the median of five seeds with its spread; "omniscient" is a least-in-flight router that knows the truth, "central" one queue for
all, on the same traces. Without --long there are fewer tasks a seed.
"""

import functools
import statistics
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from tests.node.routing_simulation import Arrival, Regime, Simulation, central, omniscient, p99, trace

SEEDS = 5
SIZES = (4, 10, 50, 200)
TASKS, TASKS_LONG = 5_000, 40_000
AGES = (0.05, 0.25)  # at which "views <= 0.25 old" is measured

RATIO_LIMITS = {4: (1.0, 1.0), 10: (1.0, 1.0), 50: (0.6, 0.8), 200: (0.7, 2.5)}  # load 0.9: views <= 0.25 old, 1 old
WAIT_LIMITS = {50: (0.15, 0.6), 200: (0.05, 0.5)}  # load 0.7, in service times
RATIO_LIMIT_SMALL = 0.8  # load 0.7, up to 10 instances
REDIRECT_LIMITS = {4: 0.05, 10: 0.05, 50: 0.10, 200: 0.10}
SLOTS_WAIT_LIMIT = 0.25  # 10 instances of 4 slots, load 0.7


class Measured(Struct, frozen=True):
    """One seed's trace through all three routers."""

    ours: float
    omniscient: float
    central: float
    redirects: float  # a task, as are these two
    refusals: float
    pulls: float
    misroutes: int

    @property
    def ratio(self) -> float:
        """Our wait by the omniscient one's."""
        return self.ours / self.omniscient


@functools.cache
def baseline(regime: Regime, seed: int) -> tuple[list[Arrival], float, float]:
    """A trace with the waits of the omniscient router and of the central queue; how old views are plays no part."""
    arrivals = trace(regime, seed)
    return arrivals, p99(omniscient(regime, arrivals, seed)), p99(central(regime, arrivals))


def measure(regime: Regime, seed: int) -> Measured:
    """Simulate one seed."""
    arrivals, known, least = baseline(msgspec.structs.replace(regime, staleness=0.0), seed)
    simulation = Simulation(regime, arrivals, seed).run()
    tasks = regime.tasks
    return Measured(
        ours=p99(simulation.waits),
        omniscient=known,
        central=least,
        redirects=simulation.redirects / tasks,
        refusals=simulation.refusals / tasks,
        pulls=simulation.pulls / tasks,
        misroutes=simulation.misroutes,
    )


def row(name: str, values: Sequence[float], limit: float, unit: str, detail: str = "") -> None:
    """One row: a median with its spread beside what was promised."""
    median = statistics.median(values)
    spread = f"{median:.3f} (from {min(values):.3f} to {max(values):.3f}){detail}"
    print(f"| {name} | <= {f'{limit:g} {unit}'.strip()} | {spread} | {'yes' if median <= limit else '**no**'} |", flush=True)


class Table:
    """The table of one run, at its number of tasks a seed."""

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks

    def _measure(self, instances: int, load: float, age: float, slots: int = 1) -> list[Measured]:
        regime = Regime(instances, slots, load, age, self._tasks)
        return [measure(regime, seed) for seed in range(SEEDS)]

    def _waits(self, instances: int, load: float, age: float, slots: int, limit: float, *, ratio: bool) -> list[Measured]:
        runs = self._measure(instances, load, age, slots)
        ours, known, least = (
            statistics.median(values) for values in zip(*((run.ours, run.omniscient, run.central) for run in runs), strict=True)
        )
        pulls, refusals = (statistics.median(values) for values in zip(*((r.pulls, r.refusals) for r in runs), strict=True))
        name = f"p99 wait, {instances} x {slots}, load {load:g}, views up to {age:g} old"
        detail = (
            f"; ours {ours:.3f}, omniscient {known:.3f}, central {least:.3f}; {pulls:.2f} pulls, {refusals:.2f} refusals a task"
        )
        if ratio:
            row(name, [run.ratio for run in runs], limit, "x omniscient", detail)
        else:
            row(name, [run.ours for run in runs], limit, "services", detail)
        return runs

    def size(self, instances: int) -> None:
        """All rows of one number of instances, of one slot each."""
        for age in (*AGES, 1.0):
            self._waits(instances, 0.9, age, 1, RATIO_LIMITS[instances][age > max(AGES)], ratio=True)
        for age in (*AGES, 1.0):
            limit = WAIT_LIMITS.get(instances)
            ratio = limit is None
            runs = self._waits(instances, 0.7, age, 1, limit[age > max(AGES)] if limit else RATIO_LIMIT_SMALL, ratio=ratio)
            if age == min(AGES):
                name = f"redirects a task, {instances} x 1, load 0.7, views up to {age:g} old"
                row(name, [run.redirects for run in runs], REDIRECT_LIMITS[instances], "")
        for load in (0.7, 0.9):
            runs = self._measure(instances, load, 0.0)
            row(f"misroutes, {instances} x 1, load {load:g}, views as they are", [run.misroutes for run in runs], 0, "")

    def several_slots(self) -> None:
        """Ten instances of four slots."""
        for age in (*AGES, 1.0):
            self._waits(10, 0.7, age, 4, SLOTS_WAIT_LIMIT, ratio=False)
        for age in (*AGES, 1.0):
            self._waits(10, 0.9, age, 4, 1.0, ratio=True)


def main(long: bool = False) -> None:
    """Print the table."""
    tasks = TASKS_LONG if long else TASKS
    table = Table(tasks)
    print(f"{SEEDS} seeds of {tasks:,} tasks; the first tenth of each is warm-up")
    print("| what | promised | measured | kept |\n| --- | --- | --- | --- |")
    begun = time.perf_counter()
    for instances in SIZES:
        table.size(instances)
        print(f"<!-- {instances} instances: {time.perf_counter() - begun:.0f} s so far -->", flush=True)
    table.several_slots()
    print(f"<!-- in all {time.perf_counter() - begun:.0f} s -->", flush=True)
