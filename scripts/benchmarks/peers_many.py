"""Thirty nodes on one machine: until all know all and hold the same, and what that costs."""

import math
import statistics
import time
from collections.abc import Sequence

import psutil

from scripts.benchmarks.figures import median, report
from scripts.benchmarks.peers_cluster import PeerNode, open_peers, until
from scripts.benchmarks.peers_idle import idle

NODES = 30
CONVERGED_SECONDS_MAX = 30.0  # after the last of them is up
POLL_SECONDS = 0.5
IDLE_SECONDS = 30.0


def costs(nodes: Sequence[PeerNode]) -> None:
    """Print what they need while nobody asks for anything."""
    found = idle(nodes, IDLE_SECONDS)
    memory = [psutil.Process(node.process.pid).memory_full_info() for node in nodes]
    own = median([process.uss / 1e6 for process in memory], "MB")
    together = sum(process.uss for process in memory) / 1e9
    print(f"     memory of its own, each: {own}, {together:.1f} GB together", flush=True)
    print(f"     resident, each: {median([process.rss / 1e6 for process in memory], 'MB')}", flush=True)
    share = median([node.cpu * 100 for node in found], "% of a core")
    total = sum(node.cpu for node in found)
    print(f"     idle CPU, each: {share}, {total:.0%} of a core together", flush=True)
    print(f"     idle, sent by each: {statistics.median(node.sent for node in found):.0f} bytes/s", flush=True)


def main() -> None:
    """Start all but the first at once, wait for agreement, and look at what they cost then."""
    with open_peers() as peers:
        began = time.monotonic()
        peers.start_all(*[()] * NODES)
        up = time.monotonic() - began
        try:
            seconds = until(peers.converged, poll=POLL_SECONDS)
        except TimeoutError:
            seconds = math.inf
        known = sorted(len(node.alive()) for node in peers.nodes)
        cpu = sum(node.cpu_seconds for node in peers.nodes)
        text = f"{seconds:.1f} s after the last was up, which took {up:.0f} s; they list {known[0]} to {known[-1]}"
        wanted = f"within {CONVERGED_SECONDS_MAX:.0f} s"
        report(f"{NODES} nodes agree", text, wanted, reached=seconds <= CONVERGED_SECONDS_MAX)
        print(f"     CPU until then: {cpu / NODES:.1f} s each", flush=True)
        costs(peers.nodes)


if __name__ == "__main__":
    main()
