"""One node per data directory, found by its node.json."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.data_dir import DataDirError, NodeFile, locked_data_dir, running_node, write_node_file

HOLD = """
import sys, pathlib
from node.data_dir import locked_data_dir
with locked_data_dir(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def note(pid: int) -> NodeFile:
    return NodeFile(pid=pid, node_id="12D3KooW", api="http://127.0.0.1:52416", p2p=[])


def test_it_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"

    with locked_data_dir(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_second_node_is_refused_by_name_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        with pytest.raises(DataDirError, match=rf"{tmp_path} is in use by another node \(process {first.pid}\)"):
            locked_data_dir(tmp_path).__enter__()
        first.send_signal(signal.SIGKILL)
        first.wait()

    with locked_data_dir(tmp_path):
        pass


def test_a_child_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    with locked_data_dir(tmp_path):
        child = subprocess.Popen(["sleep", "60"])
    try:
        with locked_data_dir(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def test_what_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataDirError, match=f"the data directory {path} can't be written: "):
            locked_data_dir(path).__enter__()


def test_the_note_is_there_while_the_node_runs(tmp_path: Path) -> None:
    with locked_data_dir(tmp_path):
        assert running_node(tmp_path) is None
        write_node_file(tmp_path, note(os.getpid()))
        assert running_node(tmp_path) == note(os.getpid())
        assert json.loads((tmp_path / "node.json").read_text()) == {
            "pid": os.getpid(),
            "node_id": "12D3KooW",
            "api": "http://127.0.0.1:52416",
            "p2p": [],
        }

    assert not (tmp_path / "node.json").exists()


def fail_while_running(path: Path) -> None:
    with locked_data_dir(path):
        write_node_file(path, note(os.getpid()))
        raise ZeroDivisionError


def test_the_note_goes_when_the_node_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fail_while_running(tmp_path)

    assert not (tmp_path / "node.json").exists()


def test_the_note_of_a_dead_node_is_ignored_and_cleared_by_the_next(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    write_node_file(tmp_path, note(dead.pid))

    assert running_node(tmp_path) is None
    with locked_data_dir(tmp_path):
        assert not (tmp_path / "node.json").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"pid": -1, "node_id": "", "api": null, "p2p": []}'])
def test_a_note_that_says_nothing_is_no_node(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "node.json").write_bytes(content)

    assert running_node(tmp_path) is None
