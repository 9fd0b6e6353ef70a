"""A node's cluster service over a replica written by hand."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from node.documents import StateDocument, StateEvent, TaskDocument
from node.records import VERDICT, TaskId, Terminal, Verdict
from node.replica_dump import ReplicaDump
from node.state_changes import StateChanges
from node.state_document import state_document, task_document
from p2p.sync_wire import Name
from tests.node.cluster_replica import BOOTS, ClusterReplica, about, home


class MemoryCluster:
    """See `node.service.ClusterService`. A wish to cancel is granted by the home at once."""

    def __init__(self, cluster: ClusterReplica | None = None) -> None:
        self.replica = cluster or home()
        self.node_id = about().node_id
        self.watch = StateChanges(self.state)
        self.looks = 0
        self.fault: Exception | None = None

    def state(self) -> StateDocument:
        self.looks += 1
        if self.fault is not None:
            raise self.fault
        return state_document(self.replica.view(), about())

    def dump(self) -> ReplicaDump:
        return self.replica.dump()

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[StateEvent]]:
        return self.watch.read()

    async def task(self, task_id: str) -> TaskDocument | None:
        found = TaskId.parse(task_id)
        view = self.replica.view()
        task = view.tasks.get(found) if found is not None else None
        return task_document(task, view, about()) if task is not None else None

    async def cancel(self, task_id: str) -> str | None:
        task = await self.task(task_id)
        if task is None or task.status not in {"pending", "running"}:
            return task.status if task is not None else None
        found = TaskId.parse(task_id)
        assert found is not None
        home_id = next(peer_id for peer_id, boot in BOOTS.items() if boot == found.home)
        self.write(home_id, VERDICT, found.number, Verdict(Terminal.CANCELLED))
        return "cancelled"

    def write(self, peer_id: str, kind: int, name: Name, value: object) -> None:
        """Have a member write a record, and say so."""
        self.replica.write(peer_id, kind, name, value)
        self.watch.touch()
