"""Supervisors over real runner processes, for the tests of what they do."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from inference.launcher import LaunchedRunner, launch_runner, runner_environment
from inference.requests import Event, Request, Sampling, TextPrompt, Tokens
from inference.restart import RestartPolicy
from inference.runner import fake_vocabulary
from inference.runner_protocol import LoadModel, RunnerStatus
from inference.runner_state import Launch, RunnerState
from inference.supervisor import PhaseLimits, Supervisor
from tests.fake_model import expected_ids, expected_text, load_command, make_fake
from tests.inference.processes import LAUNCH_ENVIRONMENT, is_gone

LAUNCH: Launch = functools.partial(launch_runner, environment=LAUNCH_ENVIRONMENT)
PATIENT = RestartPolicy(delay_first_seconds=0, crashes_max=100)
ONE_LIFE = RestartPolicy(crashes_max=1)


@asynccontextmanager
async def running(
    directory: Path,
    *,
    launch: Launch = LAUNCH,
    policy: RestartPolicy = PATIENT,
    limits: PhaseLimits = PhaseLimits(),  # noqa: B008 - frozen
    **settings: Any,  # noqa: ANN401 - JSON
) -> AsyncIterator[Supervisor]:
    """A supervisor at work; at the end it is cancelled, and no process of it may be left."""
    pids = []

    async def noting(command: LoadModel) -> LaunchedRunner:
        process = await launch(command)
        pids.append(process.pid)
        assert isinstance(process, LaunchedRunner)
        return process

    supervisor = Supervisor("test", load_command(make_fake(directory, **settings)), noting, policy=policy, limits=limits)
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        yield supervisor
        nursery.cancel_scope.cancel()
    assert all(is_gone(pid) for pid in pids)


async def reach(supervisor: Supervisor, wanted: Callable[[RunnerState], bool]) -> RunnerState:
    """The first state seen from now on that is wanted."""
    while not wanted(supervisor.state):
        await supervisor.wait_change(supervisor.revision)
    return supervisor.state


async def reach_status(supervisor: Supervisor, status: RunnerStatus) -> RunnerState:
    return await reach(supervisor, lambda state: state.status == status)


def make_request(
    request_id: str = "a",
    max_tokens: int | None = 20,
    seed: int = 1,
    text: str = "hello",
    **fields: Any,  # noqa: ANN401 - any type
) -> Request:
    made: dict[str, Any] = {
        "request_id": request_id,
        "prompt": TextPrompt(text),
        "sampling": Sampling(seed=seed),
        "max_tokens": max_tokens,
    }
    return Request(**made | fields)


async def answer(supervisor: Supervisor, request: Request) -> list[Event]:
    async with supervisor.generate(request) as events:
        return [event async for event in events]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens))


def expected_answer(request: Request) -> str:
    """What the fake engine must have answered to a request of `make_request`."""
    assert request.max_tokens is not None
    assert isinstance(request.prompt, TextPrompt)
    ids, _ = expected_ids(fake_vocabulary.encode(request.prompt.text), request.sampling, request.max_tokens)
    return expected_text(ids, request.stop)


def kill(state: RunnerState, number: signal.Signals = signal.SIGKILL) -> None:
    assert state.pid is not None
    os.kill(state.pid, number)


def fault(kind: str, at: str, step: int = 1) -> dict[str, Any]:
    return {"kind": kind, "at": at, "step": step}


# A runner of a few lines, for what ours never does: `body` has report(value) to write any value as a frame.
SCRIPT = """
import os, signal, sys, time
import msgspec
from inference.runner_protocol import *
from inference.requests import *
def report(*values):
    os.write(1, b"".join(REPORTS.encode(value) for value in values))
INFO = EngineInfo(
    device="", dtype="", batched=True, context=10, running_max=1, kv_bytes_per_token=1, kv_bytes_max=10, weight_bytes=1
)
UP = (Phase("loading"), Phase("warming_up"), Ready(INFO))
"""


def scripted(body: str) -> Launch:
    """Launches a process of these lines in place of a runner."""

    async def launch(command: LoadModel) -> LaunchedRunner:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-c", SCRIPT + body],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=runner_environment(command, LAUNCH_ENVIRONMENT),
            start_new_session=True,
        )
        return LaunchedRunner(process)

    return launch
