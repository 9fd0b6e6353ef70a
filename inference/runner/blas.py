"""A real BLAS under MLX on a Linux CPU.

MLX's Linux wheel links the reference BLAS: 2.5 GFLOP/s where OpenBLAS does 100 a thread. The dynamic linker takes a symbol from
the first library of the global scope that has it, so an OpenBLAS loaded with RTLD_GLOBAL before `mlx.core` wins.

The system's OpenBLAS is taken where there is one. Else the one of the package scipy-openblas32 is made fit once: its symbols
carry a prefix, which patchelf removes in a copy that is kept in a directory of the user's.

Imports no mlx: everything here must happen before that.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SYSTEM_LIBRARIES = ("libopenblas.so.0",)
# What libmlx takes from a BLAS, and what sets the threads. Its LAPACK calls stay with the reference library.
RENAMED = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm", "openblas_set_num_threads")
PATCHELF_SECONDS_MAX = 60.0
GPU_BACK_ENDS = ("mlx-cuda-12", "mlx-cuda-13")  # with one of them MLX computes elsewhere

_loaded: dict[str, ctypes.CDLL] = {}  # a library loaded into the global scope stays there as long as the process


def fast_blas(cache: Path, threads: int) -> str | None:
    """Put an OpenBLAS into the global scope, and return its path; None (with the reason on stderr) where there is none.

    `cache` is the directory for the copy made fit, `threads` how many OpenBLAS may use. Where mlx was imported before, what
    was in place then counts.
    """
    if not _loaded and sys.platform == "linux" and not _has_gpu_back_end():
        if "mlx.core" in sys.modules:
            _say("MLX was imported before a BLAS could be put under it")
        else:
            _load_one(cache)
    set_threads(threads)
    return next(iter(_loaded), None)


def set_threads(threads: int) -> None:
    """How many threads the BLAS in place may use from now on; it may be computing meanwhile. Nothing without one."""
    for library in _loaded.values():
        library.openblas_set_num_threads(threads)


def _load_one(cache: Path) -> None:
    if any(_load(name) for name in SYSTEM_LIBRARIES if _exists(name)):
        return
    try:
        copy = made_fit(cache)
        if not _load(str(copy)):
            copy.unlink()  # damaged, as by a disk that was full: one more try
            _load(str(made_fit(cache)))
    except (OSError, subprocess.SubprocessError, importlib.metadata.PackageNotFoundError) as error:
        _say(f"no fast BLAS for MLX, which makes it about ten times slower: {error}")


def _exists(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_LOCAL)
    except OSError:
        return False
    return True


def _load(path: str) -> bool:
    """Load it for everyone, and make sure that it is the one whose symbols are found."""
    try:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        ours, found = _address(library), _address(ctypes.CDLL(None))
    except (OSError, AttributeError) as error:
        _say(f"{path} is not fit as a BLAS for MLX: {error}")
        return False
    if ours == found:
        _loaded[path] = library
    else:
        _say(f"{path} is not used: another library gives the process its BLAS")
    return ours == found


def _address(library: ctypes.CDLL) -> int | None:
    return ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value


def made_fit(cache: Path) -> Path:
    """The copy of scipy-openblas32 whose symbols have their usual names, in `cache`; made where it is not there yet.

    Several processes may make it at once: each writes a file of its own and renames it, so the copy is whole or absent.

    Raises: PackageNotFoundError without the package, OSError where the directory can't be written, SubprocessError where
    patchelf fails.
    """
    version = importlib.metadata.version("scipy-openblas32")
    package = importlib.util.find_spec("scipy_openblas32")
    assert package is not None
    assert package.submodule_search_locations
    source = Path(package.submodule_search_locations[0]) / "lib" / "libscipy_openblas.so"
    copy = cache / f"openblas-{version}-{os.uname().machine}.so"
    if copy.exists():
        return copy
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as directory:
        made = _renamed(source, Path(directory))
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(copy)
    return copy


def _renamed(source: Path, directory: Path) -> Path:
    patchelf = shutil.which("patchelf", path=sysconfig.get_path("scripts")) or shutil.which("patchelf")
    if patchelf is None:
        raise FileNotFoundError("patchelf is not installed")
    names, made = directory / "names", directory / "openblas.so"
    names.write_text("".join(f"scipy_{name} {name}\n" for name in RENAMED))
    command = [patchelf, "--rename-dynamic-symbols", str(names), "--output", str(made), str(source)]
    done = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATCHELF_SECONDS_MAX
    )
    if done.returncode != 0:
        raise OSError(f"patchelf: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return made


def _has_gpu_back_end() -> bool:
    return any(_installed(name) for name in GPU_BACK_ENDS)


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")
