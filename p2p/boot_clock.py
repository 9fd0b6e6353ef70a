"""The clock of a node's timers, and what tells one life of a node from the next."""

import sys
import time

from p2p.effects import Chance

SECONDS_BITS = 32
CHANCE_BITS = 31


def boot_clock() -> float:
    """Seconds since some moment. They go on while the device sleeps, so that a sleep is a gap like any freeze.

    No setting of the wall clock moves them.
    """
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def new_nonce(wall_seconds: float, chance: Chance) -> int:
    """A boot nonce (63 bits, above 0) that no other life has, and that is larger for a later start.

    The order decides nothing but which of two running copies of one node stops, where no neighbour met both of them: the one
    with the larger nonce (`p2p.membership`), which is so the newcomer as far as wall clocks are right.
    """
    seconds = min(max(1, int(wall_seconds)), (1 << SECONDS_BITS) - 1)
    return seconds << CHANCE_BITS | chance.randrange(1 << CHANCE_BITS)
