"""Runs attempts: of this home on its own runners and on other nodes' instances, and those of other homes on its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from inference.requests import Event, Refused, Request
from inference.supervisor import NO_ROOM
from node.cluster_view import Target
from node.home_task import HomeTask
from node.own_node import OwnNode
from node.records import TaskId
from p2p.effects import Changed


class Executors:
    """Of a node that is by itself: its own runners."""

    pulls = False  # whether requests that wait are asked for by heads with room

    def __init__(self) -> None:
        self.submitted: dict[tuple[TaskId, int], int] = {}  # attempts of other homes: how far the home's records were
        self._node: OwnNode

    def bind(self, node: OwnNode) -> None:
        """The node whose runners these are."""
        self._node = node

    @property
    def running(self) -> int:
        """Tasks of other homes that run here."""
        return 0

    @asynccontextmanager
    async def execute(self, target: Target, _task: HomeTask, request: Request, /) -> AsyncIterator[AsyncIterator[Event]]:
        """See `node.attempt.Execute`."""
        local = self._node.instance(target.candidate.instance_id)
        if local is None or local.supervisor is None:
            yield _refused(request)
            return
        async with local.supervisor.generate(request) as events:
            yield events

    def cancel(self, _task_id: TaskId) -> bool:
        """Wish for the end of another home's task; whether it is known."""
        return False

    def changed(self, change: Changed) -> None:
        """The replicated state has changed."""

    def look(self) -> None:
        """Something about this node's own instances has changed."""


async def _refused(request: Request) -> AsyncIterator[Event]:
    yield Refused(request.request_id, 0, NO_ROOM)
