"""Every number that is claimed of the replicated state: `scripts/bench replication [--long]`.

Without --long it takes some minutes and uses fewer samples; with it, hours. Each line is a row of the table.
"""

import time
from collections.abc import Callable

from tests.p2p.fuzz import fuzz
from tests.sim import measures
from tests.sim.measures import p99
from tests.sim.schedules import SmallLimits, run_schedule

REPAIR_LIMITS = {3: (2, 4), 10: (5, 7), 100: (8, 11), 1000: (10, 17)}
PUSH_LIMITS_MS = {3: 60, 10: 80, 100: 250, 1000: 500}
DEATH_LIMITS = {3: 6, 10: 8, 100: 11, 1000: 15}
RUNS = {3: (40, 25), 10: (20, 25), 100: (5, 20), 1000: (1, 12)}  # seeds and writes of each
RUNS_LONG = {3: (200, 25), 10: (200, 10), 100: (200, 2), 1000: (5, 20)}
DEATHS = {2: 100, 3: 100, 10: 100, 100: 20, 1000: 2}
DEATHS_LONG = {2: 500, 3: 500, 10: 300, 100: 100, 1000: 100}


def row(name: str, limit: str, measured: str, ok: bool) -> None:
    """One row of the table."""
    print(f"| {name} | {limit} | {measured} | {'yes' if ok else '**no**'} |", flush=True)


def repair(long: bool) -> None:
    """Rounds to all by repair alone, and milliseconds with push."""
    for size, (seeds, writes) in (RUNS_LONG if long else RUNS).items():
        for loss, limit in zip((0.0, 0.25), REPAIR_LIMITS[size], strict=True):
            times = [t for s in range(seeds) for t in measures.spread_seconds(size, s, writes, push=False, exchange_loss=loss)]
            what = f"repair alone, {size} nodes" + (", 25 % of exchanges lost" if loss else "")
            mean, worst = sum(times) / len(times), p99(times)
            row(what, f"{limit} rounds", f"{worst:.1f} p99, {mean:.1f} mean, {len(times)} writes", worst <= limit)
        times = [t * 1000 for s in range(seeds) for t in measures.spread_seconds(size, s, writes, push=True)]
        limit_ms, worst = PUSH_LIMITS_MS[size], p99(times)
        row(f"push and repair, {size} nodes", f"{limit_ms} ms", f"{worst:.0f} ms p99, {len(times)} writes", worst <= limit_ms)


def idle(long: bool) -> None:
    """Bytes of an idle node, and what a simulated minute costs."""
    for size in (2, 3, 10, 100, 1000):
        # Two minutes at least: in that time each member of an overlay takes its one new stream.
        seconds = 600.0 if long and size < 1000 else 120.0
        result = measures.idle(size, seconds)
        rate = result.bytes_per_second
        row(
            f"idle, {size} nodes",
            "1,000 B/s",
            f"{rate:.0f} B/s mean, {result.bytes_per_second_max:.0f} busiest, {result.dials} dials",
            rate <= 1000,
        )
        if size == 1000:
            print(f"<!-- 1,000 nodes x {seconds:.0f} s: {result.events} events in {result.wall_seconds:.0f} s of wall time -->")


def death(long: bool) -> None:
    """Silent and plain death."""
    for size, seeds in (DEATHS_LONG if long else DEATHS).items():
        limit = DEATH_LIMITS.get(size, DEATH_LIMITS[3])
        times = [measures.death_seconds(size, seed, silent=True) for seed in range(seeds)]
        row(f"silent death known by all, {size} nodes", f"{limit} s", f"{p99(times):.1f} s p99 of {seeds}", p99(times) <= limit)
        times = [measures.death_seconds(size, seed, silent=False) for seed in range(seeds)]
        row(f"killed process known by all, {size} nodes", "-", f"{p99(times):.2f} s p99 of {seeds}", ok=True)


def false_death(long: bool) -> None:
    """No node that answers is declared dead."""
    hours = 1000.0 if long else 20.0
    for size in (10, 100):
        found = measures.false_deaths(size, hours / 2, loss=0.05)
        row(f"declared dead though responsive, {hours / 2:.0f} node-hours, {size} nodes, 5 % loss", "0", str(found), found == 0)
    for size in (3, 10, 100):
        found = measures.false_deaths(size, hours / 10, frozen=1)
        row(
            f"declared dead beside a node frozen 5 s of 20 s, {hours / 10:.0f} node-hours, {size} nodes",
            "0",
            str(found),
            found == 0,
        )


