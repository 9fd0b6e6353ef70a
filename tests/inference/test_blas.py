"""A real BLAS under MLX; each case in a fresh process, since a library that is loaded once stays."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux's MLX needs it")

LOAD = """
import ctypes, sys
from pathlib import Path
from inference.runner import blas
blas.SYSTEM_LIBRARIES = ()
path = blas.fast_blas(Path(sys.argv[1]), 1)
print(path)
"""
SPEED = """
import time
import mlx.core as mx
a = mx.random.normal((256, 1024)); mx.eval(a, a @ a.T)
started = time.process_time()
for _ in range(5): mx.eval(a @ a.T)
print(5 * 2 * 256 * 256 * 1024 / (time.process_time() - started) / 1e9)
"""


def start(code: str, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(cache)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(code: str, cache: Path) -> tuple[list[str], str]:
    process = start(code, cache)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.splitlines(), err


def test_mlx_uses_the_copy_made_fit(tmp_path: Path) -> None:
    """The reference BLAS does 2.5 GFLOP/s a core, OpenBLAS 100: between them is room for any machine's mood."""
    (path, speed), _ = run(LOAD + SPEED, tmp_path)
    assert Path(path).parent == tmp_path
    assert float(speed) > 10


def test_processes_that_make_the_copy_at_once_all_get_a_whole_one(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "directory"
    processes = [start(LOAD, cache) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in processes]
    (copy,) = cache.iterdir()  # and nothing half-made beside it
    assert [out for out, _ in outputs] == [f"{copy}\n"] * 3


def test_a_copy_that_is_there_is_used(tmp_path: Path) -> None:
    (path,), _ = run(LOAD, tmp_path)
    made = os.stat(path).st_mtime_ns
    assert run(LOAD, tmp_path)[0] == [path]
    assert os.stat(path).st_mtime_ns == made


def test_a_copy_that_is_damaged_is_made_anew(tmp_path: Path) -> None:
    (path,), _ = run(LOAD, tmp_path)
    Path(path).write_bytes(b"no library")
    assert run(LOAD, tmp_path)[0] == [path]


def test_where_no_copy_can_be_kept_the_runner_goes_on_without_and_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    (path,), err = run(LOAD, blocked / "cache")
    assert path == "None"
    assert "no fast BLAS for MLX" in err
    assert err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_no_failure(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert run(LOAD, tmp_path)[0] == ["None"]


def test_too_late_is_said(tmp_path: Path) -> None:
    (path,), err = run("import mlx.core\n" + LOAD, tmp_path)
    assert path == "None"
    assert "before a BLAS" in err
