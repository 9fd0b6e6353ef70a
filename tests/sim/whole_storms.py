"""A storm over whole nodes: seeded work, seeded faults, and checks that know nothing of either."""

import gc
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import structlog
import trio
from msgspec import Struct
from trio.testing import MockClock

from inference.runner.fake_engine import FakeSettings
from tests.sim.whole_checks import (
    CALM_SECONDS,
    CALM_SECONDS_MAX,
    COLLECTED_SECONDS_MAX,
    Broken,
    Idle,
    Watch,
    check_attempts,
    check_clients,
    check_order,
    check_verdicts,
    remains,
    rest,
    unrest,
)
from tests.sim.whole_cluster import WholeCluster, open_whole_cluster
from tests.sim.whole_faults import KINDS, SURVIVABLE, Faults
from tests.sim.whole_node import Serving
from tests.sim.whole_work import Client, Work

STORM_SECONDS = 20.0
TASK_SECONDS = 60.0  # the longest that a request may take
LATE_SECONDS = 15.0  # in which whoever asked at the last moment has an end nevertheless, and who was killed is back
# Where nothing goes wrong for long; two of them come of more work than all can do, while no place is free.
SERVED_OUTCOMES = {"stop", "length", "left", "cancelled", "home died", "timed_out", "QueueFull"}

Result = TypeVar("Result")


class WholeReport(Struct, frozen=True):
    """What came of a storm; equal in every process for one seed."""

    seed: int
    nodes: int
    faults: dict[str, int]
    outcomes: dict[str, int]  # of the clients
    attempts: int  # that runners were given
    looks: int
    calm: float  # seconds until nothing was in flight and all held the same
    trace: str


class Storm:
    """One seed's."""

    def __init__(self, seed: int, seconds: float = STORM_SECONDS) -> None:
        chance = random.Random(f"whole {seed}")
        self.seed = seed
        self.seconds = seconds
        self.chance = chance
        self.size = chance.choice((3, 3, 4, 5, 6))
        self.mood = ("calm", "one by one", "wild", "wild")[seed % 4]
        self.kinds = [kind for kind in (SURVIVABLE if self.mood == "one by one" else KINDS) if chance.random() < 0.5]
        self.serving = [
            Serving(
                name,
                name,
                settings=FakeSettings(running_max=chance.choice((1, 2, 4, 16)), prefill_tokens=64),
                step_seconds=chance.choice((0.05, 0.1, 0.2)),
            )
            for name in ("m", "n")[: chance.choice((1, 1, 2))]
        ]
        self.models: dict[int, list[Serving]] = {place: [] for place in range(self.size)}
        for serving in self.serving:
            for place in chance.sample(range(self.size), chance.choice((1, 2, 2, self.size - 1))):
                self.models[place].append(serving)
            if self.mood == "one by one" and sum(serving in models for models in self.models.values()) < 2:
                next(models for models in self.models.values() if serving not in models).append(serving)

    async def run(self, cluster: WholeCluster) -> WholeReport:
        """The whole run.

        Raises: Broken where a check fails.
        """
        watch = Watch(cluster)
        work = Work(cluster, random.Random(f"work {self.seed}"), tuple(serving.name for serving in self.serving))
        faults = Faults(cluster, random.Random(f"faults {self.seed}"), self.models, self.kinds)
        for place, models in self.models.items():
            joins = [self.chance.randrange(place)] if place else []
            await cluster.start(place, joins, models=models, task_seconds=TASK_SECONDS)
        await cluster.settle()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            if self.mood == "calm":
                nursery.start_soon(Idle(cluster).run)
            async with trio.open_nursery() as both:
                both.start_soon(work.run, self.seconds, self.chance.choice((1.0, 2.0, 3.0)), self.chance.choice((0.0, 0.3)))
                if self.mood == "wild":
                    both.start_soon(faults.run, self.seconds, self.chance.choice((0.1, 0.3, 0.6)))
                elif self.mood == "one by one" and self.kinds:
                    both.start_soon(faults.run_one_by_one, self.seconds)
                open_until = trio.current_time() + self.seconds + TASK_SECONDS + LATE_SECONDS
                while both.child_tasks:
                    if trio.current_time() > open_until:
                        raise Broken(f"still open: {[client for client in work.clients if not client.over]}")
                    await trio.sleep(0.1)
            calm = await rest(unrest, cluster, CALM_SECONDS if self.mood == "calm" else CALM_SECONDS_MAX)
            await rest(remains, cluster, COLLECTED_SECONDS_MAX)
            nursery.cancel_scope.cancel()
        self._check(cluster, work, faults, watch)
        return WholeReport(
            self.seed,
            self.size,
            dict(sorted(faults.counts.items())),
            dict(sorted(Counter(client.outcome for client in work.clients).items())),
            sum(len(device.submitted) for device in cluster.devices),
            watch.looks,
            round(calm, 3),
            cluster.trace.digest,
        )

    def _check(self, cluster: WholeCluster, work: Work, faults: Faults, watch: Watch) -> None:
        settings = {serving.name: serving.settings for serving in self.serving}
        check_clients(work.clients, settings, work.cancelled)
        check_attempts(cluster)
        check_verdicts(work.clients, watch.verdicts)
        if self.mood == "calm":
            check_order(work.clients)
        if self.mood != "wild":
            failed = [client for client in work.clients if not self._excused(client, faults)]
            if failed:
                raise Broken(f"nothing went wrong that another could not have taken over, and yet: {failed}")

    @staticmethod
    def _excused(client: Client, faults: Faults) -> bool:
        """Whether its end is one that may be where at most one thing is wrong at a time.

        A request under which two runners ended is not tried again: it may be what ended them.
        """
        stopped = client.home is not None and client.home.node.draining and client.outcome == "NoRoute"
        twice = sum(client.asked_at <= end <= client.ended_at for end in faults.ends) > 1
        return client.outcome in SERVED_OUTCOMES or stopped or (client.outcome == "runner_crashed" and twice)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Trio's own order of tasks by a seed, and nothing logged."""
    run = trio._core._run  # as pytest-trio does it; there is no public way
    before, state, logging_before = run._ALLOW_DETERMINISTIC_SCHEDULING, run._r.getstate(), structlog.get_config()
    run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]  # final but for this very purpose
    run._r.seed(seed)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]  # as above
        run._r.setstate(state)
        structlog.configure(**logging_before)
        gc.collect()


def run_seeded(seed: int, run: Callable[[WholeCluster], Awaitable[Result]], lines: list[str] | None = None) -> Result:
    """Run something with a cluster in virtual time, the same way for the same seed; `lines` get the trace."""

    async def main() -> Result:
        async with open_whole_cluster(seed) as cluster:
            cluster.trace.lines = lines
            return await run(cluster)
        raise AssertionError  # the cluster swallows nothing

    with seeded(seed):
        return trio.run(main, clock=MockClock(autojump_threshold=0))


def run_whole_storm(seed: int, lines: list[str] | None = None, *, seconds: float = STORM_SECONDS) -> WholeReport:
    """One seeded storm."""
    return run_seeded(seed, Storm(seed, seconds).run, lines)
