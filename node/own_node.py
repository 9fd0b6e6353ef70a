"""What executes a node's attempts, and other homes' here, has to know of the node."""

from collections.abc import Mapping
from typing import Protocol

from node.cluster_view import ClusterView
from node.line import Line
from node.local_runners import LocalInstance
from node.reconciler import Facts
from node.standings import Standings
from node.task_home import TaskHome


class OwnNode(Protocol):
    """`node.node.Node`."""

    facts: Facts
    boot: int
    view: ClusterView
    home: TaskHome
    standings: Standings

    def instance(self, instance_id: int) -> LocalInstance | None:
        """One of this node's."""

    @property
    def own_instances(self) -> tuple[int, ...]:
        """The ids of this node's."""

    @property
    def lines(self) -> Mapping[str, Line]:
        """The requests that wait here, by the served name of their model."""

    @property
    def draining(self) -> bool:
        """Whether it takes no new work."""

    def look_idle(self) -> None:
        """Somebody's task has ended here."""
