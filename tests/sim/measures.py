"""What the replicated state promises in numbers, measured in the simulator: benchmarks print them, tests run short forms."""

import gc
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from msgspec import Raw, Struct

from node.in_flight import InFlight, recount
from node.records import RANK, SCHEMA, TASK, VERDICT, Executor, RankPhase, RankReport, TaskHeader, Terminal, Verdict
from p2p.effects import Changed
from p2p.lattice import ALIVE, DEAD, Generation, Standing
from p2p.namespace import Namespace
from p2p.replica import Replica
from p2p.settings import Settings
from p2p.sync_wire import MESSAGES, Change, Delta, Key, Part
from p2p.wire import HEADER_BYTES
from tests.sim.cluster import Cluster
from tests.sim.network import Weather

KIND = 200
YEAR_SECONDS = 365 * 24 * 3600.0


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Without the cyclic collector, which walks a million live objects again and again and finds nothing."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def p99(values: list[float]) -> float:
    """The 99th percentile; of fewer than a hundred values the largest."""
    return percentile(values, 0.99)


# Spreading.


def spread_seconds(size: int, seed: int, writes: int, *, push: bool, exchange_loss: float = 0.0) -> list[float]:
    """Seconds from a write at a random node to its being everywhere; a repair round takes one second (10 % of jitter)."""
    cluster = Cluster(size, f"spread/{seed}", Weather(exchange_loss=exchange_loss), Settings(push=push))
    cluster.warm()
    cluster.run(2.0)
    times = []
    for number in range(writes):
        writer = cluster.chance.randrange(size)
        cluster.write(writer, (KIND, number), "x" * 10)
        name, version = cluster.names[writer], cluster.core(writer).me.namespace.max_version
        lacking = list(range(size))
        begun = cluster.now
        while lacking:
            assert cluster.now - begun < 60
            cluster.run(0.002 if push else 0.02)
            lacking = [place for place in lacking if cluster.core(place).replica.members[name].version < version]
        times.append(cluster.now - begun)
        cluster.run(0.5 + cluster.chance.random())
    return times


class Idle(Struct, frozen=True):
    """An idle cluster."""

    bytes_per_second: float  # sent by each node, mean
    bytes_per_second_max: float  # of the busiest node
    dials: int
    wall_seconds: float
    events: int


def idle(size: int, seconds: float) -> Idle:
    """What nodes send while nothing happens."""
    cluster = Cluster(size, "idle")
    cluster.warm()
    cluster.run(3.0)
    before, dials = dict(cluster.network.sent_bytes), cluster.network.dials
    begun = time.perf_counter()
    events = cluster.run(seconds)
    wall = time.perf_counter() - begun
    rates = [(cluster.network.sent_bytes[place] - before.get(place, 0)) / seconds for place in range(size)]
    assert cluster.equal()
    return Idle(sum(rates) / size, max(rates), cluster.network.dials - dials, wall, events)


# Failure detection.


def death_seconds(size: int, seed: int, *, silent: bool) -> float:
    """Seconds until all others hold a node for dead that is gone, with its host (silent) or alone; nobody else is doubted."""
    cluster = Cluster(size, f"death/{seed}")
    cluster.warm()
    cluster.run(3.0 + cluster.chance.random())
    gone = cluster.chance.randrange(size)
    cluster.crash(gone, silent=silent)
    others = cluster.running()

    def known() -> bool:
        return all(cluster.core(place).believe(cluster.names[gone], cluster.now) is DEAD for place in others)

    took = cluster.run_until(known, 60.0, 0.05)
    assert took is not None
    assert all(cluster.core(p).believe(cluster.names[o], cluster.now) is ALIVE for p in others for o in others)
    return took


def false_deaths(size: int, node_hours: float, *, seed: int = 1, loss: float = 0.0, frozen: int | None = None) -> int:
    """How often a node that answers was declared dead; `frozen` stands still for 5 s of every 20 s and doesn't count."""
    cluster = Cluster(size, f"false/{seed}", Weather(loss=loss))
    cluster.warm()
    cluster.run(1.0)
    found: dict[tuple[bytes, Standing], None] = {}

    def watch(place: int, change: Changed) -> None:
        member = cluster.core(place).replica.members.get(change.node)
        if member is not None and member.standing.liveness >= DEAD:
            found[member.node, member.standing] = None

    cluster.watch_changes = watch
    end = cluster.now + node_hours * 3600 / size
    while cluster.now < end:
        if frozen is not None:
            cluster.freeze(frozen, 5.0)
        cluster.run(min(20.0, end - cluster.now))
    return sum(1 for node, _ in found if frozen is None or node != cluster.names[frozen])


