"""A cluster of cores on the simulated network: clocks, freezes, crashes and restarts."""

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from p2p.core import Core
from p2p.effects import Changed, Clash, Close, Dial, Effect, Renewed, Send
from p2p.lattice import ALIVE, Generation, Standing
from p2p.links import Link
from p2p.replica import Schema
from p2p.settings import MESH_MAX, Settings
from p2p.sync_wire import Key
from tests.sim.network import TCP_ACK_BYTES, Events, Network, Weather
from tests.sim.oracle import Oracle

CLUSTER = bytes(16)


def name_of(place: int) -> bytes:
    """The node id of a place: any 16 bytes, spread over the buckets."""
    return hashlib.blake2b(place.to_bytes(4, "big"), digest_size=12).digest() + place.to_bytes(4, "big")


def place_of(node: bytes) -> int:
    """The place of a node id."""
    return int.from_bytes(node[12:], "big")


class SimNode:
    """One place: its process of the moment, its disk, its wall clock."""

    def __init__(self, place: int, chance: random.Random) -> None:
        self.place = place
        self.chance = chance
        self.core: Core | None = None
        self.boots = 0
        self.counter_on_disk = 0
        self.wall_offset = 1.7e9  # seconds that the wall clock is ahead of virtual time
        self.frozen_until = 0.0
        self.inbox: list[tuple[int, bytes]] = []
        self.tick_at = float("inf")


