"""`node status` and `node dump` against an API that says what a test wants."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from node import cli_cluster
from node.cli import main
from node.data_dir import NodeFile, write_node_file
from node.documents import StateDocument, StateEvent
from node.dump_document import DumpDocument, dump_document
from node.dump_stream import DUMP, DumpTeller
from node.records import PROFILE, VERDICT, Profile, Terminal, Verdict
from node.state_document import state_document
from p2p.cluster_key import cluster, new_key
from tests.node.cluster_replica import DESK, NAS, ClusterReplica, about, home
from tests.p2p.transport_lab import open_lab

KEY = "sk-1"


class NodeApi(ThreadingHTTPServer):
    """Answers with bytes by path, to whoever has the key. A list is answered one by one, its last again and again."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers: dict[str, list[bytes]] = {}

    def show(self, *clusters: ClusterReplica) -> "NodeApi":
        """Have the state and the dump of a replica, or of several one after the other."""
        self.answers["/cluster/state"] = [msgspec.json.encode(state_document(c.view(), about())) for c in clusters]
        self.answers["/cluster/dump"] = [msgspec.json.encode(dump_document(c.dump())) for c in clusters]
        return self


class _Answer(BaseHTTPRequestHandler):
    server: NodeApi

    def do_GET(self) -> None:
        answers = self.server.answers.get(self.path)
        if self.headers["Authorization"] != f"Bearer {KEY}":
            status, body = 401, b'{"error": {"message": "An API key is required."}}'
        elif answers is None:
            status, body = 404, b'{"error": {"message": "There is nothing here."}}'
        else:
            status, body = 200, answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's own name
        """Nothing on stderr."""


