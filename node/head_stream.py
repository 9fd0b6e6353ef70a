"""What a head says on a home's stream: whatever came up since the last frame goes in the next.

One engine step has all its events put down in one round of trio's scheduler, so they make one frame; while that is being sent,
what comes up makes the next. What waits here is bounded by the credit of the tasks, and for all else by not reading on.
"""

import trio

from node.task_credit import Sent
from node.task_protocol import PULLS_MAX, Batch, Pull, TaskMessage, Try
from p2p.stream import Stream

REPLIES_MAX = 1024  # that the home has not taken; its next message is not read before it has


class HomeStream:
    """One open stream of a home. `run` sends."""

    def __init__(self, stream: Stream[TaskMessage]) -> None:
        self.scope = trio.CancelScope()  # of whoever serves it
        self.connection = stream.peer.connection
        self._stream = stream
        self._events: list[Sent] = []
        self._gone: list[Try] = []
        self._pulls: dict[int, int] = {}
        self._replies = 0
        self._greeted = False
        self._filled = trio.lowlevel.ParkingLot()
        self._drained = trio.lowlevel.ParkingLot()

    def say(self, sent: Sent) -> None:
        """Send an event, for which there is credit."""
        self._events.append(sent)
        if len(self._events) == 1:
            self._filled.unpark()

    def say_refused(self, sent: Sent) -> None:
        """Send the only event of an attempt that nothing is kept of."""
        self._replies += 1
        self.say(sent)

    def say_gone(self, attempt: Try) -> None:
        """Tell that an attempt doesn't run here."""
        self._replies += 1
        self._gone.append(attempt)
        self._filled.unpark()

    def say_pull(self, instance_id: int, free: int) -> bool:
        """Ask for requests; of one instance the latest word counts. Whether there was room to say so."""
        if instance_id not in self._pulls and len(self._pulls) >= PULLS_MAX:
            return False
        self._pulls[instance_id] = free
        self._filled.unpark()
        return True

    async def room(self) -> None:
        """Wait until the home has taken enough of the replies to what it sent."""
        while self._replies >= REPLIES_MAX:
            await self._drained.park()

    async def run(self) -> None:
        """Send what comes up; first of all a frame that says that Resume was heard.

        Raises: StreamBroken.
        """
        while True:
            while self._greeted and not (self._events or self._gone or self._pulls):
                await self._filled.park()
            self._greeted = True
            pulls = tuple(Pull(instance_id, free) for instance_id, free in self._pulls.items())
            batch = Batch(tuple(self._events), tuple(self._gone), pulls)
            self._events, self._gone, self._pulls, self._replies = [], [], {}, 0
            await self._send(batch)
            self._drained.unpark_all()

    async def _send(self, batch: Batch) -> None:
        try:
            await self._stream.send(batch)
        except ValueError:  # above the cap of a frame
            half = len(batch.events) // 2
            if half == 0:
                raise
            await self._send(Batch(batch.events[:half]))
            await self._send(Batch(batch.events[half:], batch.gone, batch.pulls))