class Cluster:
    """N nodes. `seed` decides everything that chance decides."""

    def __init__(
        self,
        size: int,
        seed: int | str,
        weather: Weather | None = None,
        settings: Settings | None = None,
        schema: Schema | None = None,
    ) -> None:
        self.seed = seed
        self.chance = random.Random(f"{seed}/network")
        self.events = Events()
        self.network = Network(self.events, self.chance, weather or Weather())
        self.settings = settings or Settings()
        self.schema = schema or Schema({})
        self.nodes = [SimNode(place, random.Random(f"{seed}/{place}")) for place in range(size)]
        self.names = [name_of(place) for place in range(size)]
        self.trace = hashlib.blake2b(digest_size=16)
        self.tracing = False
        self.oracle: Oracle | None = None  # set before any boot: then every change at every node is checked
        self.clashes: list[int] = []
        self.frames: Counter[int] = Counter()
        self.watch_changes: Callable[[int, Changed], None] | None = None
        self.after_delivery: Callable[[int, int], None] | None = None
        self.network.deliver = self._deliver
        self.network.opened = lambda place, peer: self._call(
            place, lambda core, now: core.connected(self.names[peer], now, address=str(peer))
        )
        self.network.ended = self._ended
        self.network.failed = self._failed

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.events.now

    def core(self, place: int) -> Core:
        """The running core of a place."""
        core = self.nodes[place].core
        assert core is not None
        return core

    def running(self) -> list[int]:
        """Places with a running process."""
        return [node.place for node in self.nodes if node.core is not None]

    # Lives.

    def boot(self, place: int, *, disk: bool = True, contacts: tuple[int, ...] = ()) -> Core:
        """Start a node's process; without its disk it doesn't know its last counter."""
        node = self.nodes[place]
        node.boots += 1
        if not disk:
            node.counter_on_disk = 0
        wall = max(0, int(self.now + node.wall_offset))
        generation = Generation(max(node.counter_on_disk + 1, wall), node.chance.getrandbits(62))
        node.counter_on_disk = generation.counter
        if self.oracle is not None:
            self.oracle.forgotten(place)
            self.oracle.born(self.names[place], generation)
        core = node.core = Core(
            self.names[place], generation, cluster=CLUSTER, schema=self.schema, chance=node.chance, settings=self.settings
        )
        node.frozen_until = 0.0
        node.inbox = []
        node.tick_at = float("inf")
        core.overlay.join = [str(contact) for contact in contacts]
        self.network.listen(place)
        self._act(node, core.start(self.now))
        return core

    def crash(self, place: int, *, silent: bool = False) -> None:
        """The process ends without a word; `silent`: its host with it."""
        self.nodes[place].core = None
        self.network.stop(place, silent=silent)

    def freeze(self, place: int, seconds: float) -> None:
        """The process stands still; frames wait for it."""
        node = self.nodes[place]
        node.frozen_until = max(node.frozen_until, self.now + seconds)
        self.events.at(node.frozen_until, self._thaw, place)

    def _thaw(self, place: int) -> None:
        node = self.nodes[place]
        if node.core is None or self.now < node.frozen_until:
            return
        node.tick_at = float("inf")  # what was due meanwhile did not come
        waiting, node.inbox = node.inbox, []
        for sender, body in waiting:
            self._deliver(place, sender, body)
        self._call(place, lambda core, now: core.tick(now))

    def warm(self, degree: int = 7) -> None:
        """All nodes up, knowing each other, with the streams that they would keep; no time goes by."""
        size = len(self.nodes)
        for place in range(size):
            self.boot(place)
        standings = [(node, self.core(place).me.standing) for place, node in enumerate(self.names)]
        for place in range(size):
            core = self.core(place)
            for node, standing in standings:
                if node != self.names[place]:
                    core.replica.join_standing(node, standing)
            core.membership.live = size
        for one, other in self._graph(degree):
            self.network.join(one, other)
            for place, peer in ((one, other), (other, one)):
                self.core(place).links[self.names[peer]] = Link(self.names[peer], self.now, greeted=True, heard=self.now)

    def _graph(self, degree: int) -> list[tuple[int, int]]:
        size = len(self.nodes)
        if size <= MESH_MAX:
            return [(one, other) for one in range(size) for other in range(one)]
        edges: dict[tuple[int, int], None] = {}
        degrees = [0] * size
        for place in range(size):
            while degrees[place] < degree - 1:
                other = self.chance.randrange(size)
                edge = (max(place, other), min(place, other))
                if other != place and edge not in edges and degrees[other] <= degree:
                    edges[edge] = None
                    degrees[place] += 1
                    degrees[other] += 1
        return list(edges)

    # Running.

    def run(self, seconds: float) -> int:
        """Let virtual time pass; the number of events in it."""
        return self.events.run(self.now + seconds)

    def run_until(self, done: Callable[[], bool], limit: float, step: float = 0.01) -> float | None:
        """Run until a condition holds; seconds that took, or None beyond the limit."""
        start = self.now
        while not done():
            if self.now - start >= limit:
                return None
            self.run(step)
        return self.now - start

    def call(self, place: int, action: Callable[[Core, float], None]) -> None:
        """Let a node do something of its own, such as writing a record."""
        node = self.nodes[place]
        if node.core is not None:
            action(node.core, self.now)
            self._act(node, node.core.outbox.take())

    def write(self, place: int, key: Key, value: object) -> None:
        """Let a node publish a record, or take it back (None), and the oracle know."""
        node = self.nodes[place]
        core = node.core
        if core is None or self.now < node.frozen_until:
            return
        before = core.me.namespace.max_version
        if value is None:
            core.delete(*key, self.now)
        else:
            core.write(*key, value, self.now)
        if self.oracle is not None and core.me.namespace.max_version != before:
            record = core.me.namespace.records.get(key)
            nonce = core.me.namespace.generation.nonce
            self.oracle.lives[nonce].write(key, record.value if record is not None else None)
        self._act(node, core.outbox.take())

    def equal(self, places: list[int] | None = None) -> bool:
        """Whether these nodes hold equal replicas."""
        return len({self.core(place).replica.root for place in (places or self.running())}) <= 1

    def _call(self, place: int, action: Callable[[Core, float], list[Effect]]) -> None:
        node = self.nodes[place]
        if node.core is None:
            return
        if self.now < node.frozen_until:
            self.events.at(node.frozen_until, self._call, place, action)
            return
        self._act(node, action(node.core, self.now))

    def _ended(self, place: int, peer: int, broken: bool) -> None:
        self._call(place, lambda core, now: core.disconnected(self.names[peer], now, broken=broken))

    def _failed(self, place: int, target: int, refused: bool) -> None:
        self._call(place, lambda core, now: core.dial_failed(self.names[target], now, refused=refused))

    def _deliver(self, place: int, sender: int, body: bytes) -> None:
        node = self.nodes[place]
        core = node.core
        if core is None:
            return
        if self.events.now < node.frozen_until:
            node.inbox.append((sender, body))
            return
        if self.tracing:
            self.trace.update(b"%d %d %d " % (int(self.now * 1e6), place, sender) + body)
        self.frames[place] += 1
        effects = core.handle(self.names[sender], body, self.events.now)
        if not self._act(node, effects, answering=sender):
            self.network.sent_bytes[place] += TCP_ACK_BYTES
        if self.after_delivery is not None:
            self.after_delivery(place, sender)

    def _act(self, node: SimNode, effects: list[Effect], answering: int = -1) -> bool:
        """Do what a core asks for; whether anything went back to the one that is being answered."""
        answered = False
        place = node.place
        for effect in effects:
            if type(effect) is Send:
                peer = place_of(effect.peer)
                answered = answered or peer == answering
                self.network.send(place, peer, effect.body)
            elif isinstance(effect, Dial):
                target = effect.target
                self.network.dial(place, int(target) if isinstance(target, str) else place_of(target))
            elif isinstance(effect, Close):
                self.network.close(place, place_of(effect.peer))
            elif isinstance(effect, Renewed):
                if self.oracle is not None:
                    before = Generation(node.counter_on_disk, effect.generation.nonce)
                    self.oracle.renewed(self.names[place], before, effect.generation)
                node.counter_on_disk = effect.generation.counter
            elif isinstance(effect, Clash):
                self.clashes.append(place)
            elif isinstance(effect, Changed):
                if self.watch_changes is not None:
                    self.watch_changes(place, effect)
                if self.oracle is not None and node.core is not None:
                    keys = None if effect.changes is None else [written.key for written in effect.changes]
                    self.oracle.check(place, node.core.replica, effect.node, keys)
        core = node.core
        if core is not None and core.deadline != node.tick_at:
            due = max(core.deadline, self.events.now)
            if due < node.tick_at:
                node.tick_at = due
                self.events.at(due, self._tick, place, due)
        return answered

    def _tick(self, place: int, due: float) -> None:
        node = self.nodes[place]
        core = node.core
        if core is None or node.tick_at != due:
            return
        if self.events.now < node.frozen_until:
            return  # the thaw ticks
        node.tick_at = float("inf")
        self._act(node, core.tick(self.events.now))


def beliefs(cluster: Cluster) -> Mapping[int, Counter[str]]:
    """For each node, how many running nodes hold it for what."""
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for place in cluster.running():
        core = cluster.core(place)
        for other, name in enumerate(cluster.names):
            belief = core.believe(name, cluster.now)
            counts[other]["unknown" if belief is None else belief.name.lower()] += 1
    return counts


__all__ = ["ALIVE", "Cluster", "SimNode", "Standing", "beliefs", "name_of", "place_of"]