@pytest.fixture
def apis() -> Iterator[list[NodeApi]]:
    made = [NodeApi(), NodeApi()]
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in made]
    for thread in threads:
        thread.start()
    yield made
    for server, thread in zip(made, threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def data_dir(tmp_path: Path, apis: list[NodeApi]) -> Path:
    """The data directory of a node that runs: this process."""
    (tmp_path / "config.toml").write_text(f'api-key = "{KEY}"\n')
    write_node_file(tmp_path, NodeFile(os.getpid(), DESK, apis[0].url, []))
    return tmp_path


class Shell:
    """Runs commands on a data directory."""

    def __init__(self, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._data_dir = data_dir
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        status = main([*arguments, "--data-dir", str(self._data_dir)])
        done = self._capsys.readouterr()
        return status, done.out, done.err

    def document(self, *arguments: str) -> Any:  # noqa: ANN401 - of any type
        status, out, err = self(*arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)


@pytest.fixture
def shell(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(data_dir, capsys)


def test_status_in_tables_and_as_the_document_itself(shell: Shell, apis: list[NodeApi]) -> None:
    apis[0].show(home())
    status, out, err = shell("status")
    document = shell.document("status")

    assert (status, err) == (0, "")
    for text in ("desk (this one)", "laptop", "draining", "smollm2:135m", "ready", "M2 Pro"):
        assert text in out
    assert out.splitlines()[-1] == f"in flight: 1, digest {document['digest']}"
    assert msgspec.convert(document, StateDocument) == state_document(home().view(), about())


def test_what_others_call_themselves_commands_no_terminal(shell: Shell, apis: list[NodeApi]) -> None:
    replica = home()
    replica.write(NAS, PROFILE, 0, Profile(NAS, "\x1b[2J\nna[bold]s\x9b"))
    apis[0].show(replica)
    shown = shell("status")[1] + shell("dump")[1]

    assert "�[2J�na[bold]s�" in shown
    assert not set(shown) & {chr(code) for code in (*range(32), *range(127, 160)) if chr(code) != "\n"}


def test_another_node_may_be_asked(shell: Shell, apis: list[NodeApi]) -> None:
    replica = home()
    replica.write(DESK, PROFILE, 0, Profile(DESK, "elsewhere"))
    apis[1].show(replica)

    assert "elsewhere (this one)" in shell("status", "--api", apis[1].url)[1]


@pytest.mark.parametrize("command", ["status", "dump"])
def test_without_a_node_there_is_one_sentence(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = Shell(tmp_path / "empty", capsys)(command)

    assert (status, out) == (1, "")
    assert err == f"node: no node runs on {tmp_path / 'empty'}: start one with `node start`, or name one with --api URL\n"


def test_a_wrong_key_and_a_node_that_is_none(shell: Shell, apis: list[NodeApi]) -> None:
    apis[0].answers["/cluster/state"] = [b"[]"]
    refused = shell("status", "--api-key", "other")
    odd = shell("status")
    missing = shell("dump")
    apis[0].answers["/cluster/state"] = [b'{"node_id": 7}']
    strange = shell("status", "--json")[0], shell("status")

    assert (refused[0], refused[2]) == (1, "node: An API key is required: give --api-key KEY\n")
    assert (odd[0], odd[2]) == (
        1, f"node: {apis[0].url} answered with something else than was asked for: is it a node of this version?\n",
    )  # fmt: skip
    assert (missing[0], missing[2]) == (1, "node: There is nothing here.\n")
    assert (strange[0], strange[1][0]) == (1, 1)


def test_dump_in_tables_and_as_a_document(shell: Shell, apis: list[NodeApi]) -> None:
    apis[0].show(home())
    status, out, _ = shell("dump")

    assert status == 0
    assert "verdict/2" in out
    assert out.splitlines()[-1] == f"digest {home().replica.root.hex()}"
    assert msgspec.convert(shell.document("dump"), DumpDocument) == dump_document(home().dump())


def later() -> ClusterReplica:
    replica = home()
    replica.write(DESK, VERDICT, 1, Verdict(Terminal.COMPLETE))
    return replica


def test_equal_replicas(shell: Shell, apis: list[NodeApi]) -> None:
    for api in apis:
        api.show(home())
    status, out, err = shell("dump", "--diff", apis[1].url)
    document = shell.document("dump", "--diff", apis[1].url)

    assert (status, err) == (0, "")
    assert out == f"no difference, digest {home().replica.root.hex()}\n"
    assert (document["equal"], document["differences"]) == (True, [])


def test_a_change_on_its_way_is_no_difference(shell: Shell, apis: list[NodeApi], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_cluster, "LOOKS_APART_SECONDS", 0.0)
    apis[0].show(later())
    apis[1].show(home(), later())

    assert shell("dump", "--diff", apis[1].url)[0] == 0


def test_what_stays_different_is_named(shell: Shell, apis: list[NodeApi], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_cluster, "LOOKS_APART_SECONDS", 0.0)
    apis[0].show(later())
    apis[1].show(home())
    status, out, err = shell("dump", "--diff", apis[1].url)
    as_json = shell("dump", "--json", "--diff", apis[1].url)

    assert status == 1
    assert "verdict/1" in out
    assert "version" in out
    assert err == f"node: the replicas of {apis[0].url} and {apis[1].url} differ: 2 differences\n"
    assert as_json[0] == 1
    document = json.loads(as_json[1])
    assert document["equal"] is False
    assert [(found["what"], found["behind"]) for found in document["differences"]] == [
        ("records", "theirs"),
        ("verdict/1", "theirs"),
    ]


def events(*made: StateEvent) -> bytes:
    parts = [b"event: change\nid: 1\ndata: " + msgspec.json.encode(event) + b"\n\n" for event in made]
    return b": still here\n\n".join(parts)


def test_watching(shell: Shell, apis: list[NodeApi]) -> None:
    state = state_document(home().view(), about())
    apis[0].answers["/cluster/events"] = [
        events(StateEvent(revision=1, digest=state.digest, state=state), StateEvent(revision=2, digest="x", tasks=state.tasks))
    ]
    status, out, err = shell("dump", "--watch")
    raw = shell("dump", "--watch", "--json")[1].splitlines()

    assert status == 1, "the stream has ended, which it never should"
    assert err == f"node: the events from {apis[0].url} broke off\n"
    lines = [line[9:] for line in out.splitlines()]
    assert lines[0] == f"3 nodes, 2 instances, 3 tasks, digest {state.digest}"
    assert lines[-1].endswith("at laptop: failed (the runner ended with signal 9)")
    assert [json.loads(line)["revision"] for line in raw] == [1, 2]


def test_a_node_that_stops_ends_the_watch_with_its_reason(shell: Shell, apis: list[NodeApi]) -> None:
    apis[0].answers["/cluster/events"] = [b'event: error\ndata: {"error": {"message": "This node is stopping."}}\n\n']

    assert shell("dump", "--watch") == (1, "", "node: This node is stopping.\n")


def test_ways_to_look_exclude_each_other(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        shell("dump", "--watch", "--diff", "http://127.0.0.1:1")

    assert exit_.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


async def test_a_peer_is_asked_over_the_network_with_the_key_that_is_configured(tmp_path: Path) -> None:
    key = new_key()
    (tmp_path / "config.toml").write_text(f'cluster = "house"\ncluster-key = "{key}"\n')
    dump = home().dump()
    async with open_lab("libp2p") as lab, lab.node(cluster=cluster("house", key)) as told:
        told.serve(DUMP, DumpTeller(lambda: dump).serve)
        command = [sys.executable, "-m", "node", "dump", "--json", "--data-dir", str(tmp_path), "--peer", told.addresses[0]]
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)

    assert (done.returncode, done.stderr) == (0, b"")
    assert msgspec.json.decode(done.stdout, type=DumpDocument) == dump_document(dump)
    assert os.listdir(tmp_path) == ["config.toml"], "no identity of its own is left behind"


def test_a_peer_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "node", "dump", "--peer", "/ip4/127.0.0.1/tcp/9", "--data-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "node: /ip4/127.0.0.1/tcp/9 can't be reached: connection refused\n"


HEAVY = {"aiohttp", "asyncio", "cryptography", "libp2p", "mlx", "numpy", "transformers"}


@pytest.mark.parametrize("arguments", [["status"], ["dump"], ["status", "--json"]])
def test_they_start_at_once(arguments: list[str], data_dir: Path, apis: list[NodeApi]) -> None:
    apis[0].show(home())
    program = f"import sys, node.cli\nnode.cli.main({[*arguments, '--data-dir', str(data_dir)]!r})\n"
    program += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout
    heavy = HEAVY if "--json" not in arguments else HEAVY | {"rich", "trio", "structlog"}
    assert set(done.stderr.split()) & heavy == set()
