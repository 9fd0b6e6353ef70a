"""The data directory of a node: one node at a time, and the note by which other commands find it.

`lock` is held by flock, so it is free again however its node ended; its text, and `node.json`, are for the others to read.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from p2p.durable import write_durably

IDENTITY_FILE = "identity.pem"
LOCK_FILE = "lock"
NODE_FILE = "node.json"
NODE_FILE_BYTES_MAX = 64 << 10
OWNER_ONLY = 0o700


class DataDirError(Exception):
    """The data directory can't be used; `str()` is one sentence that names it."""


class NodeFile(msgspec.Struct, frozen=True):
    """What `node.json` says of the running node."""

    pid: int
    node_id: str
    api: str | None  # the first URL; None where HTTP is off
    p2p: list[str]  # multiaddrs


@contextlib.contextmanager
def locked_data_dir(path: Path) -> Iterator[None]:
    """Make the directory where it is missing (for its owner alone) and hold its lock; `node.json` goes at the end.

    Raises: DataDirError where it can't be written, or another node has it.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
            descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, descriptor)
            _take_lock(descriptor, path)
            stack.callback(_remove_node_file, path)
            _remove_node_file(path)
            _write_pid(descriptor)
        except OSError as error:
            raise DataDirError(f"the data directory {path} can't be written: {error.strerror}") from None
        yield


def _take_lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        other = f" (process {pid})" if pid.isdigit() else ""
        raise DataDirError(
            f"the data directory {path} is in use by another node{other}: stop that one, or give this one its own --data-dir"
        ) from None


def _write_pid(descriptor: int) -> None:
    """Leave this process's id in the lock, which also shows that the disk takes what is written."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    os.fsync(descriptor)


def write_node_file(path: Path, node: NodeFile) -> None:
    """Publish the running node in its data directory.

    Raises: DataDirError.
    """
    try:
        write_durably(path / NODE_FILE, msgspec.json.encode(node) + b"\n")
    except OSError as error:
        raise DataDirError(f"{path / NODE_FILE} can't be written: {error.strerror}") from None


def _remove_node_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        (path / NODE_FILE).unlink()


def running_node(path: Path) -> NodeFile | None:
    """The node that runs on this data directory; None where there is none, whatever a killed one left behind."""
    try:
        with (path / NODE_FILE).open("rb") as file:
            node = msgspec.json.decode(file.read(NODE_FILE_BYTES_MAX), type=NodeFile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return node if _is_alive(node.pid) else None


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False
    except PermissionError:  # of another user, but there
        return True
    return True
