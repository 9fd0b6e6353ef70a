"""Homes and heads on a memory network: real supervisors over runners in memory, on trio's clock."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import trio

from inference.requests import Accepted, Event, Finished, Load, Request, Sampling, TextPrompt, Tokens
from inference.runner.fake_engine import FakeSettings
from inference.runner_protocol import LoadModel
from inference.supervisor import NO_ROOM, Supervisor
from node.head_task import HeadTask
from node.records import RankPhase, TaskId
from node.task_head import Head
from node.task_protocol import Submit, request_id
from node.task_stream import Heads
from p2p.dialler import Dialler
from p2p.ids import NodeId
from p2p.memory_transport import MemoryNetwork
from p2p.transport import Transport
from tests.fake_model import expected_ids, expected_text
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


@dataclass
class HeadNode:
    transport: Transport
    head: Head
    device: MemoryDevice
    executor: OneInstance
    reports: list[tuple[TaskId, int, int, RankPhase, str]] = field(default_factory=list)
    levels: list[tuple[NodeId, str, int, float]] = field(default_factory=list)
    answered: list[HeadTask] = field(default_factory=list)
    boot_owner: Callable[[int], bytes | None] = lambda _boot: None

    @property
    def node_id(self) -> NodeId:
        return self.transport.node_id

    @property
    def runner(self) -> MemoryRunner:
        return self.device.runners[-1]

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing is kept."""
        core = self.runner.core
        unanswered = self.head.unanswered
        return (
            core is not None
            and core.idle
            and not list(self.head.tasks)
            and (unanswered.count, unanswered.prompt_bytes) == (0, 0)
            and all(home.count == home.large == 0 for home in self.head._homes.values())
        )

    def instance(self, instance_id: int) -> OneInstance | None:
        return self.executor if instance_id == INSTANCE else None


@asynccontextmanager
async def open_head(
    network: MemoryNetwork, device: MemoryDevice, *, node_id: NodeId | None = None, boot: int = 1
) -> AsyncIterator[HeadNode]:
    """A node that is the head of one ready instance."""
    async with (
        trio.open_nursery() as nursery,
        network.open_transport(node_id or new_identity().node_id, CLUSTER, boot=boot.to_bytes(8, "big")) as transport,
    ):
        async with trio.open_nursery() as inner:

            async def launch(_command: LoadModel) -> MemoryRunner:
                runner = MemoryRunner(1000 + len(device.runners), device)
                device.runners.append(runner)
                nursery.start_soon(runner.live)
                return runner

            device.may_load.set()
            command = LoadModel(
                engine="fake",
                model_path="/fake",
                context=1 << 16,
                running_max=None,
                memory_bytes=1 << 30,
                threads=1,
                blas_cache="/",
            )
            supervisor = Supervisor("test.0", command, launch)
            await inner.start(supervisor.run)
            while supervisor.state.status != "ready":
                await supervisor.wait_change(supervisor.revision)
            yield serve_head(transport, inner, device, OneInstance(supervisor))
            inner.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


def serve_head(transport: Transport, nursery: trio.Nursery, device: MemoryDevice, executor: OneInstance) -> HeadNode:
    node: HeadNode
    head = Head(
        _Late(lambda: node),
        nursery,
        report=lambda *report: node.reports.append(report),
        on_waiting=lambda *level: node.levels.append(level),
        on_answered=lambda task: node.answered.append(task),
        boot_owner=lambda boot: node.boot_owner(boot),
    )
    node = HeadNode(transport, head, device, executor)
    head.serve_on(transport)
    return node


class _Late:
    def __init__(self, node: Callable[[], HeadNode]) -> None:
        self._node = node

    def instance(self, instance_id: int) -> OneInstance | None:
        return self._node().instance(instance_id)


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
        return make_submit(self.boot, number, attempt, text, max_tokens, seconds, instance_id=instance_id, **more)

    @property
    def quiet(self) -> bool:
        """Nothing is left of any attempt."""
        return all(not link._attempts and not link._outbox._unsent for link in self.heads._links.values())


def make_submit(
    boot: int,
    number: int,
    attempt: int = 1,
    text: str = "hello",
    max_tokens: int = 4,
    seconds: float = 600.0,
    *,
    instance_id: int = INSTANCE,
    **more: object,
) -> Submit:
    request = Request(
        request_id=request_id(TaskId(boot, number), attempt),
        prompt=TextPrompt(text),
        sampling=Sampling(seed=1),
        max_tokens=max_tokens,
    )
    fields: dict[str, object] = {
        "number": number,
        "attempt": attempt,
        "instance_id": instance_id,
        "model_hash": MODEL_HASH,
        "epoch": EPOCH,
        "request": request,
        "seconds_left": seconds,
        "version": 5,
    }
    return Submit(**fields | more)  # type: ignore[arg-type]


@asynccontextmanager
async def open_home(network: MemoryNetwork, *heads: HeadNode, boot: int = 1 << 40) -> AsyncIterator[HomeNode]:
    """A node that knows these heads, and dials them again whenever they are lost."""
    async with (
        network.open_transport(new_identity().node_id, CLUSTER, boot=boot.to_bytes(8, "big")) as transport,
        trio.open_nursery() as nursery,
    ):
        dialler = Dialler(transport, randomness=network.randomness)
        pulls: list[tuple[NodeId, int, int]] = []
        made = Heads(transport, boot, nursery, on_pull=lambda *pull: pulls.append(pull))
        for head in heads:
            await connect(transport, head.transport)
            dialler.know(head.node_id, head.transport.addresses)
        nursery.start_soon(dialler.run)
        yield HomeNode(transport, dialler, made, boot, pulls)
        nursery.cancel_scope.cancel()


class Reader:
    """A client that reads one attempt to its end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.error: Exception | None = None
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
        except Exception as error:
            self.error = error
        finally:
            self.ended_at = trio.current_time()
            self.changed.set()

    async def reach(self, count: int) -> None:
        """Until so many events have come."""
        while len(self.events) < count:
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
        ids, _ = expected_ids(first.prompt_ids, submit.request.sampling, submit.request.max_tokens or 0, ENDLESS)
        assert self.ids == ids
        assert self.text == expected_text(ids)
        return isinstance(end, Finished) and end.reason == "length" and self.error is None
