"""The models that this node runs: each on its way to disk, then in a runner that a supervisor owns."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
import trio
from msgspec import Struct

from inference.catalogue import parse_name, shown_name
from inference.models import FAKE_ARCHITECTURE, Model, ModelError, Progress
from inference.restart import RestartPolicy
from inference.runner_protocol import LoadModel
from inference.runner_state import Launch, RunnerState
from inference.supervisor import Supervisor
from node.config import Config
from node.records import StopPhase
from node.resources import core_count, device_memory_bytes, runner_memory_bytes

CONTEXT_DEFAULT = 8192
STOP_GRACE_SECONDS = 2.0  # for a runner with nothing left to do; it frees gigabytes in that time
STDERR_LOGGED = 1000  # characters of a failed runner's last words

Resolve = Callable[[str, Callable[[Progress], None]], Awaitable[Model]]
"""Has a model on disk: the name, and a callback for progress (called in trio). Raises ModelError."""

_log = structlog.get_logger("runners")


class RunnerSettings(Struct, frozen=True, kw_only=True):
    """What every runner on this device gets."""

    context: int | None  # tokens; None: min(model's, CONTEXT_DEFAULT)
    running_max: int | None
    memory_bytes: int  # 0: nothing runs here
    threads: int
    blas_cache: Path

    @classmethod
    def of(cls, config: Config) -> "RunnerSettings":
        """As configured, and as this device allows."""
        return cls(
            context=config.context,
            running_max=config.max_running,
            memory_bytes=runner_memory_bytes(config.max_memory_bytes, device_memory_bytes()),
            threads=core_count(),
            blas_cache=config.models_dir / "blas",
        )


def load_command(model: Model, settings: RunnerSettings) -> LoadModel:
    """What a runner is told about the model it is to load."""
    assert settings.memory_bytes > 0
    return LoadModel(
        engine="fake" if model.architecture == FAKE_ARCHITECTURE else "mlx",
        model_path=str(model.path),
        context=min(model.context_length, settings.context or CONTEXT_DEFAULT),
        running_max=settings.running_max,
        memory_bytes=settings.memory_bytes,
        threads=settings.threads,
        blas_cache=str(settings.blas_cache),
    )


class OnItsWay(Struct, frozen=True):
    """The model can't be served yet; it is being fetched, say, with `done` of `total` bytes (0: unknown)."""

    stage: str  # completes "the model x is ..."
    done: int = 0
    total: int = 0

    @property
    def text(self) -> str:
        """The stage, and how far it is."""
        return f"{self.stage} ({min(100, 100 * self.done // self.total)} %)" if self.total else self.stage


class Up(Struct, frozen=True):
    """The model is served, by a runner that seems to have `free` places."""

    running: int
    free: int
    kv_bytes: int


class Down(Struct, frozen=True):
    """The model will not be served any more; `reason` is one sentence."""

    reason: str


Phase = OnItsWay | Up | Down


def phase_of(progress: Progress | None, state: RunnerState | None, failure: str | None) -> Phase:
    """How far a model is, from what its store, its supervisor and its end have said."""
    if failure is not None:
        return Down(failure)
    if state is None:
        stage = "looked for" if progress is None else _STAGES.get(progress.stage, progress.stage)
        done, total = (0, 0) if progress is None or progress.total is None else (progress.done, progress.total)
        return OnItsWay(f"being {stage}", done, total)
    if state.status in ("ready", "running") and state.load is not None:
        return Up(state.load.running, state.load.running_max - state.load.running, state.load.kv_bytes)
    if state.status == "loading":
        return OnItsWay("being loaded", state.done, state.total)
    if state.status == "failed":
        return OnItsWay("being started again after a crash")
    if state.status in ("shutting_down", "shutdown"):
        return Down("The runner was stopped.")
    return OnItsWay("warming up" if state.status == "warming_up" else "being started")


_STAGES = {"fetching": "fetched", "converting": "converted", "hashing": "checked", "waiting": "prepared by another process"}


