"""One whole node in memory: everything of `node.start` but HTTP, disk, libp2p and processes.

Its parts are the real ones, put together as the composition root does it; its runners are in memory, under real supervisors.
"""

import hashlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from inference.models import FAKE_ARCHITECTURE, Model, ModelNotFoundError, Progress
from inference.requests import Request
from inference.runner.fake_engine import FakeSettings
from inference.runner_protocol import LoadModel
from node.cluster_service import Cluster
from node.dump_stream import DUMP, DumpTeller
from node.ended_tasks import LOOKUP
from node.local_runners import Down, LocalInstance, LocalRunners, RunnerSettings, Up, open_local_runners
from node.membership import Membership, profile_of
from node.node import Node, NodeSettings
from node.peer_executors import PeerExecutors
from node.records import SCHEMA
from p2p.cluster_key import cluster
from p2p.core import Core
from p2p.dialler import Dialler
from p2p.gossip import Gossip
from p2p.identity import Identity
from p2p.ids import NodeId
from p2p.lattice import Generation, Liveness
from p2p.memory_transport import MemoryTransport
from p2p.sync_wire import node16
from tests.node.memory_runner import MemoryDevice, MemoryRunner

CLUSTER = cluster("sim", "0123456789abcdef" * 4)
WALL_BEGAN = 1_700_000_000.0  # Unix seconds at virtual time 0
CONTEXT_MAX = 1 << 30  # tokens: as much as the model has
JOINING_SECONDS = 5.0  # as node.start has it


@cache
def identity(place: int) -> Identity:
    """The same one each time."""
    return Identity(Ed25519PrivateKey.from_private_bytes((place + 1).to_bytes(32, "big")))


def wall_clock() -> float:
    """Unix seconds."""
    return WALL_BEGAN + trio.current_time()


@dataclass(frozen=True)
class Serving:
    """A model as one node has it, and what its runner there is like."""

    name: str = "m"
    content: str = "a"  # what its hash is made of
    settings: FakeSettings = FakeSettings(running_max=4, prefill_tokens=4096)  # noqa: RUF009 - frozen
    step_seconds: float = 0.1
    context: int = 8192
    loads: bool = True  # else a test lets it load when it will

    @property
    def model_hash(self) -> str:
        """Of its content alone: under one name there may be two models, and one model under two names."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    @property
    def model(self) -> Model:
        """As a store would have it."""
        return Model(
            model_hash=self.model_hash,
            name=self.name,
            path=Path("/models") / self.name,
            architecture=FAKE_ARCHITECTURE,
            parameters=1,
            weight_bytes=1,
            layers=1,
            context_length=self.context,
            quantization="none",
        )


class _Submitted(list[Request]):
    """What a runner was given; each is told of as it comes."""

    def __init__(self, tell: Callable[[Request], None]) -> None:
        super().__init__()
        self._tell = tell

    def append(self, request: Request, /) -> None:
        super().append(request)
        self._tell(request)


class Device(MemoryDevice):
    """The runners of one model at one boot of a node."""

    def __init__(self, place: int, serving: Serving, tell: Callable[[Request], None]) -> None:
        super().__init__(serving.settings, serving.step_seconds, submitted=_Submitted(tell))
        self.place = place
        self.serving = serving
        self.may_resolve.set()
        if serving.loads:
            self.may_load.set()

    @property
    def alive(self) -> list[MemoryRunner]:
        """Its runners that have not ended."""
        return [runner for runner in self.runners if not runner.ended]

    def die(self, status: int = -9) -> None:
        """End what runs now; the supervisor starts another, while it has patience."""
        for runner in self.alive:
            runner.die(status)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a new process of a node is started with."""

    place: int
    generation: Generation
    joins: tuple[str, ...] = ()
    book: Mapping[NodeId, Sequence[str]] = field(default_factory=dict)  # addresses that its disk remembers
    models: tuple[Serving, ...] = ()  # that it can have; which of them run is said later
    waiting_max: int = 32
    task_seconds: float = 60.0
    memory_bytes: int = 1 << 30  # 0: nothing runs here
    seed: str = ""


