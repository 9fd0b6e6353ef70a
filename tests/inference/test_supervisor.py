"""The life of a runner under its supervisor, with real processes and the fake engine.

About 25 s, and the idle runner's 31 s beside them.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from inference.launcher import ROOT, LaunchedRunner
from inference.requests import Accepted, Event, Failed
from inference.restart import RestartPolicy
from inference.runner_protocol import TRANSITIONS, LoadModel, RunnerStatus
from inference.spawn import STDERR_BYTES_MAX
from inference.supervisor import PhaseLimits, Supervisor
from tests.fake_model import load_command, make_fake
from tests.inference.processes import is_gone, wait_gone
from tests.inference.supervised import (
    LAUNCH,
    ONE_LIFE,
    PATIENT,
    answer,
    expected_answer,
    fault,
    kill,
    make_request,
    reach,
    reach_status,
    running,
    scripted,
    text_of,
)


async def test_from_idle_to_ready_and_back_again(tmp_path: Path) -> None:
    statuses: list[RunnerStatus] = []

    async def watch(supervisor: Supervisor) -> None:
        while True:
            if not statuses or statuses[-1] != supervisor.state.status:
                statuses.append(supervisor.state.status)
            await supervisor.wait_change(supervisor.revision)

    settings: dict[str, Any] = {"load_seconds": 0.1, "warm_up_seconds": 0.1, "stop_one_in": 0}
    async with running(tmp_path, **settings) as supervisor, trio.open_nursery() as nursery:
        nursery.start_soon(watch, supervisor)
        state = await reach_status(supervisor, "ready")
        assert state.done == state.total > 0
        assert state.info is not None
        assert state.info.device == "fake"
        async with supervisor.generate(make_request("a", None)) as events:
            assert isinstance(await anext(aiter(events)), Accepted)
            await reach_status(supervisor, "running")
        await reach_status(supervisor, "ready")
        await trio.testing.wait_all_tasks_blocked()
        await supervisor.stop(5)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert statuses[statuses.index("loading") :] == [
        "loading",
        "warming_up",
        "ready",
        "running",
        "ready",
        "shutting_down",
        "shutdown",
    ]
    assert supervisor.state.pid is None


@pytest.mark.parametrize("phase", ["loading", "warming_up", "ready", "running"])
async def test_a_runner_killed_in_any_phase_is_replaced(tmp_path: Path, phase: RunnerStatus) -> None:
    slow: dict[str, Any] = {"loading": {"load_seconds": 0.2}, "warming_up": {"warm_up_seconds": 0.2}}.get(
        phase, {"stop_one_in": 0}
    )
    policy = RestartPolicy(delay_first_seconds=3600)
    async with running(tmp_path, policy=policy, **slow) as supervisor, trio.open_nursery() as nursery:
        if phase == "running":
            await reach_status(supervisor, "ready")
            nursery.start_soon(answer, supervisor, make_request("in flight", None))
        kill(await reach_status(supervisor, phase))
        state = await reach_status(supervisor, "failed")
        assert state.reason == "The runner was killed by SIGKILL."
        assert state.pid is None
        assert state.spawn == 1

    async with running(tmp_path, **slow) as supervisor:
        kill(await reach_status(supervisor, "loading" if phase in ("ready", "running") else phase))
        await reach(supervisor, lambda state: state.spawn == 2 and state.status == "ready")
        request = make_request(max_tokens=10)
        if "stop_one_in" not in slow:
            assert text_of(await answer(supervisor, request)) == expected_answer(request)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("exit", "exited with status 7"),
        ("abort", "killed by SIGABRT"),
        ("kill", "killed by SIGKILL"),
        ("raise", "exited with status 3"),
    ],
)
async def test_how_a_runner_ended_is_told(tmp_path: Path, kind: str, reason: str) -> None:
    async with running(tmp_path, policy=ONE_LIFE, faults=[fault(kind, "step", 3)]) as supervisor:
        await reach_status(supervisor, "ready")
        end = (await answer(supervisor, make_request()))[-1]
        assert isinstance(end, Failed)
        assert end.code == ("engine_error" if kind == "raise" else "runner_crashed")
        state = await reach_status(supervisor, "failed")
        assert state.reason is not None
        assert reason in state.reason
        assert "\n" not in state.reason
        if kind == "raise":
            assert "RuntimeError" in state.stderr
        if kind == "abort":
            assert "Fatal Python error" in state.stderr


async def test_the_last_lines_are_kept_within_a_bound(tmp_path: Path) -> None:
    body = "for n in range(100_000): print('line', n, file=sys.stderr)\nsys.exit(5)"
    async with running(tmp_path, launch=scripted(body), policy=ONE_LIFE) as supervisor:
        state = await reach_status(supervisor, "failed")
        lines = state.stderr.splitlines()
        assert len(state.stderr) <= STDERR_BYTES_MAX
        assert lines[-1] == "line 99999"
        assert all(line.startswith("line ") for line in lines)


async def test_a_model_that_cannot_be_loaded_is_not_tried_again(tmp_path: Path) -> None:
    supervisor = Supervisor("test", load_command(make_fake(tmp_path, load_error="It is broken.")), LAUNCH, policy=PATIENT)
    await supervisor.run()
    assert (supervisor.state.status, supervisor.state.reason, supervisor.state.spawn) == ("failed", "It is broken.", 1)


async def test_a_runner_that_always_crashes_is_given_up(tmp_path: Path) -> None:
    policy = RestartPolicy(crashes_max=3, delay_first_seconds=0)
    command = load_command(make_fake(tmp_path, faults=[fault("exit", "warming_up")]))
    supervisor = Supervisor("test", command, LAUNCH, policy=policy)
    await supervisor.run()
    assert supervisor.state.status == "failed"
    assert supervisor.state.spawn == 3
    assert supervisor.state.reason == "The runner exited with status 7, for the 3rd time, and is not started again."


async def test_a_process_that_cannot_be_started_is_a_crash(tmp_path: Path) -> None:
    async def launch(_command: LoadModel) -> LaunchedRunner:
        raise OSError("no more processes")

    supervisor = Supervisor("test", load_command(tmp_path), launch, policy=ONE_LIFE)
    await supervisor.run()
    assert supervisor.state.reason is not None
    assert "can't be started: no more processes" in supervisor.state.reason


@pytest.mark.parametrize(
    "body",
    [
        "print('Loading model...', flush=True); time.sleep(3600)",
        "os.write(1, b'\\xff' * 100); time.sleep(3600)",
        "os.write(1, (0).to_bytes(4, 'big')); time.sleep(3600)",
        "report(Step(1, (), Load(0, 0, 0, 0))); time.sleep(3600)",
        "report(UP[2]); time.sleep(3600)",
        "report(*UP, UP[0]); time.sleep(3600)",
        "report(*UP, Bye()); time.sleep(3600)",
        "report(*UP[:2], *UP[:2]); time.sleep(3600)",
    ],
)
async def test_what_has_no_place_on_the_pipe_ends_a_runner(tmp_path: Path, body: str) -> None:
    async with running(tmp_path, launch=scripted(body), policy=ONE_LIFE) as supervisor:
        state = await reach_status(supervisor, "failed")
        assert state.reason is not None
        assert state.reason.startswith("The runner broke the protocol: ")
        assert len(state.reason.splitlines()) == 1


async def test_a_frame_that_is_cut_off_is_a_crash(tmp_path: Path) -> None:
    async with running(tmp_path, launch=scripted("report(*UP); os.write(1, b'\\0\\0\\1\\0ab')"), policy=ONE_LIFE) as supervisor:
        state = await reach_status(supervisor, "failed")
        assert state.reason is not None
        assert "exited with status 0" in state.reason


async def test_an_orphan_that_holds_the_pipes_open_delays_nothing_for_long(tmp_path: Path) -> None:
    body = "import subprocess; subprocess.Popen(['sleep', '20'], start_new_session=True); sys.exit(4)"
    async with running(tmp_path, launch=scripted(body), policy=ONE_LIFE) as supervisor:
        with trio.fail_after(15):
            state = await reach_status(supervisor, "failed")
        assert state.reason is not None
        assert "status 4" in state.reason


@pytest.mark.parametrize("phase", ["loading", "warming_up"])
async def test_a_phase_that_takes_too_long_is_ended(tmp_path: Path, phase: str) -> None:
    limits = PhaseLimits(loading=0.5 if phase == "loading" else 60, warming_up=0.1)
    async with running(tmp_path, policy=ONE_LIFE, limits=limits, faults=[fault("hang", phase)]) as supervisor:
        state = await reach_status(supervisor, "failed")
        assert state.reason is not None
        assert phase.replace("_", " ") in state.reason


STOPS: dict[str, tuple[dict[str, Any], RunnerStatus]] = {
    "launching": ({"load_seconds": 30}, "idle"),
    "loading": ({"load_seconds": 30}, "loading"),
    "hanging while loading": ({"faults": [fault("hang", "loading")]}, "loading"),
    "warming up": ({"warm_up_seconds": 30}, "warming_up"),
    "ready": ({}, "ready"),
    "running": ({"stop_one_in": 0}, "running"),
    "hanging in a step": ({"stop_one_in": 0, "faults": [fault("hang", "step", 5)]}, "running"),
}


@pytest.mark.parametrize("phase", STOPS)
async def test_a_stop_in_any_phase_leaves_no_process(tmp_path: Path, phase: str) -> None:
    settings, status = STOPS[phase]
    ends: list[Event] = []

    async def ask() -> None:
        ends.append((await answer(supervisor, make_request("in flight", None)))[-1])

    async with running(tmp_path, **settings) as supervisor, trio.open_nursery() as nursery:
        if status == "running":
            await reach_status(supervisor, "ready")
            nursery.start_soon(ask)
        state = await reach_status(supervisor, status)
        with trio.fail_after(20):
            await supervisor.stop(0.2 if "hanging" in phase else 10)
        assert supervisor.state.status == "shutdown"
        assert supervisor.state.pid is None
        assert state.pid is None or is_gone(state.pid)
    for end in ends:
        assert isinstance(end, Failed)
        assert end.code == "runner_stopped"


async def test_a_process_that_minds_nothing_is_killed(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); report(*UP)\nwhile True: time.sleep(3600)"
    async with running(tmp_path, launch=scripted(body)) as supervisor:
        state = await reach_status(supervisor, "ready")
        await supervisor.stop(0)
        assert supervisor.state.status == "shutdown"
        assert state.pid is not None
        assert is_gone(state.pid)


async def test_a_frozen_process_is_killed_too(tmp_path: Path) -> None:
    async with running(tmp_path) as supervisor:
        state = await reach_status(supervisor, "ready")
        kill(state, signal.SIGSTOP)
        await supervisor.stop(0)
        assert supervisor.state.status == "shutdown"


async def test_stopping_twice_or_before_running_or_between_two_spawns(tmp_path: Path) -> None:
    command = load_command(make_fake(tmp_path))
    never_ran = Supervisor("test", command, LAUNCH)
    await never_ran.stop(1)
    assert never_ran.state.status == "shutdown"

    async with running(tmp_path) as supervisor:
        await reach_status(supervisor, "ready")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.stop, 5)
            nursery.start_soon(supervisor.stop, 5)
        await supervisor.stop(5)
        assert supervisor.state.status == "shutdown"

    policy = RestartPolicy(delay_first_seconds=3600)
    async with running(tmp_path, policy=policy) as supervisor:
        kill(await reach_status(supervisor, "ready"))
        await reach_status(supervisor, "failed")
        await supervisor.stop(5)
        assert supervisor.state.status == "failed"
        assert supervisor.state.spawn == 1


async def test_a_stop_is_not_cut_short_by_cancellation(tmp_path: Path) -> None:
    async with running(tmp_path) as supervisor:
        state = await reach_status(supervisor, "ready")
        with trio.CancelScope() as scope:
            scope.cancel()
            await supervisor.stop(5)
        assert state.pid is not None
        assert is_gone(state.pid)


async def test_cancelling_the_supervisor_kills_its_runner_and_ends_its_requests(tmp_path: Path) -> None:
    ends: list[Event] = []
    supervisor = Supervisor("test", load_command(make_fake(tmp_path, stop_one_in=0)), LAUNCH)

    async def ask() -> None:
        ends.append((await answer(supervisor, make_request("a", None)))[-1])

    async with trio.open_nursery() as asking:
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            state = await reach_status(supervisor, "ready")
            asking.start_soon(ask)
            await reach_status(supervisor, "running")
            nursery.cancel_scope.cancel()
        assert state.pid is not None
        assert is_gone(state.pid)
        assert supervisor.state.status == "shutdown"
    assert isinstance(ends[0], Failed)
    assert ends[0].code == "runner_stopped"


PARENT = """
import functools, os, sys, trio
sys.path.insert(0, {root!r})
from tests.inference.supervised import *
async def main():
    async with running(Path({directory!r}), **{settings!r}) as supervisor:
        await reach_status(supervisor, "ready")
        if {busy!r}:
            async with supervisor.generate(make_request("a", None)) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        print(supervisor.state.pid, flush=True)
                        await trio.sleep_forever()
        print(supervisor.state.pid, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


@pytest.mark.parametrize("busy", [False, True])
def test_a_runner_ends_with_its_node_also_when_that_is_killed(tmp_path: Path, busy: bool) -> None:
    settings = {"stop_one_in": 0, "faults": [fault("hang", "step", 3)]} if busy else {}
    script = PARENT.format(root=str(ROOT), directory=str(tmp_path), settings=settings, busy=busy)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
        parent.wait()
    try:
        assert wait_gone(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
async def test_an_idle_runner_lives_on_and_costs_nothing(tmp_path: Path) -> None:
    """A parent-death signal would have killed it: trio's worker thread that forked it retires after ten idle seconds."""
    async with running(tmp_path) as supervisor:
        state = await reach_status(supervisor, "ready")
        assert state.pid is not None
        before = psutil.Process(state.pid).cpu_times()
        await trio.sleep(30)
        after = psutil.Process(state.pid).cpu_times()
        assert supervisor.state == state
        assert after.user + after.system - before.user - before.system <= 0.05
        request = make_request()
        assert text_of(await answer(supervisor, request)) == expected_answer(request)


def test_the_table_of_transitions_is_that_of_the_interface() -> None:
    alive = {"idle", "connecting", "loading", "warming_up", "ready", "running"}
    for status, following in TRANSITIONS.items():
        assert following <= TRANSITIONS.keys()
        assert ("shutting_down" in following) == (status in alive)
        assert ("failed" in following) == (status not in ("shutdown", "failed"))
    assert TRANSITIONS["shutting_down"] == {"shutdown", "failed"}
