"""Starts runner processes.

A parent-death signal is not used: it belongs to the thread that forked, and trio forks in worker threads that retire when
idle, which killed healthy runners after ten seconds. A runner sees its node's death by the end of its stdin.
"""

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import trio

from inference.runner_protocol import LoadModel

ROOT = Path(__file__).resolve().parent.parent  # where the package `inference` is imported from

# What of the node's environment a runner gets: how to find programs, libraries, devices and caches. Nothing of shoal's own,
# keys above all, and no Python options that were meant for the node.
PASSED_NAMES = frozenset({"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "PYTHONPATH"})
PASSED_PREFIXES = ("LC_", "LD_", "DYLD_", "XDG_", "HF_HOME", "HF_HUB_CACHE", "CUDA", "NVIDIA", "MLX_", "MTL_", "METAL_")

SETTINGS = {
    "MLX_DISABLE_COMPILE": "1",  # on a CPU MLX would run a C++ compiler in the middle of a request
    "HF_HUB_OFFLINE": "1",  # only the node fetches
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUTF8": "1",
    # MLX on a CPU takes every array anew from the C library. By default glibc gets each of some megabytes from the kernel and
    # gives it back, and the page faults take longer than the arithmetic: with a second row's 2,000 tokens a step took 660 ms
    # instead of 330, a decode step 215 instead of 165. Other C libraries don't read these.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc takes; weights are larger
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


def runner_environment(command: LoadModel, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a runner, out of the node's."""
    passed = {name: value for name, value in base.items() if name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)}
    threads = str(command.threads)
    return passed | SETTINGS | _import_path(passed) | {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}


def _import_path(passed: Mapping[str, str]) -> dict[str, str]:
    """Where a runner finds us, unless that is where Python looks anyway: PYTHONPATH comes before the standard library."""
    if ROOT in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), passed.get("PYTHONPATH"))))}


class LaunchedRunner:
    """A runner process, in a process group of its own (see `inference.runner_state.RunnerProcess`)."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self.pid = process.pid
        self.stdin: trio.abc.SendStream = process.stdin
        self.stdout: trio.abc.ReceiveStream = process.stdout
        self.stderr: trio.abc.ReceiveStream = process.stderr

    async def wait(self) -> int:
        """Wait for its end and reap it."""
        return await self._process.wait()

    def terminate(self) -> None:
        """SIGTERM to its process group."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to its process group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Once it is reaped its number may be another group's. One that has ended but is not reaped yet can't be signalled on
        # macOS, which calls that a lack of permission.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


async def launch_runner(command: LoadModel, *, environment: Mapping[str, str]) -> LaunchedRunner:
    """Start a runner process; `environment` is the node's own, of which it gets what it needs.

    The command itself is not sent: that is the supervisor's first frame.

    Raises: OSError where no process can be started.
    """
    process = await trio.lowlevel.open_process(
        # -P: a folder named `inference` where the node was started must not be taken for ours.
        [sys.executable, "-P", "-m", "inference.runner"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=runner_environment(command, environment),
        start_new_session=True,
    )
    return LaunchedRunner(process)
