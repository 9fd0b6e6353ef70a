"""`scripts/local_cluster N`: N nodes of one cluster on loopback, until Ctrl-C. Further options go to each `node start`.

The first node runs the model, the others take requests and route them; with `--model` among the options all of them run that.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO

from p2p.cluster_key import new_key

NODES_MAX = 100
START_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 45.0


class LocalNode:
    """One node's process."""

    def __init__(self, number: int, directory: Path, options: list[str]) -> None:
        self.number = number
        self.lines: dict[str, str] = {}
        self.up = threading.Event()
        command = [
            sys.executable,
            "-m",
            "node",
            "start",
            "--data-dir",
            str(directory / str(number)),
            "--name",
            f"node-{number}",
        ]
        command += ["--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--no-discovery", *options]
        # A group of its own: Ctrl-C comes to this script alone, which passes it on.
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
        assert self.process.stdout is not None
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            word, _, rest = line.strip().partition(" ")
            self.lines.setdefault(word, rest)
            if word == "p2p":
                self.up.set()
        self.up.set()  # it has ended

    def wait_up(self) -> None:
        """Until it has said that it is up. Raises: SystemExit where it ends before, or takes too long."""
        if not self.up.wait(START_SECONDS_MAX) or "p2p" not in self.lines:
            sys.exit(f"node {self.number} did not start")


def run(count: int, options: list[str]) -> None:
    """Start all, tell where they are, and wait for Ctrl-C, SIGTERM, or the end of one of them."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    own_model = any(option == "--model" or option.startswith("--model=") for option in options)
    nodes: list[LocalNode] = []
    with tempfile.TemporaryDirectory(prefix="shoal-cluster-") as temporary, contextlib.suppress(KeyboardInterrupt):
        key_file = Path(temporary) / "cluster.key"
        key_file.write_text(new_key())
        shared = ["--cluster-key-file", str(key_file), *options]
        try:
            for number in range(1, count + 1):
                joins = ["--join", nodes[0].lines["p2p"]] if nodes else []
                model = [] if own_model or not nodes else ["--model", "none"]
                nodes.append(LocalNode(number, Path(temporary), [*shared, *joins, *model]))
                if number == 1:
                    nodes[0].wait_up()
            for node in nodes:
                node.wait_up()
                print(f"node-{node.number}  api {node.lines.get('api', 'none')}  p2p {node.lines['p2p']}", flush=True)
            print("Ctrl-C stops them.", flush=True)
            for node in nodes:
                node.process.wait()
        finally:
            stop(nodes)


def stop(nodes: list[LocalNode]) -> None:
    """End all of them, in an orderly way where they let that happen."""
    for node in nodes:
        with contextlib.suppress(ProcessLookupError):
            node.process.send_signal(signal.SIGTERM)
    for node in nodes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.process.wait(STOP_SECONDS_MAX)
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait()


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="scripts/local_cluster", description="Run N nodes of one cluster on this machine.")
    parser.add_argument("count", type=int, metavar="N", help=f"how many nodes, 1 to {NODES_MAX}")
    arguments, options = parser.parse_known_args()
    if not 1 <= arguments.count <= NODES_MAX:
        parser.error(f"N is 1 to {NODES_MAX}")
    run(arguments.count, options)


if __name__ == "__main__":
    main()
