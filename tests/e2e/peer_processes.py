"""Several real nodes of one cluster on loopback, and what each of them shows."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from p2p.cluster_key import new_key
from tests.e2e.node_process import SECONDS_MAX, NodeProcess

STEP_SECONDS = 0.05


@contextlib.contextmanager
def cluster(directory: Path, *options: Sequence[str], watched: int | None = None) -> Iterator[list[NodeProcess]]:
    """A node for each list of options. All join the first; each, or the first `watched`, knows all when the block begins."""
    key = directory / "cluster.key"
    key.write_text(new_key() + "\n")
    common = ["--cluster-key-file", str(key), "--listen", "127.0.0.1:0", "--no-discovery"]
    nodes: list[NodeProcess] = []
    try:
        for number, own in enumerate(options, 1):
            joins = ["--join", address(nodes[0])] if nodes else []
            nodes.append(NodeProcess(directory / f"n{number}", *common, *joins, "--name", f"n{number}", *own))
        until(lambda: all(alive(node) == {node_id(other) for other in nodes} for node in nodes[:watched]))
        yield nodes
    finally:
        for node in nodes:
            node.destroy()


def address(node: NodeProcess) -> str:
    """Where it can be joined."""
    return node.wait_for("p2p ", log=False).removeprefix("p2p ")


def node_id(node: NodeProcess) -> str:
    """As it says itself."""
    return node.wait_for("node ", log=False).split()[1]


def state(node: NodeProcess) -> dict[str, Any]:
    """Its /cluster/state."""
    status, _, data = node.request("GET", "/cluster/state")
    assert status == 200, data
    found: dict[str, Any] = json.loads(data)
    return found


def alive(node: NodeProcess) -> set[str]:
    """Whom it takes for alive."""
    return {member["node_id"] for member in state(node)["nodes"] if member["status"] == "alive"}


def until(condition: Callable[[], object], seconds: float = SECONDS_MAX) -> None:
    """Wait until something can be seen from outside."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(STEP_SECONDS)


def quiet(nodes: Sequence[NodeProcess]) -> bool:
    """Whether all replicas are equal, and nothing is in flight in any of them."""
    states = [state(node) for node in nodes]
    return len({document["digest"] for document in states}) == 1 and not any(
        count for document in states for count in document["in_flight"].values()
    )
