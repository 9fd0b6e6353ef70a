"""Probing members, straight and through helpers, with an eye on one's own health (SWIM; Lifeguard, arXiv 1707.00788).

A probe succeeds by an ack, whoever carried it, or by the member's greeting on a new stream. One that fails while helpers didn't
even say that they had no answer speaks against this node more than against the member: it slows its own probing down.

Pure: no clock, no randomness of its own, no IO.
"""

from collections.abc import Callable

from msgspec import Struct

from p2p.effects import Chance, Dial, Outbox, shuffled
from p2p.lattice import Standing
from p2p.links import Links
from p2p.settings import HEALTH_MAX, HELPERS, Settings
from p2p.sync_wire import Ack, Nack, Ping, PingRequest

SEQUENCE_END = 1 << 32
RELAYS_MAX = 1024


class Probe(Struct, weakref=False):
    """One probe under way."""

    target: bytes
    ask_at: float  # when helpers are asked
    end_at: float
    helpers: int = -1  # asked; -1: not yet
    nacks: int = 0


class Relay(Struct, weakref=False):
    """A probe for somebody else."""

    origin: bytes
    sequence: int  # of the origin's request
    target: bytes
    end_at: float


class Prober:
    """The probes of one node; `failed` and `said` are the membership's: what a failure means, what is held against a member."""

    def __init__(self, links: Links, outbox: Outbox, settings: Settings, chance: Chance) -> None:
        self._links = links
        self._outbox = outbox
        self._settings = settings
        self._chance = chance
        self._queue: list[bytes] = []
        self._sequence = 0
        self._probes: dict[int, Probe] = {}
        self._targets: dict[bytes, int] = {}  # of the probes under way
        self._relays: dict[int, Relay] = {}
        self.period_at = 0.0
        self.deadline = 0.0  # when `tick` has something to do, at the latest
        self.health = 0  # 0 is best
        self.said: Callable[[bytes], Standing | None] = lambda _: None
        self.failed: Callable[[bytes], None] = lambda _: None

    def start(self, now: float) -> None:
        """Begin, or begin anew, with the first period at a random moment."""
        self._probes.clear()
        self._targets.clear()
        self._relays.clear()
        self.period_at = self.deadline = now + self._chance.random() * self._settings.probe_seconds

    def shift(self, gap: float) -> None:
        """Push timers on after a freeze."""
        self.period_at += gap
        self.deadline += gap
        for probe in self._probes.values():
            probe.ask_at += gap
            probe.end_at += gap
        for relay in self._relays.values():
            relay.end_at += gap

    def worsen(self) -> None:
        """Think less of one's own health."""
        self.health = min(HEALTH_MAX, self.health + 1)

    def tick(self, now: float, candidates: Callable[[], list[bytes]]) -> None:
        """Ask helpers, give up, and begin the probes of a period."""
        for sequence, probe in list(self._probes.items()):
            if probe.helpers < 0 and now >= probe.ask_at:
                self._ask_helpers(sequence, probe)
            if now >= probe.end_at:
                self._give_up(sequence, probe)
        for sequence, relay in list(self._relays.items()):
            if now >= relay.end_at:
                del self._relays[sequence]
                if relay.origin in self._links:
                    self._outbox.send(relay.origin, Nack(relay.sequence))
        if now >= self.period_at:
            self.period_at = now + self._settings.probe_seconds * (1 + self.health)
            for target in self._choose(candidates):
                self.probe(target, now)
        waits = [probe.ask_at if probe.helpers < 0 else probe.end_at for probe in self._probes.values()]
        waits += [relay.end_at for relay in self._relays.values()]
        self.deadline = min(waits, default=self.period_at)
        self.deadline = min(self.deadline, self.period_at)

    def _choose(self, candidates: Callable[[], list[bytes]]) -> list[bytes]:
        """The next targets of a shuffled round, so that everybody's turn comes before anybody's comes twice."""
        chosen: list[bytes] = []
        while len(chosen) < self._settings.probe_targets:
            if not self._queue:
                self._queue = [node for node in shuffled(candidates(), self._chance) if node not in chosen]
                if not self._queue:
                    break
            target = self._queue.pop()
            if target in self._links and target not in chosen:
                chosen.append(target)
        return chosen

    def probe(self, target: bytes, now: float, *, direct: bool = True) -> None:
        """Probe one member now, unless that is under way; not `direct`: through helpers only."""
        if target in self._targets:
            return
        self._sequence = sequence = (self._sequence + 1) % SEQUENCE_END
        slow = 1 + self.health
        ask_at, end_at = now + self._settings.direct_seconds * slow, now + self._settings.probe_seconds * slow
        self._probes[sequence] = Probe(target, ask_at, end_at)
        self.deadline = min(self.deadline, ask_at)
        self._targets[target] = sequence
        if direct:
            self._reach(target, sequence)

    def _reach(self, target: bytes, sequence: int) -> None:
        if target in self._links:
            self._outbox.send(target, Ping(sequence, self.said(target)))
        else:
            self._outbox.add(Dial(target))

    def _ask_helpers(self, sequence: int, probe: Probe) -> None:
        peers = [peer for peer, link in self._links.items() if link.greeted and peer != probe.target]
        helpers = shuffled(peers, self._chance)[:HELPERS]
        probe.helpers = len(helpers)
        for helper in helpers:
            self._outbox.send(helper, PingRequest(sequence, probe.target))

    def _give_up(self, sequence: int, probe: Probe) -> None:
        del self._probes[sequence]
        del self._targets[probe.target]
        if probe.helpers > 0 and probe.nacks < probe.helpers:
            self.worsen()
        self.failed(probe.target)

    def hurry(self, target: bytes, now: float) -> None:
        """The direct way has failed for certain: ask helpers at once."""
        sequence = self._targets.get(target)
        if sequence is not None:
            self._probes[sequence].ask_at = now
            self.deadline = min(self.deadline, now)

    def answered(self, target: bytes) -> None:
        """The member was heard to answer; its probes succeed, also those for others."""
        sequence = self._targets.pop(target, None)
        if sequence is not None:
            del self._probes[sequence]
            self.health = max(0, self.health - 1)
        for key, relay in list(self._relays.items()):
            if relay.target == target:
                del self._relays[key]
                if relay.origin in self._links:
                    self._outbox.send(relay.origin, Ack(relay.sequence, self.said(target)))

    # What arrives.

    def on_ack(self, peer: bytes, ack: Ack) -> bytes | None:
        """The member whose probe this ends, if it ends one."""
        probe = self._probes.get(ack.sequence)
        if probe is not None and (probe.target == peer or probe.helpers > 0):
            return probe.target
        relay = self._relays.get(ack.sequence)
        return peer if relay is not None and relay.target == peer else None

    def on_nack(self, nack: Nack) -> None:
        """A helper had no answer either, but it lives and hears this node."""
        probe = self._probes.get(nack.sequence)
        if probe is not None:
            probe.nacks += 1

    def on_request(self, peer: bytes, request: PingRequest, now: float) -> None:
        """Probe a member for a peer."""
        if len(self._relays) >= RELAYS_MAX:
            return
        self._sequence = sequence = (self._sequence + 1) % SEQUENCE_END
        self._relays[sequence] = Relay(peer, request.sequence, request.node, now + self._settings.direct_seconds)
        self.deadline = min(self.deadline, now + self._settings.direct_seconds)
        self._reach(request.node, sequence)