class WholeNode:
    """One process of a node."""

    def __init__(self, place: int, node: Node, executors: PeerExecutors, membership: Membership) -> None:
        self.place = place
        self.node = node
        self.executors = executors
        self.membership = membership
        self.service = Cluster(node, membership)
        self.devices: dict[str, Device] = {}  # by the name of the model
        self.scope = trio.CancelScope()  # of its whole life
        self.clients: dict[trio.CancelScope, None] = {}  # of those who ask here: they end with the process
        self.ended = False  # it serves nobody any more
        self.over = trio.Event()  # nothing is left of it

    def __repr__(self) -> str:
        return f"WholeNode({self.place}, {self.node.boot:016x})"

    @property
    def node_id(self) -> NodeId:
        return self.membership.transport.node_id

    @property
    def gossip(self) -> Gossip:
        return self.membership.gossip

    @property
    def address(self) -> str:
        return self.membership.transport.addresses[0]

    @property
    def device(self) -> Device:
        """Of its only model."""
        (device,) = self.devices.values()
        return device

    @property
    def instances(self) -> dict[int, LocalInstance]:
        """Its own, by id."""
        found = {instance_id: self.node.instance(instance_id) for instance_id in self.node.own_instances}
        return {instance_id: local for instance_id, local in found.items() if local is not None}

    @property
    def up(self) -> bool:
        """Whether all that it was to run can be asked for."""
        return all(isinstance(instance.phase, Up) for instance in self.instances.values())

    @property
    def down(self) -> bool:
        """Whether none of what it was to run will be served any more."""
        return all(isinstance(instance.phase, Down) for instance in self.instances.values())

    def sees(self, other: "WholeNode") -> Liveness | None:
        """What it takes another one for."""
        return self.gossip.believe(other.gossip.core.node)


@asynccontextmanager
async def open_whole_node(
    plan: Plan,
    transport: AbstractAsyncContextManager[MemoryTransport],
    tell: Callable[..., None],
) -> AsyncIterator[WholeNode]:
    """A node that takes part and serves, until the context ends; `tell` hears what its runners are given."""
    devices = {
        serving.name: Device(plan.place, serving, lambda request: tell("given", plan.place, request.request_id))
        for serving in plan.models
    }

    async def resolve(name: str, progress: Callable[[Progress], None]) -> Model:
        progress(Progress("hashing", 1, 1))
        if name not in devices:
            raise ModelNotFoundError(f"There is no model {name!r} here.")
        await devices[name].may_resolve.wait()
        return devices[name].serving.model

    async with trio.open_nursery() as processes:

        async def launch(command: LoadModel) -> MemoryRunner:
            device = devices[Path(command.model_path).name]
            runner = MemoryRunner(1000 + len(device.runners), device)
            device.runners.append(runner)
            processes.start_soon(runner.live)
            return runner

        settings = RunnerSettings(
            context=CONTEXT_MAX, running_max=None, memory_bytes=plan.memory_bytes, threads=1, blas_cache=Path("/blas")
        )
        async with (
            open_local_runners(settings, resolve, launch, wall_clock=wall_clock) as runners,
            transport as opened,
            trio.open_nursery() as nursery,
        ):
            whole = _assemble(plan, opened, runners, nursery)
            whole.devices = devices
            nursery.start_soon(whole.membership.dialler.run)
            nursery.start_soon(whole.gossip.run)
            nursery.start_soon(whole.executors.run)
            nursery.start_soon(whole.node.reconciler.run)
            yield whole
            nursery.cancel_scope.cancel()
        processes.cancel_scope.cancel()


def _assemble(plan: Plan, transport: MemoryTransport, runners: LocalRunners, nursery: trio.Nursery) -> WholeNode:
    """As `node.start` and `node.membership` do."""

    def chance(purpose: str) -> random.Random:
        return random.Random(f"{plan.seed}/{purpose}")

    core = Core(node16(transport.node_id), plan.generation, cluster=bytes(16), schema=SCHEMA, chance=chance("core"))
    dialler = Dialler(transport, plan.joins, chance("dialler"))
    gossip = Gossip(core, transport, dialler, profile=lambda node: profile_of(core.replica, node), remembered=plan.book)
    membership = Membership(transport, dialler, gossip)
    executors = PeerExecutors(transport, nursery, chance("executors"))
    node = Node(
        transport.node_id,
        f"node-{plan.place}",
        NodeSettings(aliases={}, waiting_max=plan.waiting_max, task_timeout_seconds=plan.task_seconds),
        facts=gossip,
        runners=runners,
        executors=executors,
        nursery=nursery,
        joining_seconds=JOINING_SECONDS if plan.joins else 0.0,
        addresses=lambda: transport.addresses,
        chance=chance("node"),
        wall_clock=wall_clock,
    )
    whole = WholeNode(plan.place, node, executors, membership)
    transport.serve(DUMP, DumpTeller(whole.service.dump).serve)
    transport.serve(LOOKUP, whole.service.ended.serve)
    return whole
