"""The object in a node that owns one runner: it launches it, feeds it, sees it end, and starts it again."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import trio

from inference.requests import Event, Request
from inference.restart import RestartPolicy
from inference.runner_protocol import LoadModel
from inference.runner_state import Launch, RunnerState


class Supervisor:
    """One runner, over all its spawns."""

    def __init__(
        self,
        runner_id: str,
        command: LoadModel,
        launch: Launch,
        *,
        policy: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        raise NotImplementedError

    @property
    def state(self) -> RunnerState:
        """The runner as it is now."""
        raise NotImplementedError

    @property
    def revision(self) -> int:
        """Rises with every change of `state`."""
        raise NotImplementedError

    async def wait_change(self, revision: int) -> int:
        """Wait until `revision` is no longer the current one; returns the current one."""
        raise NotImplementedError

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the runner until it is stopped or given up (`state.status` is shutdown or failed then).

        Reports started at once, before anything is launched. Cancelling it kills the process.
        """
        raise NotImplementedError

    def generate(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Submit a request; the block gets its events, which end with Refused, Finished or Failed.

        Leaving the block cancels what still runs and waits, within a bound, for its end, so that its place is really free.
        With no ready runner the only event is a Refused whose load has no room (running_max 0).
        """
        raise NotImplementedError

    async def stop(self, grace: float) -> None:
        """End the runner for good: shutdown frame, after `grace` seconds SIGTERM, then SIGKILL; returns when it is gone.

        Shielded from cancellation, and bounded. Requests in flight end as Failed `runner_stopped`.
        """
        raise NotImplementedError
