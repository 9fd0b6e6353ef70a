"""Reads a node's stream of changes as its users would, and notes when each came."""

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from scripts.benchmarks.peers_cluster import PeerNode

READ_SECONDS_MAX = 30.0  # between two pieces; comments come sooner


class Watch:
    """A thread that reads one node's /cluster/events until the node ends or `close`.

    `on_event(moment, event)` is called in that thread: when it came (`time.monotonic`) and what it says. One event in 0.1 s is
    the most that a node sends, so what follows another change by less is seen up to that much later.
    """

    def __init__(self, node: PeerNode, on_event: Callable[[float, dict[str, Any]], None]) -> None:
        self.node = node
        self._on_event = on_event
        self._connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=READ_SECONDS_MAX)
        self._connection.request("GET", "/cluster/events")
        self._response = self._connection.getresponse()
        self._closed = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._response:
                moment = time.monotonic()
                if line.startswith(b"data: ") and not self._closed:
                    self._on_event(moment, json.loads(line[6:]))
        except (OSError, ValueError, http.client.HTTPException, AttributeError):
            pass  # the node has ended, or the connection was closed here

    def close(self) -> None:
        """Read no more."""
        self._closed = True
        if self._connection.sock is not None:
            self._connection.sock.close()
