"""The models on this device: from a name to a model that is complete on disk.

A model that is there is known by a few `stat` calls. Everything else (fetching, converting, hashing) is done by a process of
its own (`inference.fetch`), which tells how far it is and dies when it is no longer wanted.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from inference.catalogue import AliasName, DirectoryName, GgufName, RepositoryName, parse_name, shown_name
from inference.fetch_protocol import FETCH_REPORTS, FETCHES, Fetch, Fetched, NotFetched, as_error
from inference.model_entries import Entry, ModelsDir, Record, Source, current, decode_entry
from inference.models import Model, ModelError, Progress, StoredModel
from inference.wheel import TEMPORARY
from p2p.wire import ProtocolViolation

ROOT = Path(__file__).resolve().parent.parent  # where the package `inference` is imported from
RECEIVE_BYTES = 64 << 10
STDERR_BYTES_MAX = 4096

Show = Callable[[Progress], None]


def source_of(name: str, home: Path | None = None) -> Source:
    """What a name stands for, paths made absolute.

    Raises: ModelNotFoundError.
    """
    parsed = parse_name(name)
    shown = shown_name(parsed)
    match parsed:
        case AliasName(entry):
            return Source("alias", entry.alias, shown)
        case RepositoryName():
            return Source("repository", shown, shown)
        case DirectoryName(path) | GgufName(path):
            absolute = os.path.abspath(_expanded(path, home))
            return Source("gguf" if isinstance(parsed, GgufName) else "directory", absolute, Path(absolute).name)


def _expanded(path: str, home: Path | None) -> str:
    return str(home) + path[1:] if home is not None and (path == "~" or path.startswith("~/")) else os.path.expanduser(path)


class ModelStore:
    """The models directory of this device, which several nodes may share.

    `environment` is that of the node: the hub's and pip's own variables reach them through it.
    """

    def __init__(self, models_dir: Path, environment: Mapping[str, str]) -> None:
        self._models_dir = ModelsDir(models_dir.absolute())
        self._environment = dict(environment)

    async def resolve(self, name: str, progress: Show, *, refresh: bool = False) -> Model:
        """The model of this name, complete on disk: fetched, converted and hashed where it was not yet.

        With `refresh` the hub is asked for a newer revision, and what is on disk is verified by its hash. Cancelling ends the
        work at once and leaves nothing half done that counts; a later call goes on.

        Raises: ModelError, whose text is one sentence.
        """
        source = source_of(name, self._home())
        entry = await trio.to_thread.run_sync(self._models_dir.load, source)
        if entry is not None and not refresh and (record := await trio.to_thread.run_sync(current, entry)) is not None:
            return record.model
        entry = await self._fetch(Fetch(source, str(self._models_dir.path), refresh), progress)
        return entry.records[0].model

    def stored(self) -> list[StoredModel]:
        """The models on this device, current and earlier ones, by name; looks at names, sizes and times only.

        Raises: ModelDiskError.
        """
        return [
            _stored(entry, record, current=number == 0)
            for entry in self._models_dir.entries()
            for number, record in enumerate(entry.records)
            if record.model.path.is_dir()
        ]

    def _home(self) -> Path | None:
        return Path(self._environment["HOME"]) if self._environment.get("HOME") else None

    async def _fetch(self, order: Fetch, progress: Show) -> Entry:
        async with self._process(order) as process:
            outcome = await _converse(process, order, progress)
        match outcome:
            case Fetched(encoded):
                return decode_entry(encoded)
            case NotFetched():
                raise as_error(outcome)
            case str():
                raise ModelError(outcome)

    @asynccontextmanager
    async def _process(self, order: Fetch) -> AsyncIterator[trio.Process]:
        temporary = self._models_dir.partial_path(order.source) / TEMPORARY
        path = os.pathsep.join(filter(None, (str(ROOT), self._environment.get("PYTHONPATH"))))
        own = {"TMPDIR": str(temporary)} if order.source.kind == "alias" else {}
        try:
            process = await trio.lowlevel.open_process(
                # -P: a folder named `inference` where the node was started must not be taken for ours.
                [sys.executable, "-P", "-m", "inference.fetch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment
                | own
                | {"PYTHONPATH": path, "PYTHONUTF8": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
                start_new_session=True,
            )
        except OSError as error:
            raise ModelError(f"No process can be started to fetch {order.source.name}: {error.strerror}.") from error
        try:
            yield process
        finally:
            with trio.CancelScope(shield=True):
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
                for pipe in (process.stdin, process.stdout, process.stderr):
                    if pipe is not None:
                        await pipe.aclose()


async def _converse(process: trio.Process, order: Fetch, progress: Show) -> Fetched | NotFetched | str:
    """Give the order and pass progress on; returns how it ended, as a sentence where the process had no last word."""
    assert process.stdin is not None
    assert process.stdout is not None
    stderr = bytearray()
    reader = FETCH_REPORTS.reader()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_keep_tail, process.stderr, stderr)
        # stdin stays open: its end is how the process learns that it is not wanted any more.
        with contextlib.suppress(trio.BrokenResourceError):
            await process.stdin.send_all(FETCHES.encode(order))
        while data := await process.stdout.receive_some(RECEIVE_BYTES):
            try:
                for report in reader.feed(data):
                    if not isinstance(report, Progress):
                        nursery.cancel_scope.cancel()
                        return report
                    progress(report)
            except ProtocolViolation:
                nursery.cancel_scope.cancel()
                return f"{order.source.name} was not made ready: the process that did it wrote nonsense."
        status = await process.wait()
    return _broken_off(order.source.name, status, stderr)


async def _keep_tail(pipe: trio.abc.ReceiveStream | None, tail: bytearray) -> None:
    assert pipe is not None
    while data := await pipe.receive_some(RECEIVE_BYTES):
        tail += data
        del tail[:-STDERR_BYTES_MAX]


def _broken_off(name: str, status: int, stderr: bytearray) -> str:
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{name} was not made ready: the process that did it {how}{': ' + lines[-1][:300] if lines else ''}."


def _stored(entry: Entry, record: Record, *, current: bool) -> StoredModel:
    return StoredModel(
        model=record.model,
        kind=entry.source.kind,
        source=entry.source.identity,
        disk_bytes=sum(stamp.size for stamp in record.stamps),
        current=current,
        problem=_problem(record),
    )


def _problem(record: Record) -> str | None:
    for known in record.stamps:
        try:
            status = (record.model.path / known.name).stat()
        except OSError:
            return f"{known.name} is missing"
        if (status.st_size, status.st_mtime_ns) != (known.size, known.mtime_ns):
            return f"{known.name} has changed"
    return None
