"""One try of a task on one instance, as its home sees it."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol

from inference.requests import Event, Request
from node.cluster_view import Target
from node.home_task import HomeTask


class Execute(Protocol):
    """Runs attempts; `node.node.Node` has the one for its own runners and those of others."""

    def __call__(
        self, target: Target, task: HomeTask, request: Request, /
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Submit an attempt. The first event is Accepted, Refused or Failed; iteration may raise HeadLost.

        Leaving the block cancels what still runs. Left while somebody waits for an event, it ends that iteration.
        """


class Attempt:
    """One try of a task on one instance."""

    def __init__(self, target: Target, stack: AsyncExitStack, events: AsyncIterator[Event]) -> None:
        self.target = target
        self.events = events
        self.stalled = False
        self.lost = ""  # why it is given up, once it is
        self.close = stack.aclose
