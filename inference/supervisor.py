"""The object in a node that owns one runner: it launches it, feeds it, sees it end, and starts it again.

    run:  launch -> loading -> warming_up -> ready <-> running      (status transitions: runner_protocol.TRANSITIONS)
            ^                                          |
            +--- after a growing delay --- failed <----+  its process ended, and nobody had asked for that

Requests come in by `generate`, go to the runner's stdin over a bounded queue, and their events come back demultiplexed, each
request's in a stream of its own. The reader of the runner's pipe never waits for anybody.
"""

import functools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import trio
from msgspec import Struct

from inference.event_stream import EventStream
from inference.requests import ErrorCode, Event, Failed, Load, Refused, Request
from inference.restart import Crash, RestartPolicy, counted, restart_delay
from inference.runner_protocol import (
    TRANSITIONS,
    Bye,
    Cancel,
    LoadFailed,
    LoadModel,
    Phase,
    Ready,
    Report,
    RunnerStatus,
    Step,
)
from inference.runner_state import Launch, RunnerState
from inference.spawn import Ending, Spawn
from p2p.wire import ProtocolViolation

NO_ROOM = Load(0, 0, 0, 0)
CANCEL_SECONDS_MAX = 5.0  # for a cancelled request's end; the engine hears of it after its current step
END_SECONDS_MAX = 15.0  # for `run` to notice that the process is gone


class PhaseLimits(Struct, frozen=True, kw_only=True):
    """How long start-up may take, in seconds; generous, for large models on slow disks."""

    loading: float = 3600.0
    warming_up: float = 600.0


