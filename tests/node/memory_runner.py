"""A runner process in memory: the real core and the fake engine behind the real frames, paced by trio's clock.

Tests of the node run it under a real Supervisor; they say when loading ends, how long a step takes, and when it dies.
"""

import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
from trio.testing import memory_stream_one_way_pair

from inference.models import FAKE_ARCHITECTURE, Model, Progress
from inference.requests import ChatPrompt, Request, Sampling
from inference.runner.core import Core
from inference.runner.fake_engine import FakeEngine, FakeSettings
from inference.runner_protocol import (
    COMMANDS,
    REPORTS,
    Bye,
    Cancel,
    Command,
    LoadFailed,
    LoadModel,
    Phase,
    Ready,
    Report,
    Shutdown,
    Submit,
)
from node.executors import Executors
from node.local_runners import LocalRunners, RunnerSettings, open_local_runners
from node.node import Node, NodeSettings
from tests.node.lone_facts import LoneFacts

NODE_ID = "12D3KooWtest"


class MemoryRunner:
    """See inference.runner_state.RunnerProcess."""

    def __init__(self, pid: int, device: "MemoryDevice") -> None:
        self.pid = pid
        self.stdin: trio.abc.SendStream
        self.stdout: trio.abc.ReceiveStream
        self.stderr: trio.abc.ReceiveStream
        self.stdin, self._commands = memory_stream_one_way_pair()
        self._reports, self.stdout = memory_stream_one_way_pair()
        self._stderr, self.stderr = memory_stream_one_way_pair()
        self._device = device
        self._life = trio.CancelScope()
        self._status: int | None = None
        self._ended = trio.Event()
        self.core: Core | None = None
        self._thawed = trio.Event()
        self._thawed.set()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It takes no request on in this block, nor refuses one."""
        self._thawed = trio.Event()
        yield
        self._thawed.set()

    @property
    def ended(self) -> bool:
        """Whether it is at its end."""
        return self._status is not None

    async def wait(self) -> int:
        await self._ended.wait()
        assert self._status is not None
        return self._status

    def terminate(self) -> None:
        self.die(-15)

    def kill(self) -> None:
        self.die(-9)

    def die(self, status: int) -> None:
        """End with this status wherever it is."""
        if self._status is None:
            self._status = status
            self._life.cancel()

    async def live(self) -> None:
        with self._life:
            await self._work()
            self._status = 0
        for pipe in (self._commands, self._reports, self._stderr):
            await trio.aclose_forcefully(pipe)
        self._ended.set()

    async def _send(self, report: Report) -> None:
        await self._reports.send_all(REPORTS.encode(report))

    async def _work(self) -> None:
        commands_in, commands = trio.open_memory_channel[Command](1000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, commands_in)
            command = await commands.receive()
            assert isinstance(command, LoadModel)
            await self._send(Phase("loading", 0, 100))
            if self._device.load_error is not None:
                await self._send(LoadFailed(self._device.load_error))
                self.die(1)
            await self._device.may_load.wait()
            await self._send(Phase("warming_up"))
            engine = FakeEngine(
                self._device.settings, command.context, command.running_max or self._device.settings.running_max, lambda _: None
            )
            self.core = Core(engine)
            await self._send(Ready(engine.info))
            await self._serve(self.core, commands)
            nursery.cancel_scope.cancel()

    async def _read(self, commands: trio.MemorySendChannel[Command]) -> None:
        reader = COMMANDS.reader()
        while data := await self._commands.receive_some(1 << 16):
            for command in reader.feed(data):
                commands.send_nowait(command)
        self.die(0)

    async def _serve(self, core: Core, commands: trio.MemoryReceiveChannel[Command]) -> None:
        while True:
            with trio.move_on_after(math.inf if core.idle else self._device.step_seconds):
                match await commands.receive():
                    case Submit(request):
                        self._device.submitted.append(request)
                        if self._device.deadly_text is not None and self._device.deadly_text in str(request.prompt):
                            self.die(-11)
                        await self._thawed.wait()
                        core.submit(request)
                    case Cancel(request_id):
                        core.cancel(request_id)
                    case Shutdown():
                        core.fail_all("runner_stopped", "The runner was told to stop.")
                        await self._report(core)
                        await self._send(Bye())
                        return
                await self._report(core)
                continue
            core.step()
            await self._report(core)

    async def _report(self, core: Core) -> None:
        step = core.report()
        if step is not None:
            await self._send(step)


@dataclass
class MemoryDevice:
    """What the runners of a test are like; tests change it as they go."""

    settings: FakeSettings = field(default_factory=lambda: FakeSettings(answer_tokens=4))
    step_seconds: float = 1.0
    load_error: str | None = None
    deadly_text: str | None = None  # a prompt with it kills the runner
    may_load: trio.Event = field(default_factory=trio.Event)
    may_resolve: trio.Event = field(default_factory=trio.Event)
    submitted: list[Request] = field(default_factory=list)
    runners: list[MemoryRunner] = field(default_factory=list)

    async def resolve(self, name: str, progress: Callable[[Progress], None]) -> Model:
        progress(Progress("fetching", 34, 100))
        await self.may_resolve.wait()
        return Model(
            model_hash="ab" * 32,
            name=name,
            path=Path("/models/fake"),
            architecture=FAKE_ARCHITECTURE,
            parameters=1,
            weight_bytes=1,
            layers=1,
            context_length=4096,
            quantization="none",
        )


@dataclass
class Bench:
    """A node whose runners are in memory."""

    node: Node
    runners: LocalRunners
    device: MemoryDevice

    def runner(self) -> MemoryRunner:
        return self.device.runners[-1]


@asynccontextmanager
async def open_bench(
    device: MemoryDevice,
    *,
    waiting_max: int = 32,
    task_seconds: float = 600.0,
    aliases: dict[str, str] | None = None,
    joining_seconds: float = 0.0,
) -> AsyncIterator[Bench]:
    """A node with no model yet, on virtual time."""
    async with trio.open_nursery() as nursery:

        async def launch(_command: LoadModel) -> MemoryRunner:
            runner = MemoryRunner(1000 + len(device.runners), device)
            device.runners.append(runner)
            nursery.start_soon(runner.live)
            return runner

        settings = RunnerSettings(context=None, running_max=None, memory_bytes=1 << 30, threads=1, blas_cache=Path("/blas"))
        async with open_local_runners(settings, device.resolve, launch) as runners:
            node_settings = NodeSettings(aliases=aliases or {}, waiting_max=waiting_max, task_timeout_seconds=task_seconds)
            facts, executors = LoneFacts(NODE_ID), Executors()
            node = Node(
                NODE_ID,
                "test",
                node_settings,
                facts=facts,
                runners=runners,
                executors=executors,
                nursery=nursery,
                joining_seconds=joining_seconds,
            )
            nursery.start_soon(node.reconciler.run)
            yield Bench(node, runners, device)
        nursery.cancel_scope.cancel()


def chat(text: str = "hi", *, max_tokens: int | None = 4) -> Request:
    """A request as a door makes it."""
    return Request(
        request_id="from-the-door",
        prompt=ChatPrompt(messages=({"role": "user", "content": text},)),
        sampling=Sampling(seed=1),
        max_tokens=max_tokens,
    )
