"""What goes wrong around whole nodes: links, connections, processes, runners. Knows nothing of what is asked of them."""

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import combinations

import trio

from tests.sim.whole_cluster import LATENCY_SECONDS, WholeCluster
from tests.sim.whole_node import Serving, WholeNode

KINDS = ("latency", "sever", "sever", "cut", "partition", "kill", "silent", "stop", "runner")
SURVIVABLE = ("sever", "kill", "silent", "stop", "runner")  # one at a time, where each model runs at two nodes
RUNNER_DEATHS_MAX = 3  # of one runner: with more in a minute its supervisor gives up, as it should
RECOVERY_SECONDS_MAX = 30.0  # until all that are there hold each other for alive and serve again


class Faults:
    """Of some kinds, at random moments, by one seed. `models` are what each place runs."""

    def __init__(
        self, cluster: WholeCluster, chance: random.Random, models: Mapping[int, Sequence[Serving]], kinds: Sequence[str]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.ends: list[float] = []  # when a process of a node or a runner came to its end
        self._cluster = cluster
        self._chance = chance
        self._models = models
        self._kinds = kinds
        self._deaths: Counter[int] = Counter()  # of runners, by boot of their node
        self._calls: dict[str, Callable[[], Awaitable[None]]] = {
            "latency": self._latency,
            "sever": self._sever,
            "cut": self._cut,
            "partition": self._partition,
            "kill": self._kill,
            "silent": self._silent,
            "stop": self._stop,
            "runner": self._runner,
        }

    async def run_one_by_one(self, seconds: float) -> None:
        """For a while each fault a little after all has recovered from the one before."""
        until = trio.current_time() + seconds
        while True:
            await trio.sleep(self._chance.uniform(0.5, 3))
            if trio.current_time() >= until:
                return
            await self._calls[self._chance.choice(self._kinds)]()
            await trio.sleep(0.5)  # it is seen by now
            await self._cluster.settle(RECOVERY_SECONDS_MAX)

    async def run(self, seconds: float, rate: float) -> None:
        """So many faults a second for a while, whatever else is wrong; then all is well again, but for who is lost for good."""
        until = trio.current_time() + seconds
        async with trio.open_nursery() as nursery:
            while self._kinds:
                await trio.sleep(self._chance.expovariate(rate))
                if trio.current_time() >= until:
                    break
                kind = self._chance.choice(self._kinds)
                nursery.start_soon(self._calls[kind])
            await trio.sleep_until(until)
        if len(self._cluster.nodes) > 2 and self._chance.random() < 0.4:
            whole = self._chance.choice(self._cluster.live)
            self._did("loss", whole.place)
            self._cluster.kill(whole.place, silent=self._chance.random() < 0.5)
        self._cluster.network.mend()
        self._cluster.network.set_latency(LATENCY_SECONDS, jitter=LATENCY_SECONDS)

    def _did(self, kind: str, *what: object) -> None:
        self.counts[kind] += 1
        if kind in {"kill", "silent", "stop", "runner", "loss"}:
            self.ends.append(trio.current_time())
        self._cluster.trace.tell("fault", kind, *what)

    def _some(self) -> WholeNode | None:
        live = self._cluster.live
        return self._chance.choice(live) if live else None

    def _pair(self) -> tuple[WholeNode, WholeNode] | None:
        live = self._cluster.live
        if len(live) < 2:
            return None
        one, other = self._chance.sample(live, 2)
        return one, other

    async def _latency(self) -> None:
        latency = self._chance.choice((0.02, 0.1, 0.3))
        self._did("latency", latency)
        self._cluster.network.set_latency(latency, jitter=latency * self._chance.random())
        await trio.sleep(self._chance.uniform(1, 8))
        self._cluster.network.set_latency(LATENCY_SECONDS, jitter=LATENCY_SECONDS)

    async def _sever(self) -> None:
        whole = self._some()
        if whole is not None:
            others = [other for other in self._cluster.live if other is not whole and self._chance.random() < 0.7]
            self._did("sever", whole.place, *[other.place for other in others])
            for other in others:
                self._cluster.network.sever(whole.node_id, other.node_id)

    async def _cut(self) -> None:
        pair = self._pair()
        if pair is not None:
            self._did("cut", pair[0].place, pair[1].place)
            link = self._cluster.network.link(pair[0].node_id, pair[1].node_id)
            link.cut = True
            await trio.sleep(self._chance.uniform(0.2, 8))
            link.cut = False

    async def _partition(self) -> None:
        sides = {whole.node_id: self._chance.random() < 0.5 for whole in self._cluster.live}
        self._did("partition", *sides.values())
        links = [
            self._cluster.network.link(source, target)
            for pair in combinations(sides, 2)
            for source, target in (pair, pair[::-1])
            if sides[source] != sides[target]
        ]
        for link in links:
            link.cut = True
        await trio.sleep(self._chance.uniform(0.5, 15))
        for link in links:
            link.cut = False

    async def _kill(self) -> None:
        whole = self._some()
        if whole is not None:
            self._did("kill", whole.place)
            self._cluster.kill(whole.place)
            await self._restart(whole.place, self._chance.uniform(0.05, 8))

    async def _silent(self) -> None:
        whole = self._some()
        if whole is not None:
            self._did("silent", whole.place)
            self._cluster.kill(whole.place, silent=True)
            await self._restart(whole.place, self._chance.uniform(3, 12))

    async def _stop(self) -> None:
        whole = self._some()
        if whole is not None:
            self._did("stop", whole.place)
            await self._cluster.stop(whole.place, drain_seconds=self._chance.choice((0.1, 2.0, 10.0)))
            await self._restart(whole.place, self._chance.uniform(0.1, 5))

    async def _restart(self, place: int, seconds: float) -> None:
        await trio.sleep(seconds)
        others = [whole.place for whole in self._cluster.live]
        joins = [self._chance.choice(others)] if others else []
        disk = self._chance.random() < 0.8
        self._did("restart" if disk else "restart without disk", place)
        await self._cluster.start(place, joins, models=self._models[place], disk=disk)

    async def _runner(self) -> None:
        running = [whole for whole in self._cluster.live if any(device.alive for device in whole.devices.values())]
        if not running:
            return
        whole = self._chance.choice(running)
        if self._deaths[whole.node.boot] < RUNNER_DEATHS_MAX:
            self._deaths[whole.node.boot] += 1
            self._did("runner", whole.place)
            device = self._chance.choice([device for device in whole.devices.values() if device.alive])
            device.die(self._chance.choice((-9, -11, 1)))
