"""What a node tells and does about the cluster: `node.service.ClusterService`, answered from its own replica at once."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from node.documents import StateDocument, StateEvent, TaskDocument
from node.node import Node
from node.records import TaskId
from node.replica_dump import ReplicaDump, take_dump
from node.state_changes import StateChanges
from node.state_document import About, state_document, task_document
from node.view import View, take_view
from p2p.dialler import Unreached
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


class Nobody:
    """The surroundings of a node without a network."""

    unreached: tuple[Unreached, ...] = ()
    incompatible: tuple[Incompatible, ...] = ()
    counters: Mapping[str, int] = {}


class Cluster:
    """See the module. Made in trio."""

    def __init__(self, node: Node, surroundings: Surroundings) -> None:
        self.node_id = node.node_id
        self._node = node
        self._surroundings = surroundings
        self._changes = StateChanges(self.state)
        node.facts.on_changed.append(lambda _: self._changes.touch())

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

    def task(self, task_id: str) -> TaskDocument | None:
        """One task of any node."""
        parsed = TaskId.parse(task_id)
        view = self._view()
        task = view.tasks.get(parsed) if parsed is not None else None
        return task_document(task, view, self._about()) if task is not None else None

    def cancel(self, task_id: str) -> str | None:
        """Have a task of any node cancelled; its status by now, None where there is none."""
        parsed = TaskId.parse(task_id)
        before = self.task(task_id)
        if parsed is None or before is None:
            return None
        if before.status in {"pending", "running"}:
            self._node.cancel(parsed)
        after = self.task(task_id)
        return after.status if after is not None else before.status
