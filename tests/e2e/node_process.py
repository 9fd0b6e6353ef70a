"""Real nodes for tests: started as their users start them, watched from outside."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

NODE = str(Path(sys.executable).with_name("node"))
SECONDS_MAX = 60.0  # no test waits longer for anything


class NodeProcess:
    """`node start` with directories of its own; `lines` of stdout and `log` of stderr grow as it speaks."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        environ: Mapping[str, str] | None = None,
        command: str = NODE,
        inside: Sequence[str] = (),
    ) -> None:
        """`inside`: a command that runs another one, in a network namespace say."""
        self.directory = directory
        self.data_dir = directory / "data"
        (directory / "tmp").mkdir(parents=True, exist_ok=True)
        defaults = {"--data-dir": self.data_dir, "--models-dir": directory / "models", "--api": "127.0.0.1:0"}
        arguments = [str(part) for item in defaults.items() if item[0] not in options for part in item]
        self.process = subprocess.Popen(
            [*inside, command, "start", *arguments, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(directory) | dict(environ or {}),
            start_new_session=True,
        )
        self.pid = self.process.pid
        self.lines: list[str] = []
        self.log: list[str] = []
        self._heard = threading.Condition()
        self._silent = 0
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.lines), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.log), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: Iterator[str], lines: list[str]) -> None:
        for line in pipe:
            with self._heard:
                lines.append(line.rstrip("\n"))
                self._heard.notify_all()
        with self._heard:
            self._silent += 1
            self._heard.notify_all()

    def wait_for(self, text: str, *, log: bool = True, seconds: float = SECONDS_MAX) -> str:
        """The first line with this text, in the log or on stdout."""
        lines = self.log if log else self.lines
        with self._heard:
            found = self._heard.wait_for(
                lambda: next((line for line in lines if text in line), None) or self._silent == 2, seconds
            )
        assert isinstance(found, str), f"{text!r} was not said; stderr: {self.log}"
        return found

    @property
    def url(self) -> str:
        """The first URL of its API, once it is up."""
        return self.wait_for("api ", log=False).split()[1]

    @property
    def node_json(self) -> Path:
        return self.data_dir / "node.json"

    def runners(self) -> list[psutil.Process]:
        """Its runner processes; one that was born this moment has no command line yet."""
        return [child for child in psutil.Process(self.pid).children() if "inference.fetch" not in child.cmdline()]

    def request(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a response."""
        with self.open(method, path, body) as response:
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()

    @contextlib.contextmanager
    def open(self, method: str, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
        """A response whose body is still to be read."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=SECONDS_MAX)
        try:
            connection.request(method, path, None if body is None else json.dumps(body).encode())
            yield connection.getresponse()
        finally:
            connection.close()

    def chat(self, text: str = "hi", **parameters: object) -> tuple[int, dict[str, Any]]:
        """Status and document of a whole completion; waits for the model."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **parameters}
        status, _, data = self.request("POST", "/v1/chat/completions", body)
        return status, json.loads(data)

    @contextlib.contextmanager
    def stream(self, text: str = "hi", **parameters: object) -> Iterator[Iterator[dict[str, Any] | None]]:
        """The events of a streamed completion; None is [DONE]."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "stream": True, **parameters}
        with self.open("POST", "/v1/chat/completions", body) as response:
            assert response.status == 200, response.read()
            yield sse(response)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the node alone."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit status, with all that it said read."""
        status = self.process.wait(SECONDS_MAX)
        for reader in self._readers:
            reader.join(SECONDS_MAX)
        return status

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def destroy(self) -> None:
        """Leave nothing of it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for reader, pipe in zip(self._readers, (self.process.stdout, self.process.stderr), strict=True):
            reader.join(SECONDS_MAX)
            assert pipe is not None
            pipe.close()
        for process in left_running(self.directory):
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def node(directory: Path, *options: str, environ: Mapping[str, str] | None = None) -> Iterator[NodeProcess]:
    """A node that is gone after the block."""
    process = NodeProcess(directory, *options, environ=environ)
    try:
        yield process
    finally:
        process.destroy()


def clean_environment(directory: Path) -> dict[str, str]:
    """An environment with nothing of shoal in it, by whose TMPDIR all processes of one test are known."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "HF_"))}
    return kept | {"TMPDIR": str(directory / "tmp"), "HF_HOME": str(directory / "hf"), "PYTHONWARNINGS": "default"}


def left_running(directory: Path) -> list[psutil.Process]:
    """The processes that a node of this directory has left behind, those that are about to end not counted."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR", "").startswith(str(directory)):
                found.append(process)
    _, alive = psutil.wait_procs(found, timeout=10)
    return alive


def sse(response: http.client.HTTPResponse) -> Iterator[dict[str, Any] | None]:
    """The data of a stream's events."""
    for line in response:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            yield None if data == b"[DONE]" else json.loads(data)


def text_of(events: list[dict[str, Any] | None]) -> str:
    """The whole text of a stream."""
    choices = [choice for event in events if event for choice in event.get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
