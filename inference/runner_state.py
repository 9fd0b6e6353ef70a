"""What a supervisor tells about its runner, and the seam to the process behind it."""

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio
from msgspec import Struct

from inference.requests import Load
from inference.runner_protocol import EngineInfo, LoadModel, RunnerStatus


class RunnerState(Struct, frozen=True, kw_only=True):
    """A runner as its supervisor sees it now; a new value at each change."""

    runner_id: str
    status: RunnerStatus
    since: float  # Unix seconds at which this status was entered
    reason: str | None = None  # of `failed`: one sentence
    spawn: int = 0  # number of the runner's life on this node, from 1; 0 before the first
    pid: int | None = None  # while a process lives
    done: int = 0  # bytes loaded, of total; 0 of 0 while unknown
    total: int = 0
    info: EngineInfo | None = None  # from ready on
    load: Load | None = None  # from ready on
    stderr: str = ""  # the last lines, bounded to some kilobytes; from the end of a spawn on


class RunnerProcess(Protocol):
    """One live runner process as a supervisor drives it."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def stdin(self) -> trio.abc.SendStream:
        """Where commands go."""

    @property
    def stdout(self) -> trio.abc.ReceiveStream:
        """Where reports come from."""

    @property
    def stderr(self) -> trio.abc.ReceiveStream:
        """Where everything else comes from that it says."""

    async def wait(self) -> int:
        """Wait for its end, without polling, and reap it; the exit status, or minus the signal's number."""

    def terminate(self) -> None:
        """SIGTERM to its process group; nothing where it has been reaped."""

    def kill(self) -> None:
        """SIGKILL to its process group; nothing where it has been reaped."""


Launch = Callable[[LoadModel], Awaitable[RunnerProcess]]
"""Starts a runner process. Raises OSError where that can't be done."""
