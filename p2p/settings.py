"""The numbers by which members probe, suspect, tell and repair. Times are seconds on the node's one clock.

That clock must go on while the machine sleeps (CLOCK_BOOTTIME on Linux, CLOCK_MONOTONIC_RAW on macOS): a sleep is then a long
gap between two calls like any other freeze, and no wall clock is needed to find it, or for anything else here.
"""

from math import log10

from msgspec import Struct

MESH_MAX = 64  # members up to which everybody keeps a stream to everybody
LINKS_MIN, LINKS_MAX = 6, 8  # streams of each member above that
HELPERS = 3
ATTESTERS = 2
HEALTH_MAX = 8
GRAVES_UNBURIED_MAX = 2000  # dead members whose records are still kept
BOOK_MAX = 256


class Settings(Struct, frozen=True, kw_only=True):
    """Timing of the protocol."""

    probe_seconds: float = 1.0
    probe_targets: int = 3
    direct_seconds: float = 0.3  # for an answer to a ping before helpers are asked
    suspicion_factor: float = 3.0
    suspicion_spread: float = 4.0  # longest over shortest suspicion
    evidence_seconds: float = 3.0  # others' news of a death is held for a suspicion as long, in the view
    repair_seconds: float = 1.0
    repair_jitter: float = 0.1
    flush_seconds_mesh: float = 0.02
    flush_seconds_overlay: float = 0.05
    heal_seconds: float = 5.0
    stroll_rounds: int = 24  # every so many heal rounds a member of an overlay takes a new random stream
    freeze_seconds: float = 1.0  # a gap from which on timers are pushed on
    lag_seconds: float = 0.2  # a gap from which on this node thinks less of its own health
    sleep_seconds: float = 5.0  # a gap after which everything starts over
    forget_seconds: float = 24 * 3600.0
    push: bool = True


def suspicion_bounds(settings: Settings, live: int) -> tuple[float, float]:
    """Shortest and longest suspicion, with all and with no confirmations, among so many live members."""
    low = settings.suspicion_factor * max(1.0, log10(max(live, 1))) * settings.probe_seconds
    return low, settings.suspicion_spread * low


def confirmations_wanted(live: int) -> int:
    """How many others have to confirm a suspicion for the shortest time: what there can be, three at most."""
    return max(0, min(3, live - 3))
