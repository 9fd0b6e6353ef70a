"""Several whole nodes on one network in memory and virtual time. One seed gives one run, to the byte.

Whatever is drawn at random comes from the seed, and whatever happens goes into a trace, whose digest tells two runs apart.
"""

import hashlib
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypedDict, Unpack

import trio

from p2p.boot_clock import new_nonce
from p2p.effects import Changed
from p2p.ids import NodeId
from p2p.lattice import ALIVE, Generation
from p2p.memory_transport import PORT, MemoryNetwork, open_network
from tests.sim.whole_node import CLUSTER, Device, Plan, Serving, WholeNode, identity, open_whole_node, wall_clock

DRAIN_SECONDS = 30.0  # as configured by default
LATENCY_SECONDS = 0.001
PLACES_MAX = 64


class Options(TypedDict, total=False):
    """Further fields of a `Plan`."""

    waiting_max: int
    task_seconds: float
    memory_bytes: int


class Trace:
    """All that happened, with its virtual time, as a digest."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.lines: list[str] | None = None  # kept where somebody wants to read them

    def tell(self, *what: object) -> None:
        """One thing that happened now."""
        line = f"{trio.current_time():.9f} " + " ".join(map(str, what))
        self._hash.update(line.encode() + b"\n")
        if self.lines is not None:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        """Of everything so far."""
        return self._hash.hexdigest()


class WholeCluster:
    """Nodes by place. Faults of links are set on `network`."""

    def __init__(self, network: MemoryNetwork, nursery: trio.Nursery, seed: int) -> None:
        self.network = network
        self.nursery = nursery
        self.seed = seed
        self.trace = Trace()
        self.nodes: dict[int, WholeNode] = {}  # that run now
        self.devices: list[Device] = []  # of all boots there ever were
        self.on_start: list[Callable[[WholeNode], None]] = []
        self._counters: dict[int, int] = {}  # of generations, as each place's disk has it
        self._books: dict[int, dict[NodeId, tuple[str, ...]]] = {}  # of addresses, likewise
        self._boots = 0

    @staticmethod
    def host(place: int) -> str:
        """Where the node of a place listens."""
        return f"10.0.{place >> 8}.{place & 255}"

    async def start(
        self,
        place: int,
        joins: Iterable[int] = (),
        *,
        models: Sequence[Serving] = (),
        running: Sequence[str] | None = None,
        disk: bool = True,
        **options: Unpack[Options],
    ) -> WholeNode:
        """A new process at a place, which knows what that place's `disk` has, and joins the nodes at other places.

        It runs all of its `models`, or those of them that `running` names.
        """
        self._boots += 1
        chance = random.Random(f"{self.seed}/{place}/{self._boots}")
        self.network.silent.discard((self.host(place), PORT))
        counter = int(wall_clock())
        if disk:
            counter = max(counter, self._counters.get(place, 0) + 1)
        self._counters[place] = counter
        nonce = new_nonce(wall_clock(), chance)
        plan = Plan(
            place=place,
            generation=Generation(counter, nonce),
            joins=tuple(f"{self.host(join)}:{PORT}" for join in joins),
            book=self._books.get(place, {}) if disk else {},
            models=tuple(models),
            seed=f"{self.seed}/{place}/{self._boots}",
            **options,
        )
        self.trace.tell("start", place, f"{nonce:016x}", *plan.joins)
        whole: WholeNode = await self.nursery.start(self._live, plan)
        for name in [serving.name for serving in models] if running is None else running:
            whole.node.run_model(name)
        return whole

    async def _live(self, plan: Plan, *, task_status: trio.TaskStatus[WholeNode]) -> None:
        boot = plan.generation.nonce.to_bytes(8, "big")
        transport = self.network.open_transport(identity(plan.place).node_id, CLUSTER, host=self.host(plan.place), boot=boot)
        async with open_whole_node(plan, transport, self.trace.tell) as whole:
            with whole.scope:
                self.nodes[plan.place] = whole
                self.devices += whole.devices.values()
                whole.gossip.on_changed.append(lambda change: self._changed(plan.place, change))
                whole.gossip.on_renewed.append(lambda renewed: self._counters.update({plan.place: renewed.counter}))
                for callback in self.on_start:
                    callback(whole)
                task_status.started(whole)
                await trio.sleep_forever()
        whole.over.set()

    def _changed(self, place: int, change: Changed) -> None:
        keys = None if change.changes is None else [(written.key, written.version) for written in change.changes]
        self.trace.tell("changed", place, change.node.hex()[:8], keys)

    # Ends of processes.

    async def stop(self, place: int, drain_seconds: float = DRAIN_SECONDS) -> WholeNode:
        """As one that is told to: it drains, stops its runners and says goodbye."""
        whole = self.nodes.pop(place)
        self.trace.tell("stop", place)
        with trio.move_on_after(drain_seconds):
            await whole.node.drain()
        self._end_clients(whole)
        await whole.node.runners.stop()
        await whole.gossip.leave()
        self._end(whole)
        await whole.over.wait()
        return whole

    def kill(self, place: int, *, silent: bool = False) -> WholeNode:
        """As kill -9 does; `silent`: as a power cut does, of which its peers don't hear."""
        whole = self.nodes.pop(place)
        self.trace.tell("kill", place, silent)
        if silent:
            self.network.silent.add((self.host(place), PORT))
        self.network.crash(whole.node_id, silent=silent)
        self._end_clients(whole)
        for device in whole.devices.values():
            device.die()
        self._end(whole)
        return whole

    def _end_clients(self, whole: WholeNode) -> None:
        whole.ended = True
        for scope in list(whole.clients):
            scope.cancel()

    def _end(self, whole: WholeNode) -> None:
        book = self._books.setdefault(whole.place, {})
        book.update({node_id: peer.addresses for node_id, peer in whole.membership.transport.peers.items()})
        whole.scope.cancel()

    # Looking at all.

    @staticmethod
    def place_of(node_id: str) -> int:
        """Where the node of this peer id is."""
        return next(place for place in range(PLACES_MAX) if identity(place).node_id == node_id)

    @property
    def live(self) -> list[WholeNode]:
        """Those that run."""
        return list(self.nodes.values())

    def agree(self) -> bool:
        """Whether all that run hold the same, and each other for alive."""
        live = self.live
        return len({whole.gossip.core.replica.root for whole in live}) == 1 and all(
            whole.sees(other) is ALIVE for whole in live for other in live
        )

    def settled(self) -> bool:
        """Whether all agree and everything that is to run is up."""
        return self.agree() and all(whole.up for whole in self.live)

    async def settle(self, seconds: float = 20.0) -> None:
        """Wait for it."""
        await until(self.settled, seconds)


async def until(condition: Callable[[], bool], seconds: float, step: float = 0.01) -> float:
    """How long it took, to within a step; waiting costs nothing here."""
    began = trio.current_time()
    while not condition():
        assert trio.current_time() - began < seconds, f"not within {seconds:g} s"
        await trio.sleep(step)
    return trio.current_time() - began


@asynccontextmanager
async def open_whole_cluster(seed: int = 0, latency: float = LATENCY_SECONDS) -> AsyncIterator[WholeCluster]:
    """A cluster without nodes."""
    async with open_network(seed) as network, trio.open_nursery() as nursery:
        network.set_latency(latency, jitter=latency)
        yield WholeCluster(network, nursery, seed)
        nursery.cancel_scope.cancel()
