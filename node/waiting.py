"""The line in which requests wait for room on a runner. Pure: who may try, who must wait, and when to come back.

A runner never queues: it accepts or refuses, and a refused request is tried again when something has ended there. Requests
are tried in the order in which they came, and none overtakes one that waits. As many may be on trial together as the runner
seemed to have places, since each answer takes up to one engine step; the first in line may always try, whatever the figures
say, once there was an opening since its last refusal.
"""

import math
from collections.abc import Sequence

from msgspec import Struct

RETRY_SECONDS_MAX = 60
RETRY_SECONDS_UNKNOWN = 5  # nothing has ended yet from which one could tell


class _Place(Struct):
    """One request in line."""

    on_trial: bool = False
    seated: bool = False  # it has had to wait, and counts among those who do until it is admitted
    refused_at: int = -1  # the count of openings when it was tried last


class Line:
    """Requests that have not been admitted yet, in order of arrival, for one runner. `openings` counts the moments at which
    trying again could help; whoever drives this raises it.
    """

    def __init__(self) -> None:
        self.openings = 0
        self._places: dict[str, _Place] = {}

    def join(self, ticket: str) -> None:
        """Stand at the end of the line."""
        assert ticket not in self._places
        self._places[ticket] = _Place()

    def leave(self, ticket: str) -> None:
        """Admitted, or gone."""
        del self._places[ticket]

    def may_try(self, ticket: str, free: int) -> bool:
        """Whether it is this one's turn, where the runner seems to have `free` places."""
        for ahead, (other, place) in enumerate(self._places.items()):
            if other == ticket:
                return not place.on_trial and place.refused_at < self.openings and ahead < max(1, free)
            if not place.on_trial:
                return False
        raise KeyError(ticket)

    def begin_trial(self, ticket: str) -> int:
        """Its request goes to the runner now; returns the openings so far, for `refuse`."""
        self._places[ticket].on_trial = True
        return self.openings

    def refuse(self, ticket: str, openings: int) -> None:
        """The runner had no room; an opening since the trial began counts as a reason to try again."""
        place = self._places[ticket]
        place.on_trial = False
        place.refused_at = openings

    def seat(self, ticket: str) -> bool:
        """It has to wait; whether that is new."""
        place = self._places[ticket]
        was_seated, place.seated = place.seated, True
        return not was_seated

    @property
    def waiting(self) -> int:
        """How many have had to wait so far."""
        return sum(place.seated for place in self._places.values())

    def __repr__(self) -> str:
        shown = (f"{ticket}{'*' if place.on_trial else ''}" for ticket, place in self._places.items())
        return f"Line({' '.join(shown)}; openings={self.openings})"


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
