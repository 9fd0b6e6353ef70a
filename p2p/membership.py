"""Who is here: what members say of each other, what this node found out itself, and what it believes.

The lattice stores the highest that was said, so that all replicas agree. Belief is another matter: a death heard of from others
never overrules what this node knows at first hand. Whoever keeps a stream to the accused asks it at once, and believes the
stream until its own probe fails; everybody else holds the news for a suspicion for some seconds, the time in which the
accused refutes. When a cluster heals that was split for long, each half holds the other for dead, and nobody's running work
may suffer by that.

Pure: no clock, no randomness of its own, no IO.
"""

from collections.abc import Callable

from p2p.effects import Chance, Changed, Clash, Outbox, Renewed
from p2p.lattice import ALIVE, COUNTER_MAX, DEAD, INCARNATION_MAX, LEFT, SUSPECT, Generation, Liveness, Standing
from p2p.links import Links
from p2p.probes import Prober
from p2p.replica import Member, Replica
from p2p.settings import ATTESTERS, GRAVES_UNBURIED_MAX, Settings, confirmations_wanted, suspicion_bounds
from p2p.suspicion import Suspicion
from p2p.sync import Sync
from p2p.sync_wire import Rumour

NEVER = float("inf")
ACCUSERS_MAX = 16  # remembered of one suspicion; three are enough for the shortest
LIVES_MAX = 16  # other lives of this node that are remembered
RAISED_MAX = 2  # times that a life may be found at a higher counter
DOUBLE = "another running node has this node's identity: its data directory was copied"
VERIFIERS = 3  # of all that hear of an unknown member at second hand, so many dial it to see


