"""Routing in virtual time: homes and heads that call node.routing and node.pulling, beside two routers that know everything.

A view's age is drawn anew for every choice, between 0 and the regime's staleness, but for the home's own headers; what homes
and heads say to each other arrives one hop later. Times are seconds; results are in units of the mean service time.
"""

import heapq
import math
import random
from bisect import insort
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from inference.requests import Finished, Load, Refused, Usage
from node.pulling import PULL_JITTER_SECONDS, PULL_SECONDS_MAX, Pulls
from node.routing import Candidate, Route, Router

SERVICE_SECONDS = 8.0
SIGMA = 1.0
HOP_SECONDS = 0.002 * SERVICE_SECONDS
WARM_UP = 0.1  # of the tasks, which come before the cluster is as loaded as it is going to be


class Regime(Struct, frozen=True):
    """What is simulated."""

    instances: int
    slots: int
    load: float  # of all slots
    staleness: float  # a view's greatest age, in service times
    tasks: int
    homes: int = 0  # 0: as many as instances
    steady: bool = False  # every view is as old as that

    @property
    def homes_used(self) -> int:
        """How many homes take requests."""
        return self.homes or self.instances


class Arrival(Struct, frozen=True):
    """One request of a trace."""

    at: float
    home: int
    service: float  # seconds


def trace(regime: Regime, seed: int) -> list[Arrival]:
    """Poisson arrivals at random homes, with log-normal services of the mean SERVICE_SECONDS."""
    chance = random.Random(f"trace {seed}")
    rate = regime.load * regime.instances * regime.slots / SERVICE_SECONDS
    now = 0.0
    arrivals = []
    for _ in range(regime.tasks):
        now += chance.expovariate(rate)
        service = SERVICE_SECONDS * chance.lognormvariate(-(SIGMA**2) / 2, SIGMA)
        arrivals.append(Arrival(now, chance.randrange(regime.homes_used), service))
    return arrivals


def central(regime: Regime, arrivals: list[Arrival]) -> list[float]:
    """Waits, in service times, behind one queue for all slots: the lower bound."""
    free = [0.0] * (regime.instances * regime.slots)
    waits = []
    for arrival in arrivals:
        start = max(arrival.at, free[0])
        heapq.heapreplace(free, start + arrival.service)
        waits.append((start - arrival.at) / SERVICE_SECONDS)
    return waits


def omniscient(regime: Regime, arrivals: list[Arrival], seed: int) -> list[float]:
    """Waits where each request goes at once, one hop away, to an instance that truly has the fewest, and queues there."""
    chance = random.Random(f"omniscient {seed}")
    counts = [0] * regime.instances
    free = [[0.0] * regime.slots for _ in range(regime.instances)]
    ends: list[tuple[float, int]] = []
    waits = []
    for arrival in arrivals:
        while ends and ends[0][0] <= arrival.at:
            counts[heapq.heappop(ends)[1]] -= 1
        least = min(counts)
        place = chance.choice([i for i, count in enumerate(counts) if count == least])
        start = max(arrival.at + HOP_SECONDS, free[place][0])
        heapq.heapreplace(free[place], start + arrival.service)
        counts[place] += 1
        heapq.heappush(ends, (start + arrival.service, place))
        waits.append((start - arrival.at) / SERVICE_SECONDS)
    return waits


def p99(waits: list[float]) -> float:
    """The 99th percentile after the warm-up."""
    kept = sorted(waits[int(len(waits) * WARM_UP) :])
    return kept[math.ceil(0.99 * len(kept)) - 1]


class _Task(Struct):
    number: int
    arrival: Arrival
    route: Route
    start: float = -1.0
    instance: int = -1  # of its header


class _Home:
    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.name = number.to_bytes(2, "big")
        self.router = Router(random.Random(f"home {seed} {number}"))
        self.line: list[_Task] = []  # in order of arrival


class _Head:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.running = 0
        self.pulls = Pulls()


