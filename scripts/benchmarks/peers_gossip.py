"""How soon a change that one node makes is at all others: tasks begun at one, seen in the events of the other nine."""

import contextlib
import json
import random
import socket
import threading
import time
from functools import partial
from typing import Any

from scripts.benchmarks.figures import p99, report
from scripts.benchmarks.node_process import user_message
from scripts.benchmarks.peers_cluster import PeerNode, fake_model, open_peers, until
from scripts.benchmarks.peers_events import Watch

NODES = 10
CHANGES = 120
GAP_SECONDS = (0.25, 0.45)  # between two changes, evenly spread: no beat with anything periodic
SEEN_SECONDS_MAX = 10.0
MARK = 100_000  # and above: the max_tokens by which requests are told apart
P99_MILLISECONDS = 100.0


class Sightings:
    """When who first saw which task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[int, dict[str, float]] = {}

    def hear(self, node: PeerNode, moment: float, event: dict[str, Any]) -> None:
        """An event of one node."""
        tasks = event.get("state", event).get("tasks", ())
        with self._lock:
            for task in tasks:
                if task["max_tokens"] >= MARK:
                    self._first.setdefault(task["max_tokens"], {}).setdefault(node.node_id, moment)

    def of(self, mark: int) -> dict[str, float]:
        """Moments by node."""
        with self._lock:
            return dict(self._first.get(mark, {}))


def begin(port: int, mark: int) -> socket.socket:
    """Ask for an answer that nobody waits for; the connection must be kept."""
    body = json.dumps({"messages": user_message("Hello."), "stream": True, "max_tokens": mark}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(head % len(body) + body)
    return client


def measure(nodes: list[PeerNode], stack: contextlib.ExitStack) -> tuple[list[float], list[float]]:
    """Milliseconds from sending a request at the first node until each other one shows it, and until the first one does."""
    sightings = Sightings()
    for node in nodes:
        stack.callback(Watch(node, partial(sightings.hear, node)).close)
    chance = random.Random(1)
    stack.enter_context(begin(nodes[0].port, MARK))  # it has the only place: all others wait, and nothing else changes
    until(lambda: len(sightings.of(MARK)) == NODES)
    others: list[float] = []
    own: list[float] = []
    for mark in range(MARK + 1, MARK + 1 + CHANGES):
        time.sleep(chance.uniform(*GAP_SECONDS))
        sent = time.monotonic()
        stack.enter_context(begin(nodes[0].port, mark))
        until(lambda mark=mark: len(sightings.of(mark)) == NODES, SEEN_SECONDS_MAX, poll=0.01)  # type: ignore[misc] # its default
        for node_id, moment in sightings.of(mark).items():
            (own if node_id == nodes[0].node_id else others).append((moment - sent) * 1e3)
    return others, own


def main() -> None:
    """Print the figure."""
    with open_peers("--context", str(2 * (MARK + CHANGES)), "--max-waiting", str(2 * CHANGES)) as peers:
        model = fake_model(peers.directory / "model", context=2 * (MARK + CHANGES), step_seconds=1.0)
        peers.start_all(("--model", str(model), "--max-running", "1"), *[()] * (NODES - 1))
        peers.wait_converged(instances=1)
        with contextlib.ExitStack() as stack:
            others, own = measure(peers.nodes, stack)
    value, text = p99(others, "ms")
    text = f"{text}, from the request's sending to the other nine's event streams; at the node itself {p99(own, 'ms')[1]}"
    report(f"{CHANGES} changes on {NODES} nodes", text, f"<= {P99_MILLISECONDS:.0f} ms p99", reached=value <= P99_MILLISECONDS)


if __name__ == "__main__":
    main()
