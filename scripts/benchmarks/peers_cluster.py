"""Several nodes under measurement: processes of one cluster on loopback, and what each of them shows."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from p2p.cluster_key import new_key
from scripts.benchmarks.node_process import START_SECONDS_MAX, STOP_SECONDS_MAX, get_json

POLL_SECONDS = 0.05
WAIT_SECONDS_MAX = 120.0
RUNNER_MODULE = "inference.runner"


def fake_model(directory: Path, *, context: int = 8192, **settings: object) -> Path:
    """A model of the fake engine whose answers end at max_tokens only; `settings` are those of its `FakeSettings`."""
    directory.mkdir(parents=True)
    fake = {"stop_one_in": 0, **settings}
    config = {"model_type": "fake", "max_position_embeddings": context, "fake": fake}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@dataclass(frozen=True, eq=False)
class PeerNode:
    """A running node."""

    process: subprocess.Popen[str]
    node_id: str
    port: int  # of its API
    address: str  # by which it can be joined

    def show(self, what: str) -> Any:  # noqa: ANN401 - a JSON document
        """Its /cluster/state or /cluster/dump, or what lies beside these."""
        return get_json(f"http://127.0.0.1:{self.port}/cluster/{what}")

    def alive(self) -> set[str]:
        """Whom it takes for alive."""
        return {node["node_id"] for node in self.show("state")["nodes"] if node["status"] == "alive"}

    @property
    def ready_instances(self) -> int:
        """How many instances it knows that can be asked for something."""
        return sum(instance["status"] == "ready" for instance in self.show("state")["instances"])

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the node process, its runner not counted."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the node process so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def runners(self) -> list[psutil.Process]:
        """Its runner processes."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if RUNNER_MODULE in child.cmdline()]


class Peers:
    """The nodes of one cluster; all join the first that was started and runs."""

    def __init__(self, directory: Path, options: tuple[str, ...]) -> None:
        self.directory = directory
        self.nodes: list[PeerNode] = []
        key_file = directory / "cluster.key"
        key_file.write_text(new_key())
        self._common = ["--cluster-key-file", str(key_file), "--log-level", "error", "--drain-timeout", "1", *options]
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *options: str) -> PeerNode:
        """One more, once it is up; without `--model` among the options it runs none."""
        return self.start_all(options)[0]

    def start_all(self, *options_of_each: tuple[str, ...]) -> list[PeerNode]:
        """Several at once, once all are up."""
        if not self.nodes and len(options_of_each) > 1:
            return [self.start(*options_of_each[0]), *self.start_all(*options_of_each[1:])]
        launched = [self._launch(options) for options in options_of_each]
        started = [_up(process) for process in launched]
        self.nodes += started
        return started

    def _launch(self, options: tuple[str, ...]) -> subprocess.Popen[str]:
        joins = ["--join", self.nodes[0].address] if self.nodes else []
        model = [] if "--model" in options else ["--model", "none"]
        number = len(self._processes) + 1
        where = ["--data-dir", str(self.directory / f"n{number}"), "--name", f"n{number}"]
        where += ["--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--no-discovery"]
        command = [sys.executable, "-m", "node", "start", *where, *self._common, *joins, *model, *options]
        # A group of its own: Ctrl-C comes to the benchmark alone, which stops them in order.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
        self._processes.append(process)
        return process

    def kill(self, node: PeerNode) -> float:
        """Kill one; returns when (`time.monotonic`)."""
        self.nodes.remove(node)
        moment = time.monotonic()
        node.process.kill()
        node.process.wait()
        return moment

    def converged(self) -> bool:
        """Whether all know all and hold the same. The first that doesn't ends the look: it costs those CPU who are asked."""
        ids = {node.node_id for node in self.nodes}
        digests = set()
        for node in self.nodes:
            state = node.show("state")
            digests.add(state["digest"])
            alive = {member["node_id"] for member in state["nodes"] if member["status"] == "alive"}
            if alive != ids or len(digests) > 1:
                return False
        return True

    def wait_converged(self, instances: int = 0) -> None:
        """Until that is so, and all know so many ready instances."""
        until(lambda: self.converged() and all(node.ready_instances >= instances for node in self.nodes))

    def stop(self) -> None:
        """End all of them: told to, and killed where they don't, or where this is interrupted."""
        deadline = time.monotonic() + STOP_SECONDS_MAX
        try:
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for process in self._processes:
                process.kill()  # nothing where it has ended
            for process in self._processes:
                process.wait()


@contextlib.contextmanager
def open_peers(*options: str) -> Iterator[Peers]:
    """A cluster with no node yet, whose nodes all get these options; they are gone at the end, however that comes about."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-", ignore_cleanup_errors=True) as name:
            peers = Peers(Path(name), options)
            try:
                yield peers
            finally:
                peers.stop()
    finally:
        signal.signal(signal.SIGTERM, former)


def _up(process: subprocess.Popen[str]) -> PeerNode:
    """A node once it has said where it is."""
    assert process.stdout is not None
    words: dict[str, str] = {}
    deadline = threading.Timer(START_SECONDS_MAX, process.kill)
    deadline.start()
    try:
        for line in process.stdout:
            word, _, rest = line.strip().partition(" ")
            words[word] = rest
            if words.keys() >= {"node", "api", "p2p"}:
                threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
                return PeerNode(process, words["node"].split()[0], int(words["api"].rpartition(":")[2]), words["p2p"])
    finally:
        deadline.cancel()
    raise RuntimeError(f"the node ended with status {process.wait()} before it was up")


def _drain(output: IO[str]) -> None:
    for _ in output:
        pass


def until(condition: Callable[[], object], seconds: float = WAIT_SECONDS_MAX, poll: float = POLL_SECONDS) -> float:
    """Wait until something can be seen from outside; returns the seconds that it took. Raises: TimeoutError."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"it did not come about in {seconds:g} s")
        time.sleep(poll)
    return time.monotonic() - began
