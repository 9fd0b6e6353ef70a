"""A task's events as its client gets them, over all its attempts."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, Self

from inference.requests import END_EVENTS, Event, Failed
from node.attempt import Attempt
from node.home_submission import HeadLost
from node.home_task import HomeTask
from node.instance_health import at_fault


class Follower(Protocol):
    """What the home does with the events of its tasks."""

    @property
    def running(self) -> Mapping[HomeTask, Attempt | None]:
        """The tasks that have not ended, with their present attempts."""

    def follow(self, task: HomeTask, event: Event) -> None:
        """An event of the present attempt goes to the client."""

    async def go_on(self, task: HomeTask, failure: Failed | None) -> Event | None:
        """Its attempt has broken off: the next one on another instance; an end where there is none, None once it goes on."""


class Events:
    """A task's events to the end, over all its attempts."""

    def __init__(self, home: Follower, task: HomeTask) -> None:
        self.pending: Event | None = None
        self._home = home
        self._task = task
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        event, self.pending = self.pending, None
        while event is None:
            event = await self._next()
        self._home.follow(self._task, event)
        self._over = isinstance(event, END_EVENTS)
        return event

    async def _next(self) -> Event | None:
        task, home = self._task, self._home
        attempt = home.running[task]
        if attempt is None:
            return task.end
        event: Event | None = None
        with suppress(StopAsyncIteration, HeadLost):
            event = await anext(attempt.events)
        if task.end is not None:  # cancelled or timed out meanwhile
            return task.end
        if event is None:
            return await home.go_on(task, None)
        if isinstance(event, Failed) and (at_fault(event.code) or event.code == "runner_stopped"):
            return await home.go_on(task, event)
        return event