# Partitions and restarts.


class Heal(Struct, frozen=True):
    """The end of a partition of 2 x 50 nodes, 200 tasks running inside the halves."""

    seconds: float  # until all replicas are equal and everybody is alive in them
    dead_before: bool  # whether all of each half held all of the other for dead
    buried_before: int  # of 100 nodes how many had forgotten all of the other half
    stopped: int  # times that a task's home or executor took the other for dead
    uncounted: int  # of all tasks in flight, how many were missing at any node of their half at any look


def heal(seed: int, *, split_seconds: float = 45.0, forget: bool = False) -> Heal:
    """Split, wait, heal; with `forget` the halves bury each other after 15 s of death instead of a day."""
    size = 100
    settings = Settings(forget_seconds=15.0) if forget else Settings()
    cluster = Cluster(size, f"heal/{seed}", settings=settings, schema=SCHEMA)
    cluster.warm()
    cluster.run(1.0)
    pairs = _tasks_in_halves(cluster, 200)
    cluster.run(3.0)
    cluster.network.sides = {place: place * 2 // size for place in range(size)}
    cluster.run(split_seconds)
    halves = [range(size // 2), range(size // 2, size)]
    dead = buried = 0
    for place in range(size):
        core = cluster.core(place)
        beliefs = [core.believe(cluster.names[other], cluster.now) for other in halves[place < size // 2]]
        dead += all(belief is DEAD or belief is None for belief in beliefs)
        buried += all(belief is None for belief in beliefs)
    observers = [place for half in halves for place in half[::10]]
    cluster.network.sides = None
    healed = cluster.now
    stopped = uncounted = 0
    while not (cluster.equal() and _all_alive(cluster)):
        assert cluster.now - healed < 60
        cluster.run(0.1)
        for home, executor in pairs:
            for one, other in ((home, executor), (executor, home)):
                stopped += cluster.core(one).believe(cluster.names[other], cluster.now) is DEAD
        uncounted += sum(_missing(cluster, observer, pairs) for observer in observers)
    return Heal(cluster.now - healed, dead == size, buried, stopped, uncounted)


def _tasks_in_halves(cluster: Cluster, count: int) -> list[tuple[int, int]]:
    half = len(cluster.nodes) // 2
    pairs = []
    for number in range(count):
        first = number % 2 * half
        home, executor = first + cluster.chance.randrange(half), first + cluster.chance.randrange(half)
        boot = cluster.core(executor).me.standing.generation.nonce
        cluster.write(home, (TASK, number), TaskHeader(0, 7, (Executor(boot, 1),), 100, 100, 600))
        if home != executor:
            pairs.append((home, executor))
            cluster.core(home).watch(cluster.names[executor])
            cluster.core(executor).watch(cluster.names[home])
    return pairs


def _missing(cluster: Cluster, observer: int, pairs: list[tuple[int, int]]) -> int:
    half, core = len(cluster.nodes) // 2, cluster.core(observer)
    ours = [pair for pair in pairs if (pair[0] < half) == (observer < half)]
    return sum(any(core.believe(cluster.names[p], cluster.now) is DEAD for p in pair) for pair in ours)


def _all_alive(cluster: Cluster) -> bool:
    core = cluster.core(0)
    return len(core.replica.members) == len(cluster.nodes) and all(
        member.standing.liveness is ALIVE for member in core.replica.members.values()
    )


def lost_disk_seconds(size: int, seed: int, clock: float) -> float:
    """Seconds from a restarted node's first contact until its old records are gone everywhere.

    It has lost its disk, and its wall clock is ahead (or back) by `clock` seconds.
    """
    cluster = Cluster(size, f"disk/{seed}", schema=SCHEMA)
    cluster.warm()
    cluster.run(1.0)
    place = cluster.chance.randrange(size)
    name, contact = cluster.names[place], (place + 1) % size
    for number in range(20):
        cluster.write(place, (TASK, number), TaskHeader(0, 7, (Executor(1, 1),), 100, 100, 600))
    cluster.run(2.0)
    old = cluster.core(place).me.standing.generation.nonce
    cluster.crash(place)
    cluster.run(0.5)
    cluster.nodes[place].wall_offset += clock
    cluster.boot(place, disk=False, contacts=(contact,))
    assert cluster.run_until(lambda: bool(cluster.core(place).links), 5.0, 0.001) is not None

    def gone() -> bool:
        members = [cluster.core(p).replica.members[name] for p in range(size)]
        return all(member.namespace.generation.nonce != old or not member.current for member in members)

    took = cluster.run_until(gone, 30.0, 0.005)
    assert took is not None
    assert cluster.run_until(lambda: cluster.equal() and _all_alive(cluster), 30.0, 0.05) is not None
    return took


# Cost.


def header(number: int, ranks: int) -> TaskHeader:
    """A task's header as a busy cluster has it."""
    boots = tuple(Executor((1 << 60) + number % 7 + rank, 1 + number % 5) for rank in range(ranks))
    return TaskHeader(0, (1 << 61) + number % 3, boots, 1000 + number % 1000, 500, 600)


def entries_per_second(entries: int = 200_000) -> float:
    """Decode, check every type and bound, and apply: entries of a realistic mix on one core."""
    standing = Standing(Generation(1_790_000_000, 1 << 60), 0, ALIVE)
    encode = msgspec.msgpack.encode
    frames, each = [], 1000
    for first in range(0, entries, each):
        changes = []
        for number in range(first, first + each, 4):
            boot = 1 << 60
            changes += [
                Change(TASK, 1, number % 8000, Raw(encode(header(number, 2)))),
                Change(RANK, 1, (boot, number % 8000, 0, 0), Raw(encode(RankReport(RankPhase.RUNNING)))),
                Change(VERDICT, 1, number % 8000, Raw(encode(Verdict(Terminal.COMPLETE)))),
                Change(TASK, 1, (number + 4000) % 8000 + 1, Raw(b"\xc0")),
            ]
        part = Part(b"n" * 16, standing, first, first + each, max(0, first - 500), False, changes)
        frames.append(MESSAGES.encode(Delta([], [part]))[HEADER_BYTES:])
    replica = Replica(SCHEMA)
    begun = time.perf_counter()
    for frame in frames:
        delta = MESSAGES.decode(frame)
        assert isinstance(delta, Delta)
        for part in delta.parts:
            changes_checked = replica.check(part)
            replica.join_standing(part.node, part.standing)
            replica.join_records(part, changes_checked)
    took = time.perf_counter() - begun
    assert replica.members[b"n" * 16].version == entries
    return entries / took


def live_task_bytes(tasks: int = 1000, *, ranks: int, first: int = 1_000_000) -> int:
    """Encoded bytes of the snapshots that hold so many live tasks: headers at the home, reports of their ranks elsewhere."""
    namespaces = [Namespace(Generation(1_790_000_000, (1 << 60) + i)) for i in range(1 + ranks)]
    for namespace in namespaces:
        namespace.max_version = 8 * first
    boot = namespaces[0].generation.nonce
    for number in range(first, first + tasks):
        value = header(number, ranks)
        namespaces[0].write((TASK, number), msgspec.msgpack.encode(value), value)
        for rank in range(ranks):
            report = RankReport(RankPhase.RUNNING)
            namespaces[1 + rank].write((RANK, (boot, number, 0, rank)), msgspec.msgpack.encode(report), report)
    return sum(_snapshot_bytes(namespace) for namespace in namespaces)


def _snapshot_bytes(namespace: Namespace) -> int:
    replica = Replica(SCHEMA)
    replica.join_standing(bytes(16), Standing(namespace.generation, 0, ALIVE))
    replica.members[bytes(16)].namespace = namespace
    part, _, _ = replica.part(bytes(16), 0, 1 << 20)
    return len(MESSAGES.encode(Delta([], [part])))


class Soak(Struct, frozen=True):
    """What a replica holds after many tasks."""

    tasks: int
    records: int
    deletes: int
    encoded_bytes: int


def soak(milestones: tuple[int, ...], live: int = 100) -> list[Soak]:
    """One home, one executor, tasks that come and go; their replica's size at each milestone."""
    homes = [(n, Namespace(Generation(1, (1 << 60) + i))) for i, n in enumerate((b"h" * 16, b"e" * 16))]
    (_, home), (_, executor) = homes
    replica = Replica(SCHEMA)
    for node, namespace in homes:
        replica.join_standing(node, Standing(namespace.generation, 0, ALIVE))
    boot, encode = home.generation.nonce, msgspec.msgpack.encode
    verdict, running, done = Verdict(Terminal.COMPLETE), RankReport(RankPhase.RUNNING), RankReport(RankPhase.OK)
    coded = {id(value): encode(value) for value in (verdict, running, done)}
    reached = []
    for number in range(1 << 17, (1 << 17) + milestones[-1] + 1):
        value = header(number, 1)
        home.write((TASK, number), encode(value), value)
        key: Key = (RANK, (boot, number, 0, 0))
        executor.write(key, coded[id(running)], running)
        executor.write(key, coded[id(done)], done)
        home.write((VERDICT, number), coded[id(verdict)], verdict)
        old = number - live
        home.delete((TASK, old))
        home.delete((VERDICT, old))
        executor.delete((RANK, (boot, old, 0, 0)))
        if number % 200 == 0:
            _catch_up(replica, homes)
        if number - (1 << 17) in milestones:
            _catch_up(replica, homes)
            members = replica.members.values()
            records, deletes = sum(len(m.namespace.records) for m in members), sum(len(m.namespace.deletes) for m in members)
            size = sum(_snapshot_bytes(member.namespace) for member in members)
            reached.append(Soak(number - (1 << 17), records, deletes, size))
    return reached


def _catch_up(replica: Replica, writers: list[tuple[bytes, Namespace]]) -> list[Changed]:
    """Bring a replica up to date with its writers, by the parts that would travel."""
    changed = []
    for node, namespace in writers:
        standing = Standing(namespace.generation, 0, ALIVE)
        replica.join_standing(node, standing)
        held = replica.members[node].namespace
        source = Replica(SCHEMA)
        source.join_standing(node, standing)
        source.members[node].namespace = namespace
        part, _, _ = source.part(node, held.max_version if held.generation == namespace.generation else 0, 1 << 22)
        _, fresh = replica.join_records(part, replica.check(part))
        changed.append(Changed(node, None if fresh is None else tuple(fresh)))
    return changed


def drift(tasks: int, *, crash_share: float = 0.01, seed: int = 1, nodes: int = 10) -> tuple[int, int, int]:
    """In-flight counts against a recount, while tasks come and go and nodes crash under them.

    Returns how often they differed, what was left in flight when all tasks were over, and the number of crashes.
    """
    chance = random.Random(seed)
    names = [bytes([place]) * 16 for place in range(nodes)]
    counters = [1] * nodes
    writers = [(name, Namespace(Generation(1, chance.getrandbits(62)))) for name in names]
    open_tasks: list[list[int]] = [[] for _ in names]
    replica = Replica(SCHEMA)
    index = InFlight(replica, lambda _: ALIVE)
    verdict = Verdict(Terminal.COMPLETE)
    encoded = msgspec.msgpack.encode(verdict)
    wrong = crashes = 0

    def tell() -> None:
        for change in _catch_up(replica, writers):
            index.update(change)

    for number in range(tasks):
        place = chance.randrange(nodes)
        home = writers[place][1]
        boot = writers[chance.randrange(nodes)][1].generation.nonce
        value = TaskHeader(0, number % 5, (Executor(boot, 1),), 10, 10, 60)
        home.write((TASK, number), msgspec.msgpack.encode(value), value)
        open_tasks[place].append(number)
        if len(open_tasks[place]) > 20:
            ended = open_tasks[place].pop(0)
            home.write((VERDICT, ended), encoded, verdict)
        if chance.random() < crash_share:
            crashes += 1
            victim = chance.randrange(nodes)
            counters[victim] += 1
            writers[victim] = (names[victim], Namespace(Generation(counters[victim], chance.getrandbits(62))))
            open_tasks[victim] = []
        if number % 50 == 0:
            tell()
            for name, namespace in writers:
                _collect_ended(namespace)
                assert name
        if number % 5000 == 0:
            wrong += index.counts != recount(replica, lambda _: ALIVE)
    for place, (_, namespace) in enumerate(writers):
        for number in open_tasks[place]:
            namespace.write((VERDICT, number), encoded, verdict)
    tell()
    return wrong, sum(index.counts.values()), crashes


def _collect_ended(namespace: Namespace) -> None:
    for kind, name in [key for key in namespace.records if key[0] == VERDICT]:
        namespace.delete((TASK, name))
        namespace.delete((kind, name))