def heal(long: bool) -> None:
    """2 x 50 nodes split and healed, half of the times after the halves had forgotten each other."""
    seeds = range(200 if long else 20)
    results = [measures.heal(seed, split_seconds=65.0 if seed % 2 else 45.0, forget=seed % 2 == 1) for seed in seeds]
    worst = p99([result.seconds for result in results])
    detail = f"{worst:.1f} s p99, {sum(r.seconds for r in results) / len(results):.1f} s mean, {len(results)} heals"
    row("2 x 50 healed, all equal", "10 s", detail, worst <= 10)
    forgotten = sum(result.buried_before == 100 for result in results)
    seen = sum(result.dead_before for result in results)
    row("of these: halves all dead to each other, forgotten by each other", "-", f"{seen}, {forgotten}", ok=True)
    stopped, uncounted = sum(r.stopped for r in results), sum(r.uncounted for r in results)
    row(
        "of 200 tasks in the halves: stopped or retried, uncounted", "0, 0", f"{stopped}, {uncounted}", stopped + uncounted == 0
    )


def restart(long: bool) -> None:
    """Lost disks and wrong clocks."""
    for size in (3, 10, 100):
        for clock in (-measures.YEAR_SECONDS, measures.YEAR_SECONDS):
            seeds = 100 if long else 20 if size < 100 else 5
            times = [measures.lost_disk_seconds(size, seed, clock) for seed in range(seeds)]
            name = f"lost disk, clock a year {'back' if clock < 0 else 'ahead'}: old records gone everywhere, {size} nodes"
            row(name, "1 s", f"{p99(times):.2f} s p99 of {seeds}", p99(times) <= 1)


def cost(long: bool) -> None:
    """Merge rate, sizes, growth, drift."""
    rate = max(measures.entries_per_second() for _ in range(5))
    row("validated entries a second, one core", ">= 100,000", f"{rate:,.0f}", rate >= 100_000)
    for ranks in (1, 2):
        size = measures.live_task_bytes(ranks=ranks)
        row(f"1,000 live tasks of {ranks} rank{'s' * (ranks > 1)}, encoded", "100 KB", f"{size / 1000:.1f} KB", size <= 100_000)
    few, many = measures.soak((100_000, 1_000_000) if long else (20_000, 200_000))
    same = (few.records, few.deletes) == (many.records, many.deletes)
    close = abs(many.encoded_bytes / few.encoded_bytes - 1)
    row(
        f"entries after {few.tasks:,} and {many.tasks:,} tasks",
        "equal, encoded within 5 %",
        f"{few.records}+{few.deletes} and {many.records}+{many.deletes}, {100 * close:.1f} %",
        same and close <= 0.05,
    )
    tasks = 1_000_000 if long else 100_000
    wrong, left, crashes = measures.drift(tasks)
    row(f"in-flight drift after {tasks:,} tasks, {crashes:,} crashes", "0", f"{wrong + left}", wrong + left == 0)


def schedules(long: bool) -> None:
    """Seeded schedules and fuzzed frames; scripts/sim runs any number of them."""
    seeds = 1_000_000 if long else 2_000
    with SmallLimits():
        counts = run_schedule(0)
        for seed in range(1, seeds):
            counts += run_schedule(seed)
    row(f"back from the dead or a changed end, {seeds:,} schedules", "0", f"0; {dict(sorted(counts.items()))}", ok=True)
    frames = 10_000_000 if long else 100_000
    for seed in range(max(1, frames // 100_000)):
        fuzz(100_000, seed)
    row(f"crashes under {frames:,} fuzzed frames", "0", "0", ok=True)


PARTS: dict[str, Callable[[bool], None]] = {
    function.__name__: function for function in (repair, idle, death, false_death, heal, restart, cost, schedules)
}


def main(long: bool = False) -> None:
    """Print the table; `long` takes as many samples as the claims are made of."""
    print("| what | promised | measured | kept |\n| --- | --- | --- | --- |")
    with measures.quiet_gc():
        for name, part in PARTS.items():
            begun = time.perf_counter()
            part(long)
            print(f"<!-- {name}: {time.perf_counter() - begun:.0f} s -->", flush=True)
