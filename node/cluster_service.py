"""What a node tells and does about the cluster: `node.service.ClusterService`, answered from its own replica.

Of a task that ended a while ago its home is asked, which remembers it longer than its records are kept.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from node.documents import StateDocument, StateEvent, TaskDocument
from node.ended_tasks import EndedTasks
from node.node import Node
from node.records import TaskId
from node.replica_dump import ReplicaDump, take_dump
from node.state_changes import StateChanges
from node.state_document import About, state_document, task_document
from node.view import View, take_view
from p2p.dialler import Unreached
from p2p.ids import NodeId
from p2p.transport import Incompatible


class Surroundings(Protocol):
    """What a node knows of its peers beside the replicated state."""

    @property
    def unreached(self) -> tuple[Unreached, ...]:
        """Whom it should be connected to and can't reach."""

    @property
    def incompatible(self) -> tuple[Incompatible, ...]:
        """Peers of other versions."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What went in and out, and what went wrong."""

    async def ask_home(self, home: NodeId, task_id: str) -> TaskDocument | None:
        """What the home of a task remembers of it; None where it is not reached either."""


class Nobody:
    """The surroundings of a node without a network."""

    unreached: tuple[Unreached, ...] = ()
    incompatible: tuple[Incompatible, ...] = ()
    counters: Mapping[str, int] = {}

    async def ask_home(self, _home: NodeId, _task_id: str, /) -> TaskDocument | None:
        """Nobody is asked."""
        return None


class Cluster:
    """See the module. Made in trio."""

    def __init__(self, node: Node, surroundings: Surroundings) -> None:
        self.node_id = node.node_id
        self._node = node
        self._surroundings = surroundings
        self._changes = StateChanges(self.state)
        self.ended = EndedTasks()
        node.facts.on_changed.append(lambda _: self._changes.touch())
        node.reconciler.on_collect.append(self._remember)

    def touch(self) -> None:
        """The surroundings have changed."""
        self._changes.touch()

    def _view(self) -> View:
        core = self._node.facts.core
        return take_view(core.node, core.replica, self._node.facts.believe)

    def _about(self) -> About:
        return About(
            node_id=self.node_id,
            cluster=self._node.settings.cluster,
            peer_ids=self._peer_ids(),
            unreachable=self._surroundings.unreached,
            incompatible=self._surroundings.incompatible,
        )

    def _peer_ids(self) -> dict[bytes, str]:
        facts = self._node.facts
        known = {node: facts.node_id(node) for node in facts.core.replica.members}
        return {node: peer_id for node, peer_id in known.items() if peer_id is not None}

    def state(self) -> StateDocument:
        """The merged view."""
        return state_document(self._view(), self._about())

    def dump(self) -> ReplicaDump:
        """The raw replica."""
        facts = self._node.facts
        counters = self._surroundings.counters
        return take_dump(self.node_id, facts.core.replica, facts.believe, peer_ids=self._peer_ids(), counters=counters)

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[StateEvent]]:
        """The whole state and then its changes, for ever."""
        return self._changes.read()

    async def task(self, task_id: str) -> TaskDocument | None:
        """One task of any node, or what its home remembers of it."""
        parsed = TaskId.parse(task_id)
        if parsed is None:
            return None
        found = self._present(parsed) or self.ended.get(task_id)
        if found is None and parsed.home != self._node.boot:
            home = self._node.view.in_flight.boots.node(parsed.home)
            node_id = self._node.facts.node_id(home) if home is not None else None
            if node_id is not None:
                found = await self._surroundings.ask_home(node_id, task_id)
        return found

    def _present(self, task_id: TaskId) -> TaskDocument | None:
        """A task that has records."""
        view = self._view()
        task = view.tasks.get(task_id)
        return task_document(task, view, self._about()) if task is not None else None

    def _remember(self, task_id: TaskId) -> None:
        found = self._present(task_id)
        if found is not None:
            self.ended.add(found)

    async def cancel(self, task_id: str) -> str | None:
        """Have a task of any node cancelled; its status by now, None where there is none."""
        parsed = TaskId.parse(task_id)
        before = await self.task(task_id)
        if parsed is None or before is None:
            return None
        if before.status in {"pending", "running"}:
            self._node.cancel(parsed)
        after = self._present(parsed)
        return after.status if after is not None else before.status
