"""The lines in which requests wait at their home for room at some instance of their model.

Nothing waits at a head: so a request that waits can be cancelled here, goes wherever room comes up first, and costs nothing
when a head dies. Requests are tried in the order in which they came, and none overtakes one that waits: whoever is behind may
try as soon as all before it are being tried.
"""

import trio
from msgspec import Struct


class Place:
    """One request in line."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.seated = False  # it has had to wait, and counts among those who do until it is admitted
        self.on_trial = False  # it is being submitted somewhere
        self.offer: int | None = None  # an instance whose head asked for a request
        self.looks_at = since  # when it looks for room by itself, where heads ask
        self._bell = trio.Event()

    def ring(self) -> None:
        """Something may have changed for it."""
        self._bell.set()

    async def wait(self, until: float) -> None:
        """Until something may have changed, or that moment has come."""
        with trio.move_on_at(until):
            await self._bell.wait()
        self._bell = trio.Event()


class Line:
    """Requests of one model, in order of arrival, until each is admitted somewhere or leaves."""

    def __init__(self) -> None:
        self._places: dict[Place, None] = {}

    def __repr__(self) -> str:
        return f"Line({len(self._places)}, {self.waiting} wait)"

    def __len__(self) -> int:
        return len(self._places)

    def join(self, since: float) -> Place:
        """Stand at the end."""
        place = Place(since)
        self._places[place] = None
        return place

    def leave(self, place: Place) -> None:
        """Admitted, or gone."""
        del self._places[place]
        self.ring()

    def may_try(self, place: Place) -> bool:
        """Whether all before it are being tried, or a head asked for it."""
        if place.offer is not None:
            return True
        for other in self._places:
            if other is place:
                return True
            if not other.on_trial:
                return False
        raise KeyError(place)

    def ring(self) -> None:
        """There may be room: the first that is not being tried looks, and rings for the next once it is."""
        for place in self._places:
            if not place.on_trial:
                place.ring()
                return

    def ring_all(self) -> None:
        """Something concerns everybody: the node stops, the model is gone."""
        for place in self._places:
            place.ring()

    def offer(self, instance_id: int, count: int) -> int:
        """A head asks for `count` requests; the first that wait are told. Returns how many there were."""
        told = 0
        for place in self._places:
            if told == count:
                break
            if place.seated and not place.on_trial and place.offer is None:
                place.offer = instance_id
                place.ring()
                told += 1
        return told

    @property
    def waiting(self) -> int:
        """How many have had to wait and still do."""
        return sum(place.seated for place in self._places)

    def level(self) -> tuple[int, float | None]:
        """How many wait with nobody trying for them, and since when the first of them has."""
        found = [place.since for place in self._places if place.seated and not place.on_trial]
        return len(found), found[0] if found else None


class Seats(Struct):
    """The bound on all who wait at this node, over every line."""

    seats_max: int
    lines: dict[str, Line]

    @property
    def taken(self) -> int:
        """How many wait."""
        return sum(line.waiting for line in self.lines.values())
