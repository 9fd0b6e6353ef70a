"""What a node costs that has nothing to do, in clusters of two and of ten: CPU time, and bytes on the wire."""

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from scripts.benchmarks.figures import median, report
from scripts.benchmarks.peers_cluster import PeerNode, fake_model, open_peers

SETTLE_SECONDS = 10.0
IDLE_SECONDS = 30.0
CPU_MAX = 0.02  # of a core
BYTES_PER_SECOND_MAX = 1000.0
PACKET_BYTES = 52  # IPv4 and TCP with timestamps
FRAME_BYTES = 86  # what carries a small frame: that, Noise and yamux
SIZES = (2, 10)


class Idle(Struct):
    """One node over a while: its share of a core, and bytes a second that it sent."""

    cpu: float
    sent: float


def idle(nodes: Sequence[PeerNode], seconds: float) -> list[Idle]:
    """Each node's, over so many seconds in which nobody asks for anything."""
    sent_before, before, began = sent_bytes(nodes), [node.cpu_seconds for node in nodes], time.monotonic()
    time.sleep(seconds)
    after, took = [node.cpu_seconds for node in nodes], time.monotonic() - began
    sent = sent_bytes(nodes)
    return [
        Idle((late - early) / took, (sent[node.process.pid] - sent_before[node.process.pid]) / took)
        for node, early, late in zip(nodes, before, after, strict=True)
    ]


def sent_bytes(nodes: Sequence[PeerNode]) -> dict[int, int]:
    """What each process has sent to others so far, with the headers of IP and TCP.

    The kernel tells it of each open connection (`ss`, on Linux). Where it doesn't, it is what the nodes themselves count.
    """
    pids = {node.process.pid for node in nodes}
    if shutil.which("ss") is None:
        return {node.process.pid: _counted(node) for node in nodes}
    sent = Counter(dict.fromkeys(pids, 0))
    for line in subprocess.check_output(["ss", "-tinHOp", "state", "established"], text=True).splitlines():
        pid = re.search(r"pid=(\d+)", line)
        if pid is not None and int(pid[1]) in pids:
            numbers = dict(re.findall(r"(bytes_sent|segs_out):(\d+)", line))
            sent[int(pid[1])] += int(numbers.get("bytes_sent", 0)) + PACKET_BYTES * int(numbers.get("segs_out", 0))
    return sent


def _counted(node: PeerNode) -> int:
    counters = node.show("dump")["counters"]
    return int(counters["bytes_out"] + FRAME_BYTES * counters["frames_out"])


def measure(count: int) -> None:
    """Print both figures of one size."""
    with open_peers() as peers:
        model = fake_model(peers.directory / "model")
        peers.start_all(("--model", str(model)), *[()] * (count - 1))
        peers.wait_converged(instances=1)
        time.sleep(SETTLE_SECONDS)
        found = idle(peers.nodes, IDLE_SECONDS)
    cpu, sent = [node.cpu for node in found], [node.sent for node in found]
    text = median([share * 100 for share in cpu], "% of a core")
    report(f"CPU of an idle node, one of {count}", text, f"<= {CPU_MAX:.0%} each", reached=max(cpu) <= CPU_MAX)
    reached = max(sent) <= BYTES_PER_SECOND_MAX
    report(f"sent by an idle node, one of {count}", median(sent, "bytes/s"), "<= 1 KB/s each", reached=reached)


def main() -> None:
    """Print all figures."""
    for count in SIZES:
        measure(count)


if __name__ == "__main__":
    main()
