"""A storm: a whole seeded run in virtual time, with faults of every kind, that has to end in equal replicas.

Workload, faults and checks know nothing of each other. The oracle looks at every change at every node as it happens; when the
faults are over, everybody must hold everything, and hold everybody for alive, within a bounded time.
"""

import random
from collections import Counter

from msgspec import Struct

from p2p.lattice import ALIVE
from tests.sim.cluster import Cluster
from tests.sim.network import Weather
from tests.sim.oracle import Broken, Oracle, whole

KIND = 200
STORM_SECONDS = 40.0
QUIET_SECONDS_MAX = 60.0
YEAR_SECONDS = 365 * 24 * 3600
SIZES = (3, 4, 5, 8, 12, 20, 70)


class Report(Struct, frozen=True):
    """What came of a storm; equal in every process for one seed."""

    seed: int
    size: int
    faults: dict[str, int]
    frames: int
    checks: int
    quiet_seconds: float  # from the end of the faults to equal replicas
    trace: str  # hash over every delivered frame with its time


class Storm:
    """The faults and the workload of one seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"storm/{seed}")
        chance = self.chance
        self.size = chance.choice(SIZES)
        weather = Weather(delay=10 ** chance.uniform(-4, -1.5), jitter=10 ** chance.uniform(-4, -1.5))
        self.faults: Counter[str] = Counter()
        self.moods = {
            name: chance.random() < 0.6
            for name in ("loss", "duplication", "reordering", "cut", "partition", "crash", "silent", "disk", "freeze", "clock")
        }
        if self.moods["loss"]:
            # Each frame for itself, which no TCP stream does; at a fifth a large overlay does nothing but accuse and refute.
            weather.loss = chance.choice((0.01, 0.05, 0.2 if self.size <= 20 else 0.05))
        if self.moods["duplication"]:
            weather.duplication = 0.1
        if self.moods["reordering"]:
            weather.reordering = 0.2
        self.cluster = Cluster(self.size, seed, weather)
        self.cluster.tracing = True
        self.cluster.oracle = Oracle()
        for node in self.cluster.nodes:
            if self.moods["clock"]:
                node.wall_offset += chance.uniform(-1, 1) * YEAR_SECONDS

    def run(self, seed: int) -> Report:
        """The whole run.

        Raises: Broken where a check fails.
        """
        cluster = self.cluster
        for place in range(self.size):
            contacts = (self.chance.randrange(place),) if place else ()
            cluster.events.at(self.chance.uniform(0, 3), self._boot, place, contacts)
        cluster.run(4.0)
        self._plan()
        cluster.run(STORM_SECONDS)
        self._calm_down()
        quiet = cluster.run_until(self._over, QUIET_SECONDS_MAX, 0.25)
        if quiet is None:
            raise Broken(
                f"replicas are not equal, or somebody is not held for alive, {QUIET_SECONDS_MAX:.0f} s after the faults"
            )
        self._check_all()
        assert cluster.oracle is not None
        frames = sum(cluster.frames.values())
        trace = cluster.trace.hexdigest()
        faults = dict(sorted((self.faults + cluster.network.counts).items()))
        return Report(seed, self.size, faults, frames, cluster.oracle.checks, round(quiet, 3), trace)

    def _boot(self, place: int, contacts: tuple[int, ...]) -> None:
        self.cluster.boot(place, contacts=contacts)

    # Workload and faults, as events.

    def _plan(self) -> None:
        chance, events, size = self.chance, self.cluster.events, self.size
        start = self.cluster.now

        def at_random(call: object, count: int) -> None:
            for _ in range(count):
                events.at(start + chance.uniform(0, STORM_SECONDS - 1), call)  # type: ignore[arg-type]  # calls of several results

        at_random(self._write, 40 * size if size <= 20 else 4 * size)
        for mood, fault in (
            ("cut", self._cut),
            ("partition", self._partition),
            ("crash", self._crash),
            ("freeze", self._freeze),
            ("clock", self._jump),
        ):
            if self.moods[mood]:
                at_random(fault, 2 + chance.randrange(4))

    def _write(self) -> None:
        place, name = self.chance.randrange(self.size), self.chance.randrange(20)
        self.cluster.write(place, (KIND, name), None if self.chance.random() < 0.4 else self.chance.randrange(1 << 30))

    def _cut(self) -> None:
        one, other = self.chance.randrange(self.size), self.chance.randrange(self.size)
        self.faults["one-way cut"] += 1
        self.cluster.network.cuts[one, other] = None
        self.cluster.events.at(self.cluster.now + self.chance.uniform(0.5, 10), self._mend, one, other)

    def _mend(self, one: int, other: int) -> None:
        self.cluster.network.cuts.pop((one, other), None)

    def _partition(self) -> None:
        self.faults["partition"] += 1
        self.cluster.network.sides = {place: self.chance.randrange(2) for place in range(self.size)}
        self.cluster.events.at(self.cluster.now + self.chance.uniform(0.5, 15), self._heal)

    def _heal(self) -> None:
        self.cluster.network.sides = None

    def _crash(self) -> None:
        place = self.chance.randrange(self.size)
        if self.cluster.nodes[place].core is None:
            return
        silent = self.moods["silent"] and self.chance.random() < 0.5
        self.faults["silent crash" if silent else "crash"] += 1
        self.cluster.crash(place, silent=silent)
        # A host that lost power takes longer to be back than its peers need to see that its streams are dead.
        self.cluster.events.at(self.cluster.now + self.chance.uniform(5.0 if silent else 0.1, 12), self._restart, place)

    def _restart(self, place: int) -> None:
        if self.cluster.nodes[place].core is not None:
            return
        disk = not (self.moods["disk"] and self.chance.random() < 0.5)
        self.faults["restart" if disk else "restart without disk"] += 1
        others = [other for other in self.cluster.running() if other != place]
        self.cluster.boot(place, disk=disk, contacts=(self.chance.choice(others),) if others else ())

    def _freeze(self) -> None:
        self.faults["freeze"] += 1
        self.cluster.freeze(self.chance.randrange(self.size), self.chance.choice((0.3, 2.0, 5.0, 9.0)))

    def _jump(self) -> None:
        self.faults["clock jump"] += 1
        self.cluster.nodes[self.chance.randrange(self.size)].wall_offset += self.chance.uniform(-1, 1) * YEAR_SECONDS

    # The end.

    def _calm_down(self) -> None:
        network = self.cluster.network
        network.cuts.clear()
        network.sides = None
        network.weather.loss = network.weather.duplication = network.weather.reordering = 0.0
        for place in range(self.size):
            if self.cluster.nodes[place].core is None:
                self._restart(place)

    def _over(self) -> bool:
        cluster = self.cluster
        return (
            len(cluster.running()) == self.size
            and cluster.equal()
            and all(cluster.core(p).believe(name, cluster.now) is ALIVE for p in range(self.size) for name in cluster.names)
        )

    def _check_all(self) -> None:
        cluster = self.cluster
        assert cluster.oracle is not None
        if cluster.clashes:
            raise Broken(f"{cluster.clashes} were told that they have a double")
        states = [whole(cluster.core(place).replica) for place in range(self.size)]
        if any(state != states[0] for state in states):
            raise Broken("equal roots over replicas that differ")
        for place in range(self.size):
            core = cluster.core(place)
            for name in cluster.names:
                cluster.oracle.check(place, core.replica, name, None)
            if core.me.namespace.max_version != cluster.oracle.lives[core.me.standing.generation.nonce].version:
                raise Broken(f"{place} lost count of its own writes")
            if core.violations.bad_frame or core.violations.bad_hello:
                raise Broken(f"{place} refused a frame that was honest")


def run_storm(seed: int) -> Report:
    """One seeded storm."""
    return Storm(seed).run(seed)
