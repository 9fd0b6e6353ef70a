"""When a client that was turned away, or whose model is on its way, may come back. Pure."""

import math
from collections.abc import Sequence

RETRY_SECONDS_MAX = 60
RETRY_SECONDS_UNKNOWN = 5  # nothing has ended yet from which one could tell


def retry_seconds(durations: Sequence[float], running: int, waiting: int) -> int:
    """When a client may come back, 1 to 60 seconds: when about as many requests have ended as wait.

    `durations` are of requests that ended lately, or the ages of running ones where none has; `running` at once.
    """
    if not durations:
        return RETRY_SECONDS_UNKNOWN
    seconds_per_end = sum(durations) / len(durations) / max(1, running)
    return min(RETRY_SECONDS_MAX, max(1, math.ceil(seconds_per_end * max(1, waiting))))


def remaining_seconds(elapsed: float, done: int, total: int) -> int:
    """When something that is `done` of `total` after `elapsed` seconds may be complete, 1 to 60 seconds."""
    if not 0 < done <= total:
        return RETRY_SECONDS_UNKNOWN
    return min(RETRY_SECONDS_MAX, max(1, math.ceil(elapsed * (total - done) / done)))
