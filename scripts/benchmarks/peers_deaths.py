"""How soon all others know of a killed node's death; and beside it kinship, a SWIM library in Rust, at its defaults."""

import base64
import contextlib
import json
import os
import random
import subprocess
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from scripts.benchmarks import peers_kinship
from scripts.benchmarks.figures import p99, report
from scripts.benchmarks.peers_cluster import PeerNode, Peers, open_peers, until
from scripts.benchmarks.peers_events import Watch

NODES = 10
KILLS = 12  # seen by nine each
SETTLED_SECONDS = (1.0, 2.0)  # between the moment that all know all, and the next kill
SEEN_SECONDS_MAX = 60.0
P99_MILLISECONDS = 1500.0
KINSHIP = "kinship==0.4.0"
INSTALL_SECONDS_MAX = 120.0


class Sightings:
    """When who first knew of whose death."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[str, dict[str, float]] = {}

    def see(self, dead: str, witness: str, moment: float) -> None:
        """One knows of one."""
        with self._lock:
            self._first.setdefault(dead, {}).setdefault(witness, moment)

    def hear(self, node: PeerNode, moment: float, event: dict[str, Any]) -> None:
        """An event of a node's stream."""
        for member in event.get("state", event).get("nodes", ()):
            if member["status"] == "dead":
                self.see(member["node_id"], node.node_id, moment)

    def of(self, dead: str) -> dict[str, float]:
        """Moments by witness."""
        with self._lock:
            return dict(self._first.get(dead, {}))

    def milliseconds(self, dead: str, killed: float) -> list[float]:
        """How many milliseconds it took each of the nine, once all know; it is an error if one doesn't in time."""
        until(lambda: len(self.of(dead)) == NODES - 1, SEEN_SECONDS_MAX, poll=0.02)
        return [(moment - killed) * 1e3 for moment in self.of(dead).values()]


def shoal() -> list[float]:
    """Milliseconds until each other node shows a killed node as dead in its stream of events."""
    took: list[float] = []
    sightings = Sightings()
    chance = random.Random(1)
    with open_peers() as peers:
        peers.start_all(*[()] * NODES)
        peers.wait_converged()
        watches = {node: Watch(node, partial(sightings.hear, node)) for node in peers.nodes}
        for number in range(KILLS):
            time.sleep(chance.uniform(*SETTLED_SECONDS))
            victim = chance.choice(peers.nodes)
            took += sightings.milliseconds(victim.node_id, peers.kill(victim))
            watches.pop(victim).close()
            if number < KILLS - 1:
                replace(peers, sightings, watches)
    return took


def replace(peers: Peers, sightings: Sightings, watches: dict[PeerNode, Watch]) -> None:
    """A new node for one that was killed, once all know all again."""
    node = peers.start()
    peers.wait_converged()
    watches[node] = Watch(node, partial(sightings.hear, node))


class Member:
    """A process of kinship."""

    def __init__(self, python: Path, name: str, key: str, seeds: list[str], sightings: Sightings) -> None:
        self.name = name
        self.address = ""
        self.members = 0
        command = [str(python), peers_kinship.__file__, name, key, *seeds]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        threading.Thread(target=self._read, args=(self.process.stdout, sightings), daemon=True).start()

    def _read(self, output: IO[str], sightings: Sightings) -> None:
        for line in output:
            event, *rest = json.loads(line)
            self.members = rest[-1]
            if event == "up":
                self.address = rest[0]
            elif event == "MemberDead":
                sightings.see(rest[0], self.name, rest[1])

    def kill(self) -> float:
        """End it; returns when."""
        moment = time.monotonic()
        self.process.kill()
        self.process.wait()
        return moment


def kinship(python: Path) -> list[float]:
    """Milliseconds until each other member reports a killed one as dead."""
    took: list[float] = []
    sightings = Sightings()
    chance = random.Random(1)
    key = base64.b64encode(os.urandom(32)).decode()
    members: list[Member] = []
    try:
        for number in range(NODES + KILLS - 1):
            seeds = [member.address for member in members]
            members.append(Member(python, f"m{number}", key, seeds, sightings))
            until(lambda: members[-1].address)
            if len(members) == NODES:
                until(lambda: all(member.members == NODES for member in members))
                time.sleep(chance.uniform(*SETTLED_SECONDS))
                victim = members.pop(chance.randrange(NODES))
                took += sightings.milliseconds(victim.name, victim.kill())
    finally:
        for member in members:
            member.kill()
    return took


@contextlib.contextmanager
def with_kinship() -> Iterator[Path | str]:
    """The interpreter of a temporary environment that has it, or one line why there is none."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        venv.create(name, with_pip=True)
        python = Path(name) / "bin" / "python"
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--only-binary",
            ":all:",
            "--disable-pip-version-check",
            KINSHIP,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False)
        except subprocess.TimeoutExpired:
            yield f"pip took longer than {INSTALL_SECONDS_MAX:.0f} s"
            return
        yield python if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def main() -> None:
    """Print both."""
    value, text = p99(shoal(), "ms")
    wanted = f"<= {P99_MILLISECONDS:.0f} ms p99"
    report(f"kill -9 of one of {NODES} nodes, known to the others", text, wanted, reached=value <= P99_MILLISECONDS)
    with with_kinship() as python:
        if isinstance(python, str):
            print(f"     {KINSHIP} is not to be had here: {python}", flush=True)
        else:
            print(
                f"     {KINSHIP} at its defaults, {NODES} members on the same machine: {p99(kinship(python), 'ms')[1]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
