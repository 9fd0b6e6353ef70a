"""Large files of the Hugging Face hub, fetched into its cache so that a killed download goes on where it stopped.

huggingface_hub (2.4) begins a file anew when its process was killed. A large file is therefore fetched here, resumed by Range,
checked against its digest and laid into the cache under its documented name, the etag, where the library then finds it.

Cache layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import httpx2
from huggingface_hub import DryRunFileInfo, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]  # not in __all__, but documented

from inference.models import ModelDamagedError, ModelNetworkError

RESUMED_BYTES_MIN = 8 << 20  # smaller files are not worth resuming
RESUMED_BYTES_MAX = 50_000_000_000  # above, the hub serves files by its own protocol only
CHUNK_BYTES = 1 << 20
# Attempts that brought no byte, one after the other, before it is given up; with growing pauses.
ATTEMPTS_MAX = 5
PAUSE_SECONDS = 0.5
READ_SECONDS_MAX = 30

Report = Callable[[int, int], None]


class Tally:
    """Bytes of all files together, counted from several threads; `stopped` tells those threads to give up."""

    def __init__(self, total: int, report: Report) -> None:
        self.total, self.stopped = total, False
        self._done, self._report, self._lock = 0, report, threading.Lock()

    def add(self, count: int) -> None:
        """Count bytes that arrived (or, below zero, must be fetched again)."""
        with self._lock:
            self._done += count
            self._report(min(self._done, self.total), self.total)


class Download:
    """One large file, from where an earlier attempt stopped, into the hub's cache."""

    def __init__(self, repository: str, file: DryRunFileInfo, tally: Tally) -> None:
        self._file, self._tally = file, tally
        self._url = hf_hub_url(repository, file.filename, revision=file.commit_hash)
        # <cache>/models--org--name/snapshots/<commit>/<file> points to .../blobs/<etag>.
        self._blobs = _repository_folder(Path(file.local_path), file.filename) / "blobs"

    def run(self) -> None:
        """Fetch it; returns once the blob is in place. Raises: what the hub's library raises, OSError, ModelDamagedError."""
        metadata = get_hf_file_metadata(self._url)
        if metadata.etag is None or metadata.size is None or "/" in metadata.etag:
            return  # the library will do what it can
        blob = self._blobs / metadata.etag
        self._blobs.mkdir(parents=True, exist_ok=True)
        partial = blob.with_name(blob.name + ".incomplete")
        with partial.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may be at the same file
            if blob.exists() or not partial.exists():
                self._tally.add(metadata.size)
                return
            self._fill(file, metadata.size)
            if (found := _digest(partial, metadata.etag)) is not None and found != metadata.etag:
                partial.unlink()
                raise ModelDamagedError(f"{self._file.filename} arrived damaged and was removed; try again.")
            file.flush()
            os.fsync(file.fileno())
            partial.rename(blob)

    def _fill(self, file: BinaryIO, size: int) -> None:
        if file.tell() > size:
            file.truncate(0)
            file.seek(0)
        self._tally.add(file.tell())
        fruitless = 0
        while (before := file.tell()) < size:
            try:
                self._attempt(file, before, size)
                failure: Exception | None = None
            except (httpx2.TransportError, httpx2.StreamError) as error:
                failure = error
            fruitless = 0 if file.tell() > before else fruitless + 1
            if fruitless > ATTEMPTS_MAX:
                raise failure or ModelNetworkError(f"{self._file.filename} ends before its promised size.")
            if failure is not None:
                time.sleep(PAUSE_SECONDS * 2**fruitless)

    def _attempt(self, file: BinaryIO, start: int, size: int) -> None:
        # The hub's own address each time: where it redirects to is signed and expires.
        headers = build_hf_headers() | {"Range": f"bytes={start}-", "Accept-Encoding": "identity"}
        with http_stream_backoff(
            "GET", self._url, headers=headers, timeout=READ_SECONDS_MAX, retry_on_exceptions=()
        ) as response:
            hf_raise_for_status(response)
            if start and response.status_code != 206:  # it sends the whole file
                file.truncate(0)
                file.seek(0)
                self._tally.add(-start)
            for chunk in response.iter_bytes(CHUNK_BYTES):
                if self._tally.stopped:
                    raise ModelNetworkError(f"{self._file.filename} was given up.")
                if file.tell() + len(chunk) > size:
                    raise ModelDamagedError(f"{self._file.filename} is longer than the hub said.")
                file.write(chunk)
                self._tally.add(len(chunk))


def _repository_folder(local_path: Path, file_name: str) -> Path:
    return local_path.parents[len(Path(file_name).parts) + 1]


def _digest(path: Path, name: str) -> str | None:
    """The digest of a blob of this name: SHA-256 for large files, git's for small ones; None where the name is neither."""
    size = path.stat().st_size
    if len(name) == 64:
        sha = hashlib.sha256()
    elif len(name) == 40:
        sha = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    else:
        return None
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
    return sha.hexdigest()


def remove_damaged(snapshot: Path, report: Report) -> list[str]:
    """Remove from the cache those files of a snapshot whose content is not what their blob's name says; returns their names.

    Raises: OSError.
    """
    links = [path for path in sorted(snapshot.rglob("*")) if path.is_symlink()]
    blobs = [(link, link.parent / link.readlink()) for link in links]
    total = sum(blob.stat().st_size for _, blob in blobs if blob.is_file())
    done, damaged = 0, []
    for link, blob in blobs:
        if blob.is_file():
            done += blob.stat().st_size
            if (found := _digest(blob, blob.name)) is None or found == blob.name:
                report(done, total)
                continue
            blob.unlink()
        link.unlink()
        damaged.append(str(link.relative_to(snapshot)))
    return damaged
