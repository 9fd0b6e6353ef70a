"""A node under measurement: a process of its own on loopback, started and stopped by the benchmark."""

import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

START_SECONDS_MAX = 240.0
STOP_SECONDS_MAX = 40.0


@dataclass(frozen=True)
class NodeProcess:
    """A running node: its process and the address of its API."""

    process: subprocess.Popen[str]
    host: str
    port: int
    started: float  # time.perf_counter() at the launch

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the node process alone, its runner not counted."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def get(self, path: str) -> int:
        """The status of a GET."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()


@contextlib.contextmanager
def running_node(*options: str, wait_ready: bool = True) -> Iterator[NodeProcess]:
    """Start `node start` with these options on a free port and stop it at the end."""
    data_dir = tempfile.mkdtemp(prefix="shoal-bench-")
    command = [sys.executable, "-m", "node", "start", "--data-dir", data_dir, "--api", "127.0.0.1:0"]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--log-level", "warning", *options], stdout=subprocess.PIPE, text=True)
    try:
        node = _up(process, started)
        deadline = time.monotonic() + START_SECONDS_MAX
        while wait_ready and node.get("/readyz") != 200:
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError("the node did not become ready")
            time.sleep(0.02)
        yield node
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        finally:
            process.kill()
            shutil.rmtree(data_dir, ignore_errors=True)


def _up(process: subprocess.Popen[str], started: float) -> NodeProcess:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("api http://127.0.0.1:"):
            return NodeProcess(process, "127.0.0.1", int(line.rsplit(":", 1)[1]), started)
    raise RuntimeError(f"the node ended with status {process.wait()} before it was up")


@dataclass(frozen=True)
class Streamed:
    """One streamed answer: when each content chunk arrived (seconds on the perf counter) and its text."""

    sent: float
    arrivals: tuple[float, ...]
    text: str
    executed_by: str = ""  # node id

    @property
    def first(self) -> float:
        """Seconds from sending the request to the first content."""
        return self.arrivals[0] - self.sent


def stream_chat(
    port: int, body: dict[str, object], arrived: threading.Event | None = None, host: str = "127.0.0.1"
) -> Streamed:
    """Stream one chat completion and note when each piece of content arrives.

    Raises: RuntimeError on any status but 200 and on an error event.
    """
    connection = http.client.HTTPConnection(host, port, timeout=300)
    sent = time.perf_counter()
    arrivals: list[float] = []
    texts: list[str] = []
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read(300)!r}")
        executed_by = response.getheader("x-shoal-executed-by", "")
        for line in response:
            text = _content(line)
            if text is None:
                continue
            arrivals.append(time.perf_counter())
            texts.append(text)
            if arrived is not None:
                arrived.set()
    finally:
        connection.close()
    return Streamed(sent, tuple(arrivals), "".join(texts), executed_by)


def _content(line: bytes) -> str | None:
    if not line.startswith(b"data: {"):
        return None
    chunk = json.loads(line[6:])
    if "error" in chunk:
        raise RuntimeError(f"the stream failed: {chunk['error']['message']}")
    choices = chunk["choices"]
    return (choices[0]["delta"].get("content") or None) if choices else None


def user_message(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def get_json(url: str) -> object:
    """The JSON document at a URL."""
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)