class Supervisor:
    """One runner, over all its spawns."""

    def __init__(
        self,
        runner_id: str,
        command: LoadModel,
        launch: Launch,
        *,
        policy: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
        limits: PhaseLimits = PhaseLimits(),  # noqa: B008 - frozen
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._command = command
        self._launch = launch
        self._policy = policy
        self._limits = limits
        self._wall_clock = wall_clock
        self._state = RunnerState(runner_id=runner_id, status="idle", since=wall_clock())
        self._revision = 0
        self._change = trio.Event()
        self._spawn: Spawn | None = None
        self._streams: dict[str, EventStream] = {}  # of the current spawn: each is here until its end event
        self._began = False
        self._stop_asked = trio.Event()
        self._ended = trio.Event()

    def __repr__(self) -> str:
        state = self._state
        return f"<Supervisor {state.runner_id} spawn {state.spawn} {state.status}, {len(self._streams)} requests>"

    @property
    def state(self) -> RunnerState:
        """The runner as it is now."""
        return self._state

    @property
    def revision(self) -> int:
        """Rises with every change of `state`."""
        return self._revision

    async def wait_change(self, revision: int) -> int:
        """Wait until `revision` is no longer the current one; returns the current one."""
        while self._revision == revision:
            await self._change.wait()
        return self._revision

    def _show(self, state: RunnerState) -> None:
        self._state = state
        self._revision += 1
        self._change.set()
        self._change = trio.Event()

    def _become(self, status: RunnerStatus, **changes: object) -> None:
        assert status in TRANSITIONS[self._state.status], f"{self._state.status} -> {status}"
        self._show(msgspec.structs.replace(self._state, status=status, since=self._wall_clock(), **changes))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the runner until it is stopped or given up (`state.status` is shutdown or failed then).

        Reports started at once, before anything is launched. Cancelling it kills the process.
        """
        assert not self._began, "a supervisor runs once"
        self._began = True
        task_status.started()
        crashes: tuple[Crash, ...] = ()
        try:
            while not self._stop_asked.is_set():
                ending = await self._live()
                if self._stop_asked.is_set():
                    return
                now = trio.current_time()
                crashes = counted(self._policy, (*crashes, Crash(now, self._state.info is not None)), now)
                delay = None if ending.hopeless else restart_delay(self._policy, crashes, now)
                self._fail(ending, len(crashes) if delay is None and not ending.hopeless else None)
                if delay is None:
                    return
                with trio.move_on_after(delay):
                    await self._stop_asked.wait()
        finally:
            self._shut()
            self._ended.set()

    async def _live(self) -> Ending:
        """One spawn, from launch to end."""
        number = self._state.spawn + 1
        self._load_failure = None
        self._show(RunnerState(runner_id=self._state.runner_id, status="idle", since=self._wall_clock(), spawn=number))
        try:
            process = await self._launch(self._command)
        except OSError as error:
            return Ending(f"The runner can't be started: {error}.")
        self._spawn = spawn = Spawn(process)
        try:
            if self._stop_asked.is_set():
                spawn.put_down("The runner was stopped.")
            else:
                self._become("loading", pid=spawn.pid)
                spawn.send(self._command)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._limit_phases, spawn)
                ending = await spawn.serve(functools.partial(self._on_report, spawn))
                nursery.cancel_scope.cancel()
        finally:
            self._spawn = None
        return ending

    async def _limit_phases(self, spawn: Spawn) -> None:
        phases: tuple[tuple[RunnerStatus, float], ...] = (
            ("loading", self._limits.loading),
            ("warming_up", self._limits.warming_up),
        )
        for status, seconds in phases:
            with trio.move_on_after(seconds) as limit:
                while self._state.status == status:
                    await self.wait_change(self._revision)
            if limit.cancelled_caught:
                spawn.put_down(f"The runner was {status.replace('_', ' ')} for longer than {seconds:g} seconds.")
                return

    def _on_report(self, spawn: Spawn, report: Report) -> None:
        """Take in what the runner says.

        Raises: ProtocolViolation where that has no place in its status.
        """
        status = self._state.status
        if isinstance(report, Step) and status in ("ready", "running", "shutting_down"):
            self._on_step(report)
        elif isinstance(report, Bye) and status == "shutting_down":
            pass  # its exit says the same
        elif isinstance(report, Phase | Ready) and status == "shutting_down":
            pass  # sent before it heard of that
        elif isinstance(report, LoadFailed) and status in ("loading", "warming_up", "shutting_down"):
            spawn.expect_end(report.reason)
        elif isinstance(report, Phase) and status in ("loading", "warming_up"):
            self._on_phase(report)
        elif isinstance(report, Ready) and status == "warming_up":
            load = Load(0, report.info.running_max, 0, report.info.kv_bytes_max)
            self._become("ready", info=report.info, load=load)
        else:
            raise ProtocolViolation(f"{type(report).__name__} while {status}")

    def _on_phase(self, phase: Phase) -> None:
        if phase.phase != self._state.status:
            if phase.phase not in TRANSITIONS[self._state.status]:
                raise ProtocolViolation(f"{phase.phase} after {self._state.status}")
            self._become(phase.phase)
        elif phase.phase == "loading":
            self._show(msgspec.structs.replace(self._state, done=phase.done, total=phase.total))

    def _on_step(self, step: Step) -> None:
        streams = self._streams
        for event in step.events:
            stream = streams.get(event.request_id)
            if stream is not None:
                stream.deliver(event)
                if stream.ended.is_set():
                    del streams[event.request_id]
        if step.load == self._state.load:
            return
        status: RunnerStatus = "running" if step.load.running else "ready"
        if self._state.status in ("shutting_down", status):
            self._show(msgspec.structs.replace(self._state, load=step.load))
        else:
            self._become(status, load=step.load)

    def _fail(self, ending: Ending, crash_count: int | None) -> None:
        reason = ending.reason
        if crash_count is not None:
            reason = f"{reason.removesuffix('.')}, for the {_ordinal(crash_count)} time, and is not started again."
        self._fail_streams("runner_crashed", f"{ending.reason.removesuffix('.')} while it worked on this request.")
        self._become("failed", reason=reason, stderr=ending.stderr, pid=None, load=None)

    def _fail_streams(self, code: ErrorCode, message: str) -> None:
        for request_id, stream in self._streams.items():
            stream.deliver(Failed(request_id, code, message))
        self._streams.clear()

    def _shut(self) -> None:
        """The last status, of a runner that was asked to stop or whose node goes down."""
        self._fail_streams("runner_stopped", "The runner was stopped while it worked on this request.")
        if self._state.status not in ("shutting_down", "shutdown", "failed"):
            self._become("shutting_down")
        if self._state.status == "shutting_down":
            self._become("shutdown", pid=None, load=None)

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[AsyncIterator[Event]]:
        """Submit a request; the block gets its events, which end with Refused, Finished or Failed.

        Leaving the block cancels what still runs and waits, within a bound, for its end, so that its place is really free.
        With no ready runner the only event is a Refused whose load has no room (running_max 0). An id that is still in use
        here is Failed.
        """
        stream = EventStream()
        spawn = self._submitted(request, stream)
        try:
            yield stream
        finally:
            stream.close()
            if spawn is not None and not stream.ended.is_set():
                spawn.send(Cancel(request.request_id))
                with trio.move_on_after(CANCEL_SECONDS_MAX, shield=True):
                    await stream.ended.wait()

    def _submitted(self, request: Request, stream: EventStream) -> Spawn | None:
        """The spawn that was given the request; None where the stream already has its end."""
        request_id = request.request_id
        spawn = self._spawn
        if request_id in self._streams:
            stream.deliver(Failed(request_id, "invalid_parameter", f"A request with the id {request_id} is still running."))
        elif spawn is None or spawn.ending or self._state.status not in ("ready", "running"):
            stream.deliver(Refused(request_id, 0, NO_ROOM))
        else:
            try:
                spawn.submit(request)
            except ValueError as error:
                stream.deliver(Failed(request_id, "invalid_parameter", f"The request can't be passed on: {error}."))
            else:
                self._streams[request_id] = stream
                return spawn
        return None

    async def stop(self, grace: float) -> None:
        """End the runner for good: shutdown frame, after `grace` seconds SIGTERM, then SIGKILL; returns when it is gone.

        Shielded from cancellation, and bounded. Requests in flight end as Failed `runner_stopped`.
        """
        self._stop_asked.set()
        if not self._began:
            self._began = True
            self._shut()
            self._ended.set()
        with trio.CancelScope(shield=True):
            if self._spawn is not None:
                if self._state.status != "shutting_down":
                    self._become("shutting_down")
                await self._spawn.wind_up(grace)
            with trio.move_on_after(END_SECONDS_MAX):
                await self._ended.wait()


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number if number < 20 else number % 10, "th")
    return f"{number}{suffix}"
