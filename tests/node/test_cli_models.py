"""`node pull` and `node models`: what they print, how they end, and the progress in between."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from inference.model_entries import ModelsDir
from inference.model_store import source_of
from inference.models import Progress
from node.cli_models import EXIT_DONE, EXIT_INTERRUPTED, models, pull, served_hashes
from node.errors import CommandError
from node.pull_progress import PullProgress
from tests.inference.tiny_models import make_fake, make_tiny


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


def test_pull_tells_what_came_and_json_nothing_else(
    models_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = make_tiny(tmp_path / "tiny", quantize=4)
    assert pull(str(tiny), models_dir, as_json=False) == EXIT_DONE
    human = capsys.readouterr()
    assert pull(str(tiny), models_dir, as_json=True) == EXIT_DONE
    document = json.loads(capsys.readouterr().out)

    assert (
        human.out == f"tiny is here: 4-bit, {_size(tiny)}, up to 2048 tokens, hash {document['model_hash'][:12]}, in {tiny}\n"
    )
    assert human.err.startswith(f"{tiny}: hashing")
    assert (document["name"], document["path"], document["layers"]) == ("tiny", str(tiny), 2)


def _size(tiny: Path) -> str:
    return f"{(tiny / 'model.safetensors').stat().st_size / 1000:.1f} kB"


def test_pull_fails_with_one_sentence(models_dir: Path) -> None:
    with pytest.raises(CommandError) as caught:
        pull("smollm2", models_dir, as_json=False)

    assert "did you mean smollm2:135m?" in str(caught.value)


PULL = """
import sys
from pathlib import Path
from node.cli_models import pull
sys.exit(pull(sys.argv[1], Path(sys.argv[2]), as_json=False))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_pull_ends_at_once_and_leaves_no_process(
    number: signal.Signals, models_dir: Path, tmp_path: Path
) -> None:
    fake = make_fake(tmp_path / "fake")
    layout = ModelsDir(models_dir)
    layout.make()
    with layout.lock(source_of(str(fake)), lambda: None):
        pulling = subprocess.Popen([sys.executable, "-c", PULL, str(fake), str(models_dir)], stderr=subprocess.PIPE, text=True)
        assert pulling.stderr is not None
        with pulling.stderr as stderr:
            assert stderr.readline() == f"{fake}: waiting, another process is fetching it\n"
            (fetching,) = psutil.Process(pulling.pid).children()
            pulling.send_signal(number)
            assert stderr.read() == f"node: {fake} was not fetched to its end; `node pull {fake}` goes on with it\n"
        assert pulling.wait() == EXIT_INTERRUPTED
    assert not fetching.is_running()


def test_models_are_listed_one_row_each(models_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_tiny(tmp_path / "a/tiny"), make_tiny(tmp_path / "b/tiny", seed=1)
    for path in (first, second):
        pull(str(path), models_dir, as_json=False)
    capsys.readouterr()
    os.utime(second / "config.json", (1, 1))

    assert models(models_dir, None, as_json=True) == EXIT_DONE
    listed = json.loads(capsys.readouterr().out)["models"]
    assert [(entry["name"], entry["source"], entry["loaded"]) for entry in listed] == [
        ("tiny", str(first), None),
        ("tiny", str(second), None),
    ]
    assert listed[0]["model_hash"] != listed[1]["model_hash"]
    assert (listed[0]["problem"], listed[1]["problem"]) == (None, "config.json has changed")

    assert models(models_dir, None, as_json=False) == EXIT_DONE
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("tiny")]
    assert [row[:2] for row in rows] == [["tiny", entry["model_hash"][:12]] for entry in listed]
    assert rows[0][-2:] == ["on", "disk"]


def test_without_models_a_person_is_told_what_to_do(models_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models(models_dir, None, as_json=False) == EXIT_DONE
    assert capsys.readouterr().out == "No models here yet: `node pull smollm2:135m` fetches a small one.\n"
    assert models(models_dir, None, as_json=True) == EXIT_DONE
    assert json.loads(capsys.readouterr().out) == {"models": []}


class NodeApi(HTTPServer):
    """A node's list of models, for those who have the key."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.hashes = ["a" * 64]


class _Answer(BaseHTTPRequestHandler):
    server: NodeApi

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer key" and self.path == "/v1/models"
        body = json.dumps({"data": [{"model_hash": one} for one in self.server.hashes]} if known else {"error": {}}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's own name
        """Nothing on stderr."""


@pytest.fixture
def api() -> Iterator[NodeApi]:
    with NodeApi() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_what_a_node_serves_is_asked_of_it(api: NodeApi) -> None:
    assert served_hashes(api.url, "key") == frozenset({"a" * 64})
    assert served_hashes(api.url, None) is None
    assert served_hashes("http://127.0.0.1:9", "key") is None


def test_a_loaded_model_is_shown_as_such(
    api: NodeApi, models_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        pull(str(make_fake(tmp_path / name, pace=name)), models_dir, as_json=False)
    api.hashes = [ModelsDir(models_dir).entries()[1].records[0].model.model_hash]
    capsys.readouterr()
    models(models_dir, api.url, as_json=True, api_key="key")
    listed = json.loads(capsys.readouterr().out)["models"]
    models(models_dir, api.url, as_json=False, api_key="key")
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith(("one", "two"))]

    assert [entry["loaded"] for entry in listed] == [False, True]
    assert [row[-1] for row in rows] == ["disk", "loaded"]


def test_without_a_terminal_there_is_a_line_a_stage_and_one_every_few_seconds() -> None:
    stream, clock = io.StringIO(), {"now": 100.0}
    with PullProgress("m", stream, lambda: clock["now"]) as progress:
        for clock["now"], done in ((100.0, 0), (101.0, 10), (104.9, 2_000_000), (105.0, 3_000_000), (106.0, 4_000_000)):
            progress.update(Progress("fetching", done, 5_000_000))
        progress.update(Progress("hashing", 1, None))
        progress.update(Progress("fetching", note="again"))

    assert stream.getvalue().splitlines() == [
        "m: fetching, 0 bytes of 5.0 MB",
        "m: fetching, 3.0 MB of 5.0 MB",
        "m: hashing, 1 byte",
        "m: fetching, again",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with PullProgress("m", stream) as progress:
        progress.update(Progress("fetching", 1_000_000, 2_000_000))
        progress.update(Progress("converting", 1, 2))

    assert "m: converting" in stream.getvalue()
    assert "━" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")
