"""What scripts/setup does once a fitting Python is found: a .venv with exactly the locked packages in it.

Standard library only. Two set-ups at once take turns; a set-up that was killed leaves no stamp, so the next one repairs.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "shoal-stamp"

# These two come as source only; both are plain Python, so nothing is compiled. Everything else must be a wheel.
SOURCE_ONLY = "python-baseconv,varint"


class SetupError(Exception):
    """One sentence for the person who ran the set-up."""


def wanted_locks(dev: bool, cuda: bool, stamp: str) -> list[str]:
    """The lock files to install; what an earlier set-up added (dev tools, CUDA) stays unless the lock changed."""
    cuda = cuda or "cuda.lock" in stamp
    dev = dev or "dev.lock" in stamp
    return (["dev.lock"] if dev else []) + (["cuda.lock"] if cuda else []) or ["cpu.lock"]


def fingerprint(locks: list[str]) -> str:
    """What .venv must have been made from to be current: Python, place, project metadata and lock files."""
    digest = hashlib.sha256(f"{sys.version} {ROOT}".encode())
    for path in [ROOT / "pyproject.toml", *(ROOT / "requirements" / name for name in locks)]:
        digest.update(path.read_bytes())
    return f"{' '.join(locks)} {digest.hexdigest()}\n"


def pip(*args: str) -> None:
    """Run the venv's pip.

    Raises: SetupError with the most telling line of what pip printed.
    """
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command.append("--no-build-isolation")  # what is built is built with the locked setuptools
    done = subprocess.run([*command, *args], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return
    errors = done.stderr.strip()
    if any(sign in errors for sign in ("NewConnectionError", "ConnectTimeout", "NameResolution", "Connection refused")):
        raise SetupError("no package index can be reached: check the network connection (or pip's proxy and index settings)")
    if "No space left" in errors:
        raise SetupError(f"the disk that holds {VENV} is full: about 700 MB are needed")
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")] or errors.splitlines() or ["no message"]
    raise SetupError(f"pip could not install the locked packages: {lines[-1].removeprefix('ERROR: ')}")


def make_venv() -> None:
    """Create .venv anew where it is missing, broken or of another Python.

    Raises: SetupError where this Python has no venv module.
    """
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        raise SetupError("this Python has no venv module: install it (on Debian and Ubuntu: apt install python3-venv)")
    python = VENV / "bin" / "python"
    probe = [str(python), "-c", "import sys, pip; print(sys.version, sys.prefix)"]
    with contextlib.suppress(OSError):
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == f"{sys.version} {VENV}":
            return
    shutil.rmtree(VENV, ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
        raise SetupError(f"python -m venv failed: {reason[-1]}")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold a lock beside .venv, so that two set-ups never write into it together."""
    with open(ROOT / ".venv.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another set-up of this folder", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Bring .venv up to date; say nothing when it is."""
    parser = argparse.ArgumentParser(prog="scripts/setup", description="Make or refresh .venv.")
    parser.add_argument("--dev", action="store_true", help="also what scripts/test and scripts/check need")
    parser.add_argument("--cuda", action="store_true", help="MLX for NVIDIA GPUs (Linux) in place of the CPU one")
    options = parser.parse_args()
    with one_at_a_time():
        stamp = STAMP.read_text() if STAMP.exists() else ""
        locks = wanted_locks(options.dev, options.cuda, stamp)
        current = fingerprint(locks)
        if stamp == current and (VENV / "bin" / "node").exists():
            return
        print(f"setup: installing {', '.join(locks)} into {VENV} (about a minute, once)", file=sys.stderr)
        make_venv()
        STAMP.unlink(missing_ok=True)
        for name in ["build.lock", *locks]:
            pip("--require-hashes", "--only-binary=:all:", f"--no-binary={SOURCE_ONLY}", "-r", f"requirements/{name}")
        pip("--no-index", "--editable", ".")
        for stubs in VENV.glob("lib/python*/site-packages/trio-stubs"):
            shutil.rmtree(stubs)  # trio-typing, which libp2p wants, brings these of 2021; they would hide trio's own types
        STAMP.write_text(current)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup: {error}.")
    except OSError as error:
        sys.exit(f"setup: {error.filename or ROOT}: {error.strerror}.")
    except KeyboardInterrupt:
        sys.exit("setup: interrupted; run it again to go on.")