class Simulation:
    """One run. After `run`, `waits` are in the order of arrival, in service times."""

    def __init__(self, regime: Regime, arrivals: list[Arrival], seed: int) -> None:
        self.regime = regime
        self.now = 0.0
        self.refusals = 0
        self.redirects = 0  # sent elsewhere after a refusal
        self.pulls = 0
        self.misroutes = 0  # began to wait while more places were idle than requests waiting
        self.waits: list[float] = []
        self.headers = [0] * regime.instances  # in flight by instance, the truth
        self.watch: Callable[[], None] = lambda: None  # called after each change of these
        self._staleness = regime.staleness * SERVICE_SECONDS
        self._chance = random.Random(f"simulation {seed}")
        self._homes = [_Home(number, seed) for number in range(regime.homes_used)]
        self._heads = [_Head(regime.slots) for _ in range(regime.instances)]
        self._changes: deque[tuple[float, int, int, int]] = deque()  # when, by whom, at which instance, by how much
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._tasks = [_Task(number, arrival, Route(1)) for number, arrival in enumerate(arrivals)]
        for task in self._tasks:
            self._at(task.arrival.at, lambda task=task: self._arrive(task))  # type: ignore[misc]  # mypy: lambda defaults

    def run(self) -> "Simulation":
        """All of it, to the last end."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.waits = [(task.start - task.arrival.at) / SERVICE_SECONDS for task in self._tasks]
        assert min(self.waits) >= 0, "a request was never served"
        assert not any(self.headers)
        return self

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (when, self._scheduled, event))

    def _hop(self, event: Callable[[], None]) -> None:
        self._at(self.now + HOP_SECONDS, event)

    # At the homes.

    def _arrive(self, task: _Task) -> None:
        home = self._homes[task.arrival.home]
        if home.line:  # nobody overtakes those who wait
            self._wait(home, task)
        else:
            self._route(home, task)

    def _route(self, home: _Home, task: _Task) -> None:
        choice = home.router.choose(task.route, self._view(home), self.now)
        if isinstance(choice, Candidate):
            self.redirects += bool(task.route.refused_by)
            self._submit(home, task, choice.instance_id)
        else:
            self._wait(home, task)

    def _view(self, home: _Home) -> list[Candidate]:
        counts = self.headers.copy()
        seen = self.now - (self._staleness if self.regime.steady else self._chance.uniform(0, self._staleness))
        while self._changes and self._changes[0][0] < self.now - self._staleness:
            self._changes.popleft()
        for when, writer, instance, delta in reversed(self._changes):
            if when <= seen:
                break
            if writer != home.number:
                counts[instance] -= delta
        return [Candidate(number, b"", count, self.regime.slots) for number, count in enumerate(counts)]

    def _header(self, home: _Home, task: _Task, instance: int) -> None:
        for place, delta in ((task.instance, -1), (instance, 1)):
            if place >= 0:
                self.headers[place] += delta
                if self._staleness:
                    self._changes.append((self.now, home.number, place, delta))
        task.instance = instance
        self.watch()

    def _submit(self, home: _Home, task: _Task, instance: int) -> None:
        self._header(home, task, instance)
        self._hop(lambda: self._submitted(home, task, instance))

    def _wait(self, home: _Home, task: _Task) -> None:
        self._header(home, task, -1)
        task.route.wait()
        idle = sum(max(0, self.regime.slots - count) for count in self.headers)
        self.misroutes += idle > sum(len(other.line) for other in self._homes)
        insort(home.line, task, key=lambda other: other.number)
        self._tell(home)

    def _tell(self, home: _Home) -> None:
        count = len(home.line)
        waited = self.now - home.line[0].arrival.at if home.line else 0.0
        self._hop(lambda: self._told(home, count, waited))

    def _refused(self, home: _Home, task: _Task, load: Load) -> None:
        self.refusals += 1
        home.router.heard(task.route, Refused("r", 0, load), self.now)
        self._route(home, task)

    def _pulled(self, home: _Home, instance: int, count: int) -> None:
        candidate = Candidate(instance, b"", 0, self.regime.slots)
        taken, home.line = home.line[:count], home.line[count:]
        for task in taken:
            assert home.router.pulled(task.route, candidate, 0, self.now)
            self.pulls += 1
            self._submit(home, task, instance)
        if taken:
            self._tell(home)

    def _finished(self, home: _Home, task: _Task) -> None:
        home.router.heard(task.route, Finished("r", "stop", Usage(0, 0, 0)), self.now)
        self._header(home, task, -1)

    # At the heads.

    def _submitted(self, home: _Home, task: _Task, instance: int) -> None:
        head = self._heads[instance]
        accepted = head.running < head.slots
        head.pulls.came(home.name, accepted=accepted)
        if accepted:
            head.running += 1
            task.start = self.now
            self._at(self.now + task.arrival.service, lambda: self._ended(home, task, instance))
        else:
            load = Load(head.running, head.slots, 0, 0)
            self._hop(lambda: self._refused(home, task, load))

    def _ended(self, home: _Home, task: _Task, instance: int) -> None:
        head = self._heads[instance]
        head.running -= 1
        head.pulls.ended()
        self._hop(lambda: self._finished(home, task))
        self._pull(instance)

    def _told(self, home: _Home, count: int, waited: float) -> None:
        for instance, head in enumerate(self._heads):
            head.pulls.told(home.name, count, waited, self.now)
            if count and head.running < head.slots:
                soon = self.now + self._chance.uniform(0, PULL_JITTER_SECONDS)
                self._at(soon, lambda instance=instance: self._pull(instance))  # type: ignore[misc]  # mypy: lambda defaults

    def _pull(self, instance: int) -> None:
        head = self._heads[instance]
        asked = head.pulls.next(head.slots - head.running, self.now)
        for name, count in asked.items():
            home = self._homes[int.from_bytes(name, "big")]
            self._hop(lambda home=home, count=count: self._pulled(home, instance, count))  # type: ignore[misc]  # mypy: lambda defaults
        if asked:
            self._at(self.now + PULL_SECONDS_MAX, lambda: self._pull(instance))
