"""Clients that read nothing, at a node that is not the executor's: what they cost, and what another client notices."""

import contextlib
import json
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import psutil

from scripts.benchmarks.figures import PAIRS_MIN, median, report
from scripts.benchmarks.node_process import stream_chat, user_message
from scripts.benchmarks.peers_cluster import PeerNode, fake_model, open_peers, until

SILENT = 8  # clients
SILENT_SECONDS = 60.0
STEP_SECONDS = 0.002
CONTEXT = 1 << 20
SILENT_TOKENS = 500_000  # of each answer, more than is made meanwhile
RECEIVE_BYTES = 4096  # of the client's socket, so that it is the node that must hold the rest
TOKENS = 1500  # of each answer that is read, 3 s
GROWTH_BYTES_MAX = 32 << 20
RATE_MIN = 0.95


@contextlib.contextmanager
def silent_client(port: int) -> Iterator[None]:
    """Somebody who asks and then reads nothing."""
    body = json.dumps({"messages": user_message("Hello."), "stream": True, "max_tokens": SILENT_TOKENS}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        client.connect(("127.0.0.1", port))
        client.sendall(head % len(body) + body)
        yield


def rate(node: PeerNode) -> float:
    """Tokens a second of a client that reads, from the first to the last."""
    body: dict[str, object] = {"messages": user_message("Hello."), "max_tokens": TOKENS}
    answer = stream_chat(node.port, body)
    return (TOKENS - 1) / (answer.arrivals[-1] - answer.arrivals[0])


def silent_tasks(node: PeerNode) -> dict[str, tuple[int, str]]:
    """Attempt and status of the tasks whose clients read nothing, by id."""
    tasks = node.show("state")["tasks"]
    return {task["task_id"]: (task["attempt"], task["status"]) for task in tasks if task["max_tokens"] == SILENT_TOKENS}


class Memory:
    """Resident memory of some processes: how much more than at first it was at most."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self.first = {name: process.memory_info().rss for name, process in processes.items()}
        self.most = dict(self.first)

    def look(self) -> None:
        """Take it now."""
        for name, process in self._processes.items():
            self.most[name] = max(self.most[name], process.memory_info().rss)

    @property
    def growth(self) -> dict[str, int]:
        """Bytes, by process."""
        return {name: self.most[name] - self.first[name] for name in self.first}

    @property
    def text(self) -> str:
        """From how much to how much."""
        return ", ".join(f"{name} {self.first[name] / 1e6:.1f} to {self.most[name] / 1e6:.1f} MB" for name in self.first)


def while_silent(home: PeerNode, memory: Memory) -> tuple[list[float], dict[str, tuple[int, str]]]:
    """Rates of a client that reads, for as long as the others read nothing; and the tasks of those."""
    until(lambda: len(silent_tasks(home)) == SILENT and all(status == "running" for _, status in silent_tasks(home).values()))
    rates: list[float] = []
    seen: dict[str, tuple[int, str]] = {}
    deadline = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline or len(rates) < PAIRS_MIN:
        rates.append(rate(home))
        memory.look()
        seen.update(silent_tasks(home))
    return rates, seen


def main() -> None:
    """Print memory, attempts, and the rates of the other client before and meanwhile."""
    with open_peers("--context", str(CONTEXT)) as peers:
        model = fake_model(peers.directory / "model", context=CONTEXT, step_seconds=STEP_SECONDS)
        head, home = peers.start("--model", str(model)), peers.start()
        peers.wait_converged(instances=1)
        rate(home)
        before = [rate(home) for _ in range(PAIRS_MIN)]
        processes = {"home": psutil.Process(home.process.pid), "head": psutil.Process(head.process.pid)}
        memory = Memory({**processes, "runner": head.runners()[0]})
        with contextlib.ExitStack() as stack:
            for _ in range(SILENT):
                stack.enter_context(silent_client(home.port))
            meanwhile, tasks = while_silent(home, memory)
    who = f"{SILENT} clients that read nothing for {SILENT_SECONDS:.0f} s"
    most = max(memory.growth.values())
    report(
        f"memory with {who}", memory.text, f"each at most {GROWTH_BYTES_MAX >> 20} MiB more", reached=most <= GROWTH_BYTES_MAX
    )
    attempts = [attempt for attempt, _ in tasks.values()]
    ends = ", ".join(f"{count} {status}" for status, count in Counter(status for _, status in tasks.values()).items())
    once = len(tasks) == SILENT and set(attempts) == {1}
    report(
        "attempts of their tasks", f"{len(tasks)} tasks, attempts {sorted(set(attempts))}; at last {ends}", "1", reached=once
    )
    value = statistics.median(meanwhile) / statistics.median(before)
    text = f"{value:.3f}: {median(meanwhile, 'tokens/s')}, before {median(before, 'tokens/s')}"
    report("rate of another client meanwhile / before", text, f">= {RATE_MIN}", reached=value >= RATE_MIN)


if __name__ == "__main__":
    main()
