"""The simulator on the command line; `scripts/sim` calls it. Exit status 1 where any run failed."""

import argparse
import gc
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable

import msgspec

from tests.p2p.fuzz import fuzz
from tests.sim.schedules import SmallLimits, run_schedule
from tests.sim.storms import run_storm
from tests.sim.whole_storms import run_whole_storm

FUZZ_FRAMES_EACH = 100_000  # of one seed
PROGRESS_SECONDS = 60.0


def span(text: str) -> range:
    """Seeds "A..B", both of them included."""
    first, _, last = text.partition("..")
    return range(int(first), int(last or first) + 1)


def storms(seeds: range, *, whole: bool) -> int:
    """Run storms, of the core alone or over whole nodes; the number of failed ones."""
    failed = 0
    for seed in seeds:
        try:
            report = run_whole_storm(seed) if whole else run_storm(seed)
        except Exception:  # noqa: BLE001 - whatever goes wrong in a run is that seed's result
            failed += 1
            traceback.print_exc(limit=-3)
            print(f"seed {seed} FAILED; run it again: scripts/sim {'--whole ' * whole}--seed {seed}", flush=True)
        else:
            print(msgspec.json.encode(report).decode(), flush=True)
    return failed


def many(what: str, seeds: range, run: Callable[[int], Counter[str]]) -> int:
    """Run many small seeds and count what happened in them; the number of failed ones."""
    counts: Counter[str] = Counter()
    failed, begun = 0, time.monotonic()
    reported = begun
    for number, seed in enumerate(seeds):
        try:
            counts += run(seed)
        except Exception:  # noqa: BLE001 - as above
            failed += 1
            traceback.print_exc(limit=-3)
            print(f"seed {seed} FAILED; run it again: scripts/sim --{what} {seed}", flush=True)
        if number % 1000 == 0:
            gc.collect()
        if time.monotonic() - reported > PROGRESS_SECONDS:
            reported = time.monotonic()
            print(f"... seed {seed}, {failed} failed, {dict(sorted(counts.items()))}", file=sys.stderr, flush=True)
    print(f"{what}: {len(seeds)} seeds, {failed} failed, in {time.monotonic() - begun:.0f} s: {dict(sorted(counts.items()))}")
    return failed


def main() -> int:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(prog="scripts/sim", description="Seeded simulations of the replicated state.")
    parser.add_argument("--seed", type=int, help="one storm: virtual time, faults of every kind, and equal replicas at its end")
    parser.add_argument("--seeds", type=span, metavar="A..B", help="storms")
    parser.add_argument(
        "--whole", action="store_true", help="storms over whole nodes, with clients, rather than over the core alone"
    )
    parser.add_argument("--schedules", type=span, metavar="A..B", help="short schedules of steps without time, with tasks")
    parser.add_argument("--fuzz", type=int, metavar="FRAMES", help="frames that no honest node sends")
    arguments = parser.parse_args()
    gc.disable()  # nothing here makes cycles faster than `many` collects them
    failed = 0
    if arguments.seed is not None:
        failed += storms(range(arguments.seed, arguments.seed + 1), whole=arguments.whole)
    if arguments.seeds is not None:
        failed += storms(arguments.seeds, whole=arguments.whole)
    if arguments.schedules is not None:
        with SmallLimits():
            failed += many("schedules", arguments.schedules, run_schedule)
    if arguments.fuzz is not None:
        failed += many("fuzz", range(-(-arguments.fuzz // FUZZ_FRAMES_EACH)), lambda seed: fuzz(FUZZ_FRAMES_EACH, seed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
