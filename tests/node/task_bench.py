"""Homes and heads on a memory network: real supervisors over runners in memory, on trio's clock."""

import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import trio

from inference.requests import Accepted, Event, Finished, Load, Request, Sampling, TextPrompt, Tokens
from inference.runner import fake_engine
from inference.runner.core import Core
from inference.runner.fake_engine import FakeSettings
from inference.runner_protocol import LoadModel
from inference.supervisor import NO_ROOM, Supervisor
from node.head_task import HeadTask
from node.records import RankPhase, TaskId
from node.task_head import Head
from node.task_protocol import Submit, request_id
from node.task_stream import HeadLost, Heads
from p2p.dialler import Dialler
from p2p.ids import NodeId
from p2p.memory_transport import MemoryNetwork
from p2p.transport import Transport
from tests.fake_model import expected_text, load_command
from tests.node.memory_runner import MemoryDevice, MemoryRunner
from tests.p2p.transport_lab import CLUSTER, connect, new_identity

INSTANCE = 7
MODEL_HASH = "aa" * 32
EPOCH = 3
ENDLESS = FakeSettings(answer_tokens=None, stop_one_in=0)  # an answer is as long as it may be


class OneInstance:
    """A supervisor as `node.head_task.LocalExecutor`."""

    model_hash = MODEL_HASH
    epoch = EPOCH

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.starts: list[str] = []  # what the runner was given, by request id

    @property
    def load(self) -> Load:
        return self.supervisor.state.load or NO_ROOM

    def generate(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        self.starts.append(request.request_id)
        return self.supervisor.generate(request)


def endless_device(*, running_max: int = 64, step_seconds: float = 1.0) -> MemoryDevice:
    """Runners that take some requests at once, and make a token of each in a step."""
    settings = msgspec.structs.replace(ENDLESS, running_max=running_max)
    return MemoryDevice(settings=settings, step_seconds=step_seconds)


class HeadNode:
    """A head, and what it told its node."""

    def __init__(self, transport: Transport, executor: OneInstance, nursery: trio.Nursery, device: MemoryDevice) -> None:
        self.transport = transport
        self.device = device
        self.executor = executor
        self.reports: list[tuple[TaskId, int, int, RankPhase, str]] = []
        self.levels: list[tuple[NodeId, str, int, float]] = []
        self.answered: list[bool] = []
        self.ended = 0
        self._changed = trio.Event()
        self.boots: dict[int, bytes] = {}  # what the replicated state would know
        self.head = Head(
            self,
            nursery,
            report=lambda *report: self.reports.append(report),
            on_waiting=lambda *level: self.levels.append(level),
            on_answered=self._on_answered,
            on_ended=self._on_ended,
            boot_owner=self.boots.get,
        )
        self.head.serve_on(transport)

    def _on_answered(self, task: HeadTask) -> None:
        self.answered.append(task.accepted)
        self._change()

    def _on_ended(self, _task: HeadTask) -> None:
        self.ended += 1
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, seen: Callable[[], bool]) -> None:
        """Wait until what was answered and ended is as wanted."""
        while not seen():
            await self._changed.wait()

    def instance(self, instance_id: int) -> OneInstance | None:
        return self.executor if instance_id == INSTANCE else None

    @property
    def node_id(self) -> NodeId:
        return self.transport.node_id

    @property
    def core(self) -> Core:
        core = self.device.runners[-1].core
        assert core is not None
        return core

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing is kept."""
        unanswered = self.head.unanswered
        return (
            self.executor.load.running == 0
            and not list(self.head.tasks)
            and (unanswered.count, unanswered.prompt_bytes) == (0, 0)
            and all(home.count == home.large == 0 for home in self.head._homes.values())
        )

    @property
    def phases(self) -> list[RankPhase]:
        return [phase for _, _, _, phase, _ in self.reports]


@asynccontextmanager
async def open_head(
    network: MemoryNetwork, device: MemoryDevice, *, node_id: NodeId | None = None, boot: int = 1
) -> AsyncIterator[HeadNode]:
    """A node that is the head of one ready instance, whose runner is in memory."""
    opening = network.open_transport(node_id or new_identity().node_id, CLUSTER, boot=boot.to_bytes(8, "big"))
    async with memory_supervisor(device) as supervisor, run_head(opening, supervisor, device) as head:
        yield head


@asynccontextmanager
async def memory_supervisor(device: MemoryDevice) -> AsyncIterator[Supervisor]:
    """A supervisor of one of the device's runners, at work."""
    async with trio.open_nursery() as nursery:

        async def launch(_command: LoadModel) -> MemoryRunner:
            runner = MemoryRunner(1000 + len(device.runners), device)
            device.runners.append(runner)
            nursery.start_soon(runner.live)
            return runner

        device.may_load.set()
        supervisor = Supervisor("test.0", load_command(Path("/fake"), context=1 << 20), launch)
        await nursery.start(supervisor.run)
        yield supervisor
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def run_head(
    opening: AbstractAsyncContextManager[Transport], supervisor: Supervisor, device: MemoryDevice | None = None
) -> AsyncIterator[HeadNode]:
    """A head on any transport, once its runner is ready."""
    while supervisor.state.status != "ready":
        await supervisor.wait_change(supervisor.revision)
    async with opening as transport, trio.open_nursery() as nursery:
        yield HeadNode(transport, OneInstance(supervisor), nursery, device or MemoryDevice())
        nursery.cancel_scope.cancel()


