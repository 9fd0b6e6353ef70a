"""Small clusters for one case each: made, asked and looked at in a line."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypedDict, Unpack

import trio

from inference.runner.fake_engine import FakeSettings
from tests.sim.whole_checks import check_attempts, check_clients, remains, rest, unrest
from tests.sim.whole_cluster import Options, WholeCluster, open_whole_cluster
from tests.sim.whole_node import Serving
from tests.sim.whole_storms import seeded
from tests.sim.whole_work import Client, Wish


def serving(places: int = 32, step_seconds: float = 0.05, **changes: object) -> Serving:
    """A model whose runner has so many places; it answers to the last token that was asked for."""
    settings = FakeSettings(running_max=places, stop_one_in=0, prefill_tokens=1 << 20)
    return replace(Serving(settings=settings, step_seconds=step_seconds), **changes)  # type: ignore[arg-type]  # fields of it


class Asks(TypedDict, total=False):
    """Fields of a `Wish`."""

    model: str
    text: str
    seed: int
    max_tokens: int
    leaves_after_tokens: float
    leaves_after_seconds: float
    pause_seconds: float


class Case:
    """A cluster and those who ask."""

    def __init__(self, cluster: WholeCluster, nursery: trio.Nursery) -> None:
        self.cluster = cluster
        self.clients: list[Client] = []
        self.cancelled: list[str] = []
        self._nursery = nursery

    def begin(self, place: int, **wish: Unpack[Asks]) -> Client:
        """Somebody asks, and is answered while other things go on."""
        client = Client(len(self.clients), Wish(**wish), self.cluster.trace.tell)
        self.clients.append(client)
        self._nursery.start_soon(client.ask, self.cluster.nodes[place])
        return client

    async def ask(self, place: int, **wish: Unpack[Asks]) -> Client:
        """Somebody asks, and has gone when this returns."""
        client = self.begin(place, **wish)
        await self.gone(client)
        return client

    async def gone(self, *clients: Client) -> None:
        """Wait until these have gone, or all."""
        for client in clients or tuple(self.clients):
            await client.gone.wait()

    async def cancel(self, place: int, task_id: str) -> str | None:
        """Somebody has a task ended at some node."""
        self.cancelled.append(task_id)
        return await self.cluster.nodes[place].service.cancel(task_id)

    def given(self, place: int) -> int:
        """How many attempts the runners of the last process at a place were given."""
        return sum(len(device.submitted) for device in self.cluster.nodes[place].devices.values())

    def running(self, place: int) -> int:
        """How many requests the runners at a place work on now."""
        devices = self.cluster.nodes[place].devices.values()
        return sum(runner.core.load.running for device in devices for runner in device.alive if runner.core is not None)

    def shares(self) -> Counter[int]:
        """How many requests were answered whole by each place, by who was said to execute them at first."""
        return Counter(self.cluster.place_of(client.executed_by) for client in self.clients if client.complete)

    async def end(self, settings: Mapping[str, FakeSettings], calm_seconds: float) -> None:
        """Everybody was answered rightly, and nothing is left."""
        await rest(unrest, self.cluster, calm_seconds)
        await rest(remains, self.cluster, 75.0)
        check_clients(self.clients, settings, self.cancelled)
        check_attempts(self.cluster)


@asynccontextmanager
async def open_case(
    *models: Serving | Sequence[Serving] | None,
    seed: int = 1,
    calm_seconds: float = 3.0,
    settle: bool = True,
    **options: Unpack[Options],
) -> AsyncIterator[Case]:
    """A node for each model, None for one that only routes; at the end everybody was answered rightly and nothing is left."""
    with seeded(seed):
        async with open_whole_cluster(seed) as cluster, trio.open_nursery() as nursery:
            settings: dict[str, FakeSettings] = {}
            for place, model in enumerate(models):
                here = [model] if isinstance(model, Serving) else list(model or ())
                settings.update({found.name: found.settings for found in here})
                await cluster.start(place, [0] if place else [], models=here, **options)
            if settle:
                await cluster.settle()
            case = Case(cluster, nursery)
            yield case
            await case.gone()
            await case.end(settings, calm_seconds)
            nursery.cancel_scope.cancel()