class LocalInstance:
    """One model on this node. `on_change` is called, in trio, after anything about it has changed."""

    def __init__(self, instance_id: str, asked: str, settings: RunnerSettings, created: float) -> None:
        self.instance_id = instance_id
        self.asked = asked
        self.created = created  # Unix seconds
        self.model: Model | None = None
        self.supervisor: Supervisor | None = None
        self.progress: Progress | None = None
        self.stop_phase: StopPhase | None = None  # of the order to end its runner
        self.on_change: list[Callable[[], None]] = []
        self._settings = settings
        self._failure: str | None = None

    def __repr__(self) -> str:
        return f"LocalInstance({self.name!r}, {self.phase})"

    @property
    def name(self) -> str:
        """As people see it; before the model is on disk, by the spelling of what was asked for."""
        if self.model is not None:
            return self.model.name
        try:
            return shown_name(parse_name(self.asked))
        except ModelError:
            return self.asked

    @property
    def phase(self) -> Phase:
        """How far it is."""
        return phase_of(self.progress, self.supervisor.state if self.supervisor else None, self._failure)

    @property
    def context(self) -> int:
        """Prompt and answer tokens of one request; 0 before the model is on disk."""
        if self.supervisor is not None and self.supervisor.state.info is not None:
            return self.supervisor.state.info.context
        return load_command(self.model, self._settings).context if self.model else 0

    async def settled(self) -> Up | Down:
        """Wait until it is up or down."""
        change = trio.Event()

        def see() -> None:
            if not isinstance(self.phase, OnItsWay):
                change.set()

        self.on_change.append(see)
        see()
        try:
            await change.wait()
        finally:
            self.on_change.remove(see)
        phase = self.phase
        return phase if isinstance(phase, Up | Down) else await self.settled()

    def _changed(self) -> None:
        for callback in tuple(self.on_change):
            callback()

    async def run(self, resolve: Resolve, launch: Launch, policy: RestartPolicy, wall_clock: Callable[[], float]) -> None:
        """Have the model on disk, then in a runner, until that is stopped or given up. The last phase is Down."""
        try:
            self.model = await resolve(self.asked, self._on_progress)
        except ModelError as error:
            self._fail(str(error))
            return
        command = load_command(self.model, self._settings)
        supervisor = Supervisor(f"{self.instance_id}.0", command, launch, policy=policy, wall_clock=wall_clock)
        self.supervisor = supervisor
        self._changed()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow, supervisor)
            await supervisor.run()
            nursery.cancel_scope.cancel()
        self._fail(supervisor.state.reason or "The runner was stopped.")

    async def stop(self, grace: float) -> None:
        """End its runner for good, in steps that all can see: the order, its acknowledgement, the end (`StopPhase`)."""
        if self.supervisor is None:
            return
        for phase in (StopPhase.RUNNING, StopPhase.ACKNOWLEDGED):
            if self.stop_phase is None or self.stop_phase < phase:
                self.stop_phase = phase
                self._changed()
        await self.supervisor.stop(grace)

    def _on_progress(self, progress: Progress) -> None:
        self.progress = progress
        self._changed()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._changed()

    async def _follow(self, supervisor: Supervisor) -> None:
        """Pass the supervisor's changes on, and log those of status."""
        revision, shown = -1, ""
        while True:
            revision = await supervisor.wait_change(revision)
            state = supervisor.state
            status = "ready" if state.status == "running" else state.status
            if status != shown:
                shown = status
                if status == "failed":
                    _log.warning("runner failed", model=self.name, reason=state.reason, stderr=state.stderr[-STDERR_LOGGED:])
                else:
                    _log.debug("runner " + status.replace("_", " "), model=self.name, pid=state.pid)
            self._changed()


class LocalRunners:
    """All instances of this node, by id."""

    def __init__(
        self,
        settings: RunnerSettings,
        resolve: Resolve,
        launch: Launch,
        nursery: trio.Nursery,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.instances: dict[str, LocalInstance] = {}
        self.policy = RestartPolicy()
        self._settings = settings
        self._resolve = resolve
        self._launch = launch
        self._nursery = nursery
        self._wall_clock = wall_clock

    def start(self, instance_id: str, model: str, created: float) -> LocalInstance:
        """Begin to have a model here; its phase tells how that goes."""
        assert instance_id not in self.instances
        instance = LocalInstance(instance_id, model, self._settings, created)
        self.instances[instance_id] = instance
        self._nursery.start_soon(instance.run, self._resolve, self._launch, self.policy, self._wall_clock)
        return instance

    async def stop(self, grace: float = STOP_GRACE_SECONDS) -> None:
        """Stop every runner; what is still being fetched is left off when the nursery is cancelled."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for instance in self.instances.values():
                    nursery.start_soon(instance.stop, grace)


@asynccontextmanager
async def open_local_runners(
    settings: RunnerSettings, resolve: Resolve, launch: Launch, *, wall_clock: Callable[[], float] = time.time
) -> AsyncIterator[LocalRunners]:
    """Runners that live no longer than the block, however it is left."""
    async with trio.open_nursery() as nursery:
        runners = LocalRunners(settings, resolve, launch, nursery, wall_clock)
        try:
            yield runners
        finally:
            await runners.stop()
            nursery.cancel_scope.cancel()