@dataclass
class HomeNode:
    transport: Transport
    dialler: Dialler
    heads: Heads
    boot: int
    pulls: list[tuple[NodeId, int, int]]
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def node_id(self) -> NodeId:
        return self.transport.node_id

    def make(
        self,
        text: str = "hello",
        *,
        max_tokens: int = 4,
        seconds: float = 600.0,
        number: int | None = None,
        attempt: int = 1,
        instance_id: int = INSTANCE,
        **more: object,
    ) -> Submit:
        number = next(self._numbers) if number is None else number
        submit = make_submit(TaskId(self.boot, number), attempt, text, max_tokens)
        return msgspec.structs.replace(submit, seconds_left=seconds, instance_id=instance_id, **more)

    @property
    def quiet(self) -> bool:
        """Nothing is left of any attempt."""
        return all(not link._attempts and not link._outbox._unsent for link in self.heads._links.values())


def make_submit(task: TaskId, attempt: int = 1, text: str = "hello", max_tokens: int = 4) -> Submit:
    request = Request(
        request_id=request_id(task, attempt), prompt=TextPrompt(text), sampling=Sampling(seed=1), max_tokens=max_tokens
    )
    return Submit(
        number=task.number,
        attempt=attempt,
        instance_id=INSTANCE,
        model_hash=MODEL_HASH,
        epoch=EPOCH,
        request=request,
        seconds_left=600.0,
        version=5,
    )


def open_home(network: MemoryNetwork, *heads: HeadNode, boot: int = 1 << 40) -> AbstractAsyncContextManager[HomeNode]:
    """A node that knows these heads, and dials them again whenever they are lost."""
    transport = network.open_transport(new_identity().node_id, CLUSTER, boot=boot.to_bytes(8, "big"))
    return run_home(transport, *heads, boot=boot, randomness=network.randomness)


@asynccontextmanager
async def run_home(
    opening: AbstractAsyncContextManager[Transport],
    *heads: HeadNode,
    boot: int,
    randomness: random.Random | None = None,
) -> AsyncIterator[HomeNode]:
    """A home on any transport."""
    async with opening as transport, trio.open_nursery() as nursery:
        dialler = Dialler(transport, randomness=randomness)
        pulls: list[tuple[NodeId, int, int]] = []
        made = Heads(transport, boot, nursery, on_pull=lambda *pull: pulls.append(pull))
        for head in heads:
            await connect(transport, head.transport)
            dialler.know(head.node_id, head.transport.addresses)
        nursery.start_soon(dialler.run)
        yield HomeNode(transport, dialler, made, boot, pulls)
        nursery.cancel_scope.cancel()


def expected_ids(prompt_ids: Sequence[int], request: Request) -> list[int]:
    """What an endless device makes of a request, to its last token."""
    state, key = fake_engine.history(prompt_ids), fake_engine.request_key(request.sampling)
    ids: list[int] = []
    for number in range(request.max_tokens or 0):
        draw = number if fake_engine.counts_draws(request.sampling) else 0
        value = fake_engine.drawn(state, key, draw)
        ids.append(fake_engine.token_of(value, ids[-1] if ids else -1, number, ENDLESS))
        state = fake_engine.history(ids[-1:], state)
    return ids


class Reader:
    """A client that reads one attempt to its end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.error: HeadLost | None = None
        self.scope = trio.CancelScope()
        self.ended_at = 0.0
        self.changed = trio.Event()

    async def read(self, home: HomeNode, node_id: NodeId, submit: Submit) -> None:
        try:
            with self.scope:
                async with home.heads.submit(node_id, submit) as events:
                    async for event in events:
                        self.events.append(event)
                        self.changed.set()
                        self.changed = trio.Event()
        except HeadLost as error:
            self.error = error
        finally:
            self.ended_at = trio.current_time()
            self.changed.set()

    async def reach(self, count: int) -> None:
        """Until so many events have come."""
        while len(self.events) < count:
            await self.changed.wait()

    async def end(self) -> None:
        """Until it has come to its end, whatever that is."""
        while not self.ended_at:
            await self.changed.wait()

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Tokens))

    @property
    def ids(self) -> list[int]:
        return [token_id for event in self.events if isinstance(event, Tokens) for token_id in event.token_ids]

    def whole(self, submit: Submit) -> bool:
        """Whether the answer is exactly the one that a runner by itself gives, from beginning to end."""
        first, end = self.events[0], self.events[-1]
        assert isinstance(first, Accepted), first
        ids = expected_ids(first.prompt_ids, submit.request)
        assert self.ids == ids
        assert self.text == expected_text(ids)
        return isinstance(end, Finished) and end.reason == "length" and self.error is None
