"""Which homes a head with room asks for waiting requests: the one whose oldest has waited longest first, one each in turn.

A home tells the heads of a model how many of its requests wait and for how long the oldest has (`told`). A head that has
places free pulls as many as it has places. Places are not held for what was asked: whoever comes first gets them, and what
comes too late is refused and goes back to the front of its home's line.

Pure; `now` is passed in.
"""

from collections.abc import Mapping

from msgspec import Struct

PULL_SECONDS_MAX = 0.5  # a pull that brought nothing for so long is forgotten
PULL_JITTER_SECONDS = 0.02  # before a head that was idle answers a home's call, so that not all of them do at once
HOMES_MAX = 1024


class HomeLine(Struct, frozen=True):
    """Requests of one model that wait at one home."""

    count: int
    since: float  # when the oldest began to wait, on this head's clock


def next_pulls(lines: Mapping[bytes, HomeLine], free: int) -> dict[bytes, int]:
    """How many to ask of which home, `free` in all at most: round after round one of each, the longest waiting first.

    Nobody starves: a home's oldest request grows older than everybody else's, and a long line takes one place a round only.
    """
    in_order = sorted(lines.items(), key=lambda item: (item[1].since, item[0]))
    left = {home: line.count for home, line in in_order if line.count > 0}
    pulls: dict[bytes, int] = {}
    while free > 0 and left:
        for home in list(left):
            if free == 0:
                break
            pulls[home] = pulls.get(home, 0) + 1
            free -= 1
            left[home] -= 1
            if left[home] <= 0:
                del left[home]
    return pulls


class _Asked(Struct):
    count: int
    until: float


class Pulls:
    """What one instance's head knows of the homes whose requests of its model wait, and has asked of them."""

    def __init__(self) -> None:
        self._lines: dict[bytes, HomeLine] = {}
        self._asked: dict[bytes, _Asked] = {}
        self._declined: dict[bytes, None] = {}

    def told(self, home: bytes, count: int, waited_seconds: float, now: float) -> None:
        """A home says how many wait there, and how long the oldest has; 0: none any more."""
        self._lines.pop(home, None)
        if count <= 0:
            self._asked.pop(home, None)
            self._declined.pop(home, None)
        elif len(self._lines) < HOMES_MAX:
            self._lines[home] = HomeLine(count, now - max(0.0, waited_seconds))

    def gone(self, home: bytes) -> None:
        """A home is not there any more."""
        self.told(home, 0, 0.0, 0.0)

    def came(self, home: bytes, *, accepted: bool) -> None:
        """A request of this home has come; one that found no room is not asked for again before something has ended here."""
        asked = self._asked.get(home)
        if asked is not None:
            asked.count -= 1
            if asked.count <= 0:
                del self._asked[home]
        if not accepted and home in self._lines:
            self._declined[home] = None

    def ended(self) -> None:
        """Something has ended here: there is more room than before."""
        self._declined.clear()

    def next(self, free: int, now: float) -> dict[bytes, int]:
        """The pulls to send now, by home, where `free` places are; they count as asked."""
        for home, asked in list(self._asked.items()):
            if now >= asked.until:
                del self._asked[home]
        lines = {}
        for home, line in self._lines.items():
            pending = self._asked.get(home)
            rest = line.count - (pending.count if pending is not None else 0)
            if rest > 0 and home not in self._declined:
                lines[home] = HomeLine(rest, line.since)
        pulls = next_pulls(lines, free - sum(asked.count for asked in self._asked.values()))
        for home, count in pulls.items():
            before = self._asked.get(home)
            self._asked[home] = _Asked(count + (before.count if before is not None else 0), now + PULL_SECONDS_MAX)
        return pulls

    def promised(self, besides: bytes) -> int:
        """How many places were offered to other homes than this one, and not taken yet."""
        return sum(asked.count for home, asked in self._asked.items() if home != besides)

    def deadline(self) -> float:
        """When to call `next` again although nothing was heard; infinity: not at all."""
        return min((asked.until for asked in self._asked.values()), default=float("inf"))