class Membership:
    """Standings, suspicions and beliefs of one node."""

    def __init__(
        self,
        *,
        own: bytes,
        replica: Replica,
        links: Links,
        prober: Prober,
        sync: Sync,
        outbox: Outbox,
        settings: Settings,
        chance: Chance,
    ) -> None:
        self._own = own
        self._replica = replica
        self._links = links
        self._prober = prober
        self._sync = sync
        self._outbox = outbox
        self._settings = settings
        self._chance = chance
        self._suspicions: dict[bytes, Suspicion] = {}
        self._failed: dict[bytes, Standing] = {}  # own probe failed at this standing
        self._deaths: dict[bytes, float] = {}  # since when somebody is held for dead or gone, the longest first
        self._held: dict[bytes, float] = {}  # until when others' news of a death is held for a suspicion
        self._unseen: dict[bytes, float] = {}  # known from others only; until when that makes it suspect
        self.calm_until = -NEVER  # nobody is suspected before
        self.live = 1
        self.buried: Callable[[bytes], None] = lambda _: None
        prober.said = self.said
        prober.failed = self._probe_failed
        self.deadline = NEVER  # when `tick` has something to do, at the latest
        self._outbid: dict[int, int] = {}  # by nonce of another life of this node, how often it had to be outbid
        self._now = 0.0

    # What is believed.

    def believe(self, node: bytes, now: float) -> Liveness | None:
        """What this node takes a member for; None for one it doesn't know."""
        member = self._replica.members.get(node)
        if member is None:
            return None
        liveness = member.standing.liveness
        if node == self._own or liveness is LEFT:
            return liveness
        if liveness is ALIVE:
            return SUSPECT if self._unseen.get(node, now) > now and node not in self._links else ALIVE
        if node in self._failed:
            return liveness
        if node in self._links:
            return ALIVE
        return SUSPECT if self._held.get(node, now) > now else liveness

    def said(self, node: bytes) -> Standing | None:
        """What is held against a member, None if nothing is."""
        member = self._replica.members.get(node)
        return None if member is None or member.standing.liveness is ALIVE else member.standing

    def live_members(self) -> list[bytes]:
        """Members that are neither dead nor gone, without this node."""
        return [node for node, member in self._replica.members.items() if member.standing.liveness < DEAD and node != self._own]

    # What is heard.

    def learn(self, node: bytes, standing: Standing, source: bytes | None, now: float, *, tell: bool = True) -> bool:
        """Join a standing told by a peer, or found out (None); True where it was news. `tell`: push it; a rumour does so
        itself.
        """
        self._now = now
        if node == self._own:
            return self._answer(standing, now)
        member = self._replica.members.get(node)
        before = member.standing if member is not None else None
        if not self._replica.join_standing(node, standing):
            return False
        member = self._replica.members[node]
        self._count(before, standing)
        if before is None and source != node:
            self._second_hand(node, now)
        if standing.liveness is ALIVE or (before is not None and before.generation != standing.generation):
            self._clear(node)
        if standing.liveness is SUSPECT:
            self._suspect(node, member, now)
        elif standing.liveness >= DEAD:
            self._bereave(node, before, source, now)
        fresh = before is None or before.generation.nonce != standing.generation.nonce
        if tell:
            self._sync.spread(node, member.version, source, now, introduce=fresh and source == node)
        self._outbox.add(Changed(node, None if fresh else ()))
        return True

    def hear(self, rumour: Rumour, source: bytes, now: float) -> None:
        """Bad news with its accuser; a new accuser is news even where the standing is known."""
        self._now = now
        if rumour.node == self._own:
            self._answer(rumour.standing, now)
            return
        self.learn(rumour.node, rumour.standing, source, now, tell=False)
        self._accuse(rumour, source, now)

    def contact(self, node: bytes, now: float) -> None:
        """The member answered this node itself."""
        if self._failed.pop(node, None) is not None or self._unseen.pop(node, None) is not None:
            self._outbox.add(Changed(node, ()))
        self._unseen.pop(node, None)
        self._now = now
        self._prober.answered(node)

    def _count(self, before: Standing | None, after: Standing) -> None:
        self.live += (after.liveness < DEAD) - (before is not None and before.liveness < DEAD)

    def _clear(self, node: bytes) -> None:
        self._suspicions.pop(node, None)
        self._failed.pop(node, None)
        self._deaths.pop(node, None)
        self._held.pop(node, None)

    def _second_hand(self, node: bytes, now: float) -> None:
        """A few of those who hear of a stranger look for themselves: one that is gone for long fades within a suspicion."""
        until = self._unseen[node] = now + suspicion_bounds(self._settings, self.live)[0]
        self.deadline = min(self.deadline, until)
        if self._chance.random() * self.live < VERIFIERS:
            self._prober.probe(node, now)

    def _suspect(self, node: bytes, member: Member, now: float) -> None:
        before = self._suspicions.get(node)
        if before is not None and before.standing >= member.standing:
            return
        low, high = suspicion_bounds(self._settings, self.live)
        wanted = confirmations_wanted(self.live)
        suspicion = self._suspicions[node] = Suspicion(member.standing, now, low, high, wanted, {})
        self.deadline = min(self.deadline, suspicion.deadline)
        if node in self._links:
            self._prober.probe(node, now)

    def _bereave(self, node: bytes, before: Standing | None, source: bytes | None, now: float) -> None:
        suspicion = self._suspicions.pop(node, None)
        begun = self._deaths.setdefault(node, now)
        self.deadline = min(self.deadline, self._next_burial())
        if source is None or before is None:
            return
        until = (suspicion.started if suspicion is not None else begun) + self._settings.evidence_seconds
        if until > now:
            self._held[node] = until
            self.deadline = min(self.deadline, until)
        if node in self._links:
            self._prober.probe(node, now)

    def _accuse(self, rumour: Rumour, source: bytes | None, now: float) -> None:
        suspicion = self._suspicions.get(rumour.node)
        if suspicion is None or suspicion.standing != rumour.standing:
            return
        known = suspicion.accusers.get(rumour.accuser)
        if (len(suspicion.accusers) >= ACCUSERS_MAX) if known is None else known >= rumour.refused:
            return
        suspicion.accusers[rumour.accuser] = rumour.refused
        self.deadline = min(self.deadline, suspicion.deadline)
        if len(suspicion.accusers) <= suspicion.wanted + 1 or rumour.refused:
            self._sync.spread_rumour(rumour, source, now)
        if suspicion.attesters >= max(1, min(ATTESTERS, self.live - 1)):
            self._declare_dead(rumour.node, now)

    # What is found out.

    def _probe_failed(self, node: bytes) -> None:
        self._doubt(node, refused=False, now=self._now)

    def refused(self, node: bytes, now: float) -> None:
        """The member's stream broke and its address refuses a new one: nobody listens there."""
        self._doubt(node, refused=True, now=now)

    def _doubt(self, node: bytes, *, refused: bool, now: float) -> None:
        member = self._replica.members.get(node)
        if member is None or member.standing.liveness is LEFT or now < self.calm_until:
            return
        standing = member.standing
        if node not in self._failed:
            self._failed[node] = standing
            self._outbox.add(Changed(node, ()))
        if standing.liveness is DEAD:
            self._links.close(node, "found dead")
            return
        accused = standing._replace(liveness=SUSPECT)
        self.learn(node, accused, None, now, tell=False)
        self._failed[node] = accused
        self._accuse(Rumour(node, accused, self._own, refused), None, now)

    def _declare_dead(self, node: bytes, now: float) -> None:
        member = self._replica.members[node]
        self._suspicions.pop(node, None)
        self._failed.setdefault(node, member.standing)
        self._links.close(node, "found dead")
        self.learn(node, member.standing._replace(liveness=DEAD), None, now)

    # What others say of this node.

    def _answer(self, claim: Standing, now: float) -> bool:
        """Outbid a higher generation, refute a suspicion; both by going above it."""
        member = self._replica.members[self._own]
        ours = member.standing
        if claim <= ours:
            return False
        if claim.generation != ours.generation or claim.incarnation >= INCARNATION_MAX:
            if claim.generation.counter >= COUNTER_MAX:
                self._outbox.add(Clash("another node claims this node's identity with the highest generation there is"))
                return False
            if self._lives_on(claim.generation) and ours.generation.nonce > claim.generation.nonce:
                self._outbox.add(Clash(DOUBLE))
                return False
            generation = Generation(claim.generation.counter + 1, ours.generation.nonce)
            member.namespace.begin_anew(generation)
            member.standing = Standing(generation, 0, ours.liveness)
            self._outbox.add(Renewed(generation))
            since = 0
        else:
            member.standing = ours._replace(incarnation=claim.incarnation + 1)
            since = member.version
            self._prober.worsen()
        self._replica.touch(member)
        self._sync.spread(self._own, since, None, now)
        self._outbox.add(Changed(self._own, ()))
        return True

    def _lives_on(self, other: Generation) -> bool:
        """Whether another life of this node raised its counter again and again when it was outbid, as only a running double
        does.

        What is left of a life that ended may be found at two counters, if that life had to outbid another one itself.

        Of two that find each other out the one with the larger nonce stops, so that exactly one does.
        """
        if other.nonce == self._replica.members[self._own].standing.generation.nonce:
            return False
        raised = self._outbid.get(other.nonce, 0)
        if raised or len(self._outbid) < LIVES_MAX:
            self._outbid[other.nonce] = raised + 1
        return raised >= RAISED_MAX

    def leave(self, now: float) -> None:
        """Say goodbye; from now on nothing that is said of this node is refuted."""
        member = self._replica.members[self._own]
        member.standing = member.standing._replace(liveness=LEFT)
        self._replica.touch(member)
        self._sync.spread(self._own, member.version, None, now)

    # Time.

    def shift(self, gap: float) -> None:
        """Push timers on after a freeze."""
        for suspicion in self._suspicions.values():
            suspicion.started += gap
        for timers in (self._held, self._unseen):
            for node in timers:
                timers[node] += gap

    def calm(self, now: float) -> None:
        """After a sleep: drop all suspicions of one's own making and suspect nobody for two periods."""
        self.calm_until = now + 2 * self._settings.probe_seconds
        for suspicion in self._suspicions.values():
            suspicion.started = now

    def tick(self, now: float) -> None:
        """End suspicions and graces that are over, and forget those dead for long."""
        self._now = now
        if now < self.deadline:
            return
        if now >= self.calm_until:
            for node, suspicion in list(self._suspicions.items()):
                if now >= suspicion.deadline:
                    self._end_suspicion(node, suspicion, now)
        for timers in (self._held, self._unseen):
            for node in [node for node, until in timers.items() if until <= now]:
                del timers[node]
                self._outbox.add(Changed(node, ()))
        while self._next_burial() <= now:
            self._bury(next(iter(self._deaths)))
        self.deadline = self._next_deadline()

    def _next_deadline(self) -> float:
        soonest = min(self._held.values(), default=NEVER)
        soonest = min(soonest, min(self._unseen.values(), default=NEVER), self._next_burial())
        ends = min((suspicion.deadline for suspicion in self._suspicions.values()), default=NEVER)
        return min(soonest, max(ends, self.calm_until))

    def _end_suspicion(self, node: bytes, suspicion: Suspicion, now: float) -> None:
        if node in self._links and node not in self._failed:
            # Its stream lives and no probe of this node's own has failed: ask again instead of burying it on hearsay.
            suspicion.started = now
            self._prober.probe(node, now)
            return
        self._declare_dead(node, now)

    def _next_burial(self) -> float:
        if not self._deaths:
            return NEVER
        if len(self._deaths) > GRAVES_UNBURIED_MAX:
            return -NEVER
        return next(iter(self._deaths.values())) + self._settings.forget_seconds

    def _bury(self, node: bytes) -> None:
        self._clear(node)
        if node in self._replica.members:
            self._replica.bury(node)
            self._outbox.add(Changed(node, None))
            self.buried(node)
