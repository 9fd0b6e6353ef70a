"""What heads themselves have said against an old view: that they are full.

A refusal stands until the view has caught up with it and then shows an end there, until something else proves that there is
room, or for a bounded time. Pure; `now` is passed in.
"""

from msgspec import Struct

REFUSAL_SECONDS = 2.0  # two rounds of repair: after that the view knows as much itself
INSTANCES_MAX = 1024


class _Refusal(Struct):
    running: int
    until: float
    caught_up: bool = False  # the view has shown as many since


class Refusals:
    """One home's memory of them."""

    def __init__(self) -> None:
        self._last: dict[int, _Refusal] = {}  # by instance

    def __len__(self) -> int:
        return len(self._last)

    def add(self, instance_id: int, running: int, now: float) -> None:
        """A head has refused with so many running. It may have wanted memory rather than places: full is full."""
        self._last.pop(instance_id, None)
        self._last[instance_id] = _Refusal(max(1, running), now + REFUSAL_SECONDS)
        if len(self._last) > INSTANCES_MAX:
            del self._last[next(iter(self._last))]

    def forget(self, instance_id: int) -> None:
        """There is room, whatever was said."""
        self._last.pop(instance_id, None)

    def stands(self, instance_id: int, in_flight: int, now: float) -> bool:
        """Whether it is to be believed now that the view shows so many in flight there."""
        refusal = self._last.get(instance_id)
        if refusal is None:
            return False
        if now >= refusal.until or (refusal.caught_up and in_flight < refusal.running):
            del self._last[instance_id]
            return False
        refusal.caught_up = refusal.caught_up or in_flight >= refusal.running
        return True
