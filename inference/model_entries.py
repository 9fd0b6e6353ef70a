"""The models directory on disk: which names were made ready, where they lie, and what their files looked like.

    <models dir>/<hash>/          a converted model, complete; put there by one rename
                 names/<key>.json what a name leads to: hashes, paths, and a stamp (size, time) of each file
                 locks/<key>.lock held by the process that makes this name ready, for as long as it lives
                 .partial-<key>/  what that process has not finished; without its lock it is rubbish

The key is made from the name, so that two processes meet at the same lock. Several nodes share the directory.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from inference.model_directory import Directory, read_directory
from inference.models import Model, ModelDiskError, ModelError, SourceKind

ENTRY_BYTES_MAX = 16 << 20
# Of one name: the current model and the ones it led to before, as long as they are still there.
RECORDS_MAX = 16
KEY_DIGITS = 24


class Source(Struct, frozen=True):
    """What is to be made ready."""

    kind: SourceKind
    identity: str  # the alias, the repository id with its revision, or the absolute path
    name: str  # as people see it

    @property
    def key(self) -> str:
        """A file name for it."""
        return hashlib.sha256(f"{self.kind}:{self.identity}".encode()).hexdigest()[:KEY_DIGITS]


class Stamp(Struct, frozen=True, array_like=True):
    """What a file looked like from outside: cheap to compare at each start."""

    name: str  # relative to the model's directory
    size: int
    mtime_ns: int


class Record(Struct, frozen=True):
    """A model that was hashed, and its files at that time."""

    model: Model
    stamps: tuple[Stamp, ...]


class Entry(Struct, frozen=True, kw_only=True):
    """What a name leads to."""

    source: Source
    origin: tuple[Stamp, ...] = ()  # of the .gguf that was converted
    records: tuple[Record, ...]  # the current one first, then earlier ones

    def with_record(self, record: Record, origin: tuple[Stamp, ...]) -> "Entry":
        """The entry with `record` as the current one; another hash in the same directory has replaced what was there."""
        earlier = [old for old in self.records if old.model.path != record.model.path]
        return Entry(source=self.source, origin=origin, records=(record, *earlier[: RECORDS_MAX - 1]))


def stamp(path: Path, name: str | None = None) -> Stamp:
    """A file's stamp; symbolic links are followed (the hub's cache is made of them). Raises: OSError."""
    status = path.stat()
    return Stamp(path.name if name is None else name, status.st_size, status.st_mtime_ns)


def stamps(directory: Directory) -> tuple[Stamp, ...]:
    """Stamps of all files that make the model. Raises: OSError."""
    return tuple(stamp(file, str(file.relative_to(directory.path))) for file in directory.files())


def current(entry: Entry) -> Record | None:
    """The entry's current record if its files still look as they did when they were hashed; a few `stat` calls."""
    record = entry.records[0]
    try:
        if entry.source.kind == "gguf" and entry.origin != (stamp(Path(entry.source.identity)),):
            return None
        return record if stamps(read_directory(record.model.path)) == record.stamps else None
    except (OSError, ModelError):
        return None


class ModelsDir:
    """The directory itself; every write is whole or not there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make sure that it is there. Raises: OSError."""
        for directory in (self.path, self.path / "names", self.path / "locks"):
            directory.mkdir(parents=True, exist_ok=True)

    def model_path(self, model_hash: str) -> Path:
        """Where a converted model lies."""
        return self.path / model_hash

    def partial_path(self, source: Source) -> Path:
        """Where a name's unfinished files lie."""
        return self.path / f".partial-{source.key}"

    def load(self, source: Source) -> Entry | None:
        """The name's entry; a damaged one counts as none, and is made anew."""
        return _decode(self.path / "names" / f"{source.key}.json")

    def entries(self) -> list[Entry]:
        """All entries, by name."""
        found = [_decode(path) for path in (self.path / "names").glob("*.json")]
        return sorted(
            (entry for entry in found if entry is not None), key=lambda entry: (entry.source.name, entry.source.identity)
        )

    def save(self, entry: Entry) -> None:
        """Write the entry. Raises: OSError."""
        path = self.path / "names" / f"{entry.source.key}.json"
        # Only the holder of the name's lock writes it, so the name of the new file needs no more than this.
        new = path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(encode_entry(entry))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    @contextlib.contextmanager
    def lock(self, source: Source, waiting: Callable[[], None]) -> Iterator[int]:
        """Hold the name's lock; `waiting` is called once if another process has it. Yields the lock's file descriptor.

        The lock is the kernel's and ends with the last process that holds the descriptor, however that ends.
        """
        with (self.path / "locks" / f"{source.key}.lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file.fileno()

    def sweep(self) -> None:
        """Remove what processes left that were killed: partial directories whose lock is free."""
        for partial in self.path.glob(".partial-*"):
            lock = self.path / "locks" / f"{partial.name.removeprefix('.partial-')}.lock"
            with lock.open("ab") as file, contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)

    def adopt(self, partial: Path, model_hash: str) -> Path:
        """Give a complete directory its final place, by one rename.

        Raises: FileExistsError where a model of that hash is there already; OSError.
        """
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        final = self.model_path(model_hash)
        try:
            partial.rename(final)
        except OSError:
            if final.is_dir():
                raise FileExistsError(final) from None
            raise
        _sync(self.path)
        return final

    def owns(self, path: Path) -> bool:
        """Whether a model's directory is one of ours, which may be removed and made anew."""
        return path.parent == self.path

    def discard(self, path: Path) -> None:
        """Remove a damaged model of ours: out of the way first, so that nothing half removed is ever taken for whole."""
        assert self.owns(path)
        away = self.path / f".partial-discarded-{path.name}"
        shutil.rmtree(away, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            path.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encode_entry(entry: Entry) -> bytes:
    """The entry as JSON."""
    return msgspec.json.format(msgspec.json.encode(entry, enc_hook=_encode_path), indent=1)


def decode_entry(data: bytes) -> Entry:
    """An entry from JSON. Raises: msgspec.DecodeError."""
    return msgspec.json.decode(data, type=Entry, dec_hook=_decode_path)


def _decode(path: Path) -> Entry | None:
    try:
        if path.stat().st_size > ENTRY_BYTES_MAX:
            return None
        entry = decode_entry(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
    except OSError as error:
        raise ModelDiskError(f"{path} can't be read: {error.strerror}.") from error
    return entry if entry.records else None


def _encode_path(value: object) -> str:
    assert isinstance(value, Path)
    return str(value)


def _decode_path(kind: type, value: Any) -> Any:  # noqa: ANN401 - msgspec's own signature
    assert kind is Path
    return Path(value)
