"""Small files that survive a crash: after a kill or a power cut there is the old content or the new, never a part."""

import contextlib
import os
from pathlib import Path


def write_durably(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace the file at `path` in one step, with the content on the disk before the name points to it.

    The caller holds whatever lock makes it the only writer. Raises: OSError; the old file is then untouched.
    """
    draft = path.with_name(f".{path.name}.new")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # a draft left by a killed process keeps its own mode otherwise
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Put the directory's entries on the disk too; file systems that can't do so for directories are left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
