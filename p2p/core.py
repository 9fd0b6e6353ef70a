"""The replicated state of one node, with no IO: `handle(peer, frame, now) -> effects`, `tick(now) -> effects`.

The shell around it keeps streams, reads a clock and does as it is told:

    effects = core.start(now)
    forever:
        do the effects: write frames, dial, close, wake whoever reads the view
        until core.deadline:  a frame of a peer came     -> effects = core.handle(peer, body, now)
                              a stream opened, broke      -> effects = core.connected(peer, now, ...), core.disconnected(...)
                              a dial failed               -> effects = core.dial_failed(target, ...)
        then                                              -> effects = core.tick(now)

and between these calls this node writes its own records: `core.write(kind, name, value, now)`, `core.delete(...)`.

Pure: the clock is an argument, randomness comes from the source that was passed in.
"""

import msgspec

from p2p.effects import Chance, Changed, Clash, Effect, Outbox, Violations
from p2p.lattice import ALIVE, LEFT, Generation, Liveness, Standing
from p2p.links import Link, Links
from p2p.membership import DOUBLE, Membership
from p2p.namespace import NamespaceFull, Written
from p2p.overlay import Overlay
from p2p.probes import Prober
from p2p.replica import Member, Replica, Schema
from p2p.settings import MESH_MAX, Settings
from p2p.sync import Sync
from p2p.sync_wire import (
    MESSAGES,
    NIL,
    PROTOCOL_VERSION,
    Ack,
    Buckets,
    Claim,
    Delta,
    Hello,
    Message,
    Nack,
    Name,
    Ping,
    PingRequest,
    Root,
    Summary,
    check_rows,
)
from p2p.wire import ProtocolViolation

RESET_SECONDS = 5.0  # a refused dial so soon after a broken stream means that the process is gone
RECORDS_RESERVE = 48 << 10  # bytes of the namespace that only urgent records may take

__all__ = ["Core", "NamespaceFull"]


class Core:
    """One node's replica with everything that keeps it, and its opinion of the others."""

    def __init__(
        self,
        node: bytes,
        generation: Generation,
        *,
        cluster: bytes,
        schema: Schema,
        chance: Chance,
        settings: Settings | None = None,
    ) -> None:
        self.node = node
        self.cluster = cluster
        self.settings = settings or Settings()
        self.outbox = Outbox()
        self.links = Links(self.outbox)
        self.replica = Replica(schema)
        self.replica.join_standing(node, Standing(generation, 0, ALIVE))
        self.me: Member = self.replica.members[node]
        replica, links, outbox, settings = self.replica, self.links, self.outbox, self.settings
        self.prober = Prober(links, outbox, settings, chance)
        self.sync = Sync(own=node, replica=replica, links=links, outbox=outbox, settings=settings, chance=chance)
        self.membership = Membership(
            own=node,
            replica=replica,
            links=links,
            prober=self.prober,
            sync=self.sync,
            outbox=outbox,
            settings=settings,
            chance=chance,
        )
        self.overlay = Overlay(
            own=node,
            replica=replica,
            membership=self.membership,
            links=links,
            outbox=outbox,
            settings=settings,
            chance=chance,
        )
        self.violations = Violations()
        self.deadline = 0.0
        self._last = 0.0
        self._resets: dict[bytes, float] = {}
        self._contested_at: float | None = None

    # The shell's calls.

    def start(self, now: float) -> list[Effect]:
        """Begin; the first call."""
        self._last = now
        self.prober.start(now)
        self.sync.start(now)
        self.overlay.start(now)
        return self._done()

    def handle(self, peer: bytes, body: bytes, now: float) -> list[Effect]:
        """A frame's body came on a peer's stream. A frame that breaks a rule ends that stream; nothing of it is applied."""
        link = self.links.get(peer)
        if link is None:
            return []
        self._wake(now)
        try:
            message = MESSAGES.decode(body)
            if type(message) is Ping and link.greeted:
                link.heard = now
                self._on_ping(peer, message, now)
                return self.outbox.take()
            self._dispatch(link, message, now)
            link.heard = now
        except ProtocolViolation as violation:
            self.violations.bad_frame += 1
            self.links.close(peer, str(violation), fault=True)
        return self._done()

    def tick(self, now: float) -> list[Effect]:
        """The deadline has come."""
        self._wake(now)
        self.membership.tick(now)
        if now >= self.prober.deadline:
            self.prober.tick(now, self._candidates)
        if now >= self.overlay.link_at or now >= self.overlay.heal_at:
            self.overlay.tick(now)
        if now >= self.sync.repair_at:
            self.sync.repair(now)
        if now >= self.sync.flush_at:
            self.sync.flush(now)
        return self._done()

    def connected(self, peer: bytes, now: float, *, address: str | None = None) -> list[Effect]:
        """A stream to this peer is open, by that address if one was dialled; it takes the place of an older one."""
        self._wake(now)
        if address is not None and address in self.overlay.join:
            self.overlay.found[address] = peer
        before = self.links.get(peer)
        held = before is not None and now - before.answered < self.settings.evidence_seconds
        self.links[peer] = Link(peer, now)
        self._resets.pop(peer, None)
        self.outbox.send(peer, self._hello(peer, held))
        return self._done()

    def disconnected(self, peer: bytes, now: float, *, broken: bool) -> list[Effect]:
        """The peer's stream is gone; `broken`: without having been closed by either side."""
        self._wake(now)
        if self.links.pop(peer, None) is not None and broken:
            self._resets = {node: at for node, at in self._resets.items() if now - at < RESET_SECONDS}
            self._resets[peer] = now
            member = self.replica.members.get(peer)
            if member is not None and member.standing.liveness is not LEFT:
                self.prober.probe(peer, now)
        return self._done()

    def dial_failed(self, target: bytes | str, now: float, *, refused: bool) -> list[Effect]:
        """No stream came of a dial; `refused`: the address answered that nobody listens."""
        self._wake(now)
        if isinstance(target, bytes) and target not in self.links and target in self.replica.members:
            if refused and now - self._resets.get(target, -RESET_SECONDS) < RESET_SECONDS:
                self.membership.refused(target, now)
            elif self.replica.members[target].standing.liveness < Liveness.DEAD:
                self.prober.probe(target, now, direct=False)
            self.prober.hurry(target, now)
        return self._done()

    def overflowed(self, peer: bytes) -> None:
        """The shell dropped what it had queued for a peer. Nothing needs to be remembered for that: repair finds it."""
        link = self.links.get(peer)
        if link is not None:
            link.pending.clear()
            link.rumours.clear()

    # This node's own records.

    def write(self, kind: int, name: Name, value: object, now: float, *, urgent: bool = False) -> None:
        """Publish a record; an equal one is left as it is. What is urgent may use the room that is kept for it.

        Raises: NamespaceFull.
        """
        encoded = msgspec.msgpack.encode(value)
        assert encoded != NIL, "nil stands for a delete"
        before = self.me.namespace.records.get((kind, name))
        if before is not None and before.value == encoded:
            return
        self.me.namespace.write((kind, name), encoded, value, 0 if urgent else RECORDS_RESERVE)
        self._written((kind, name), now)

    def delete(self, kind: int, name: Name, now: float) -> None:
        """Take a record back, if there is one."""
        if self.me.namespace.delete((kind, name)):
            self._written((kind, name), now)

    def leave(self, now: float) -> list[Effect]:
        """Say goodbye; frames are still to be handled for a second."""
        self.membership.leave(now)
        self.sync.flush(now)
        return self._done()

    def watch(self, node: bytes) -> None:
        """Keep a stream to this member, and so first-hand knowledge of it, for one more reason."""
        self.overlay.watched[node] = self.overlay.watched.get(node, 0) + 1

    def unwatch(self, node: bytes) -> None:
        """One reason less."""
        self.overlay.watched[node] -= 1
        if not self.overlay.watched[node]:
            del self.overlay.watched[node]

    def believe(self, node: bytes, now: float) -> Liveness | None:
        """What this node takes a member for."""
        return self.membership.believe(node, now)

    def _written(self, key: tuple[int, Name], now: float) -> None:
        namespace = self.me.namespace
        self.replica.touch(self.me)
        self.sync.spread(self.node, namespace.max_version - 1, None, now)
        self.deadline = min(self.deadline, self.sync.flush_at)
        self.outbox.add(Changed(self.node, (Written(key, namespace.max_version, namespace.records.get(key)),)))

    # Frames.

    def _dispatch(self, link: Link, message: Message, now: float) -> None:
        peer = link.peer
        if isinstance(message, Hello):
            self._on_hello(link, message, now)
        elif not link.greeted:
            # Frames may overtake the greeting where a network reorders; none of them means anything before it.
            self.violations.not_greeted += 1
        elif isinstance(message, Ack):
            self._on_ack(peer, message, now)
        elif isinstance(message, Root):
            self.sync.on_root(peer, message)
        elif isinstance(message, Buckets):
            self.sync.on_buckets(peer, message)
        elif isinstance(message, Summary):
            check_rows(message.rows)
            self.sync.on_summary(peer, message, lambda node, standing, of: self._learn(node, standing, of, now), now)
        elif isinstance(message, Delta):
            self._on_delta(peer, message, now)
        elif isinstance(message, PingRequest):
            self.prober.on_request(peer, message, now)
        elif isinstance(message, Nack):
            self.prober.on_nack(message)
        else:
            self._on_ping(peer, message, now)

    def _hello(self, peer: bytes, held: bool) -> Hello:
        highest = self.replica.highest(peer)
        claim = None
        if highest is not None:
            (generation, incarnation, liveness), buried = highest
            claim = Claim(generation, incarnation, buried, liveness, held)
        return Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, self.cluster, self.node, self.me.standing, claim)

    def _on_hello(self, link: Link, hello: Hello, now: float) -> None:
        """Learn what is held of this node, then speak: whatever is there of an earlier life is outbid at once."""
        peer = link.peer
        reason = None
        if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
            reason = f"speaks protocol {hello.protocol_min}..{hello.protocol_max}, this node {PROTOCOL_VERSION}"
        elif hello.cluster != self.cluster:
            reason = "belongs to another cluster"
        elif hello.node != peer or hello.standing.liveness not in {ALIVE, LEFT}:
            reason = "greeted under a name that is not its stream's"
        if reason is not None:
            self.violations.bad_hello += 1
            self.links.close(peer, reason, fault=True)
            return
        claim = hello.claim
        if claim is not None:
            ours = self.me.standing.generation
            if claim.held and claim.generation.nonce != ours.nonce and not self._established_above(claim.generation):
                self._contest(peer, now)
                return
            liveness = Liveness.DEAD if claim.buried else claim.liveness
            self._learn(self.node, Standing(claim.generation, claim.incarnation, liveness), peer, now)
        link.greeted = True
        self._learn(peer, hello.standing, peer, now)
        self.membership.contact(peer, now)
        if self.replica.members.get(peer) is None:
            return  # buried here; it will come back with a higher incarnation, which our greeting made it take
        self.sync.compare(peer)

    def _contest(self, peer: bytes, now: float) -> None:
        """The peer had an answer, lately, from another life of this node: its last one, just ended, or a double's.

        A life that ended answers nobody again, so whoever still says so after the time of the evidence means a double.
        """
        if self._contested_at is None:
            self._contested_at = now
        if now - self._contested_at > self.settings.evidence_seconds:
            self.outbox.add(Clash(DOUBLE))
        self.links.close(peer, "still has a stream to an earlier life of this node")

    def _established_above(self, generation: Generation) -> bool:
        return any(link.greeted for link in self.links.values()) and self.me.standing.generation > generation

    def _on_ping(self, peer: bytes, ping: Ping | Message, now: float) -> None:
        assert isinstance(ping, Ping)
        said = None
        if ping.said is not None:
            self._learn(self.node, ping.said, peer, now)
            said = self.me.standing
        self.outbox.send(peer, Ack(ping.sequence, said))

    def _on_ack(self, peer: bytes, ack: Ack, now: float) -> None:
        target = self.prober.on_ack(peer, ack)
        if target is None:
            return
        if ack.said is not None:
            self._learn(target, ack.said, peer, now)
        if target == peer:
            self.links[peer].answered = now
        self.membership.contact(target, now)

    def _on_delta(self, peer: bytes, delta: Delta, now: float) -> None:
        checked = [self.replica.check(part) for part in delta.parts]
        link = self.links[peer]
        for rumour in delta.rumours:
            self.membership.hear(rumour, peer, now)
            link.rumours.pop((rumour.node, rumour.accuser), None)
        for part, changes in zip(delta.parts, checked, strict=True):
            self._learn(part.node, part.standing, peer, now)
            if part.node not in self.replica.members:
                if part.standing.liveness < Liveness.DEAD:
                    self.sync.ask(peer, part.node, now)
                continue
            if part.node == self.node or not self.sync.heard(peer, part):
                continue
            fresh = self.sync.on_part(peer, part, changes, now)
            if fresh is None or fresh:
                self.outbox.add(Changed(part.node, fresh))

    def _learn(self, node: bytes, standing: Standing, source: bytes, now: float) -> bool:
        return self.membership.learn(node, standing, source, now)

    # Time.

    def _candidates(self) -> list[bytes]:
        return [peer for peer, link in self.links.items() if link.greeted]

    def _wake(self, now: float) -> None:
        """Find out that this node was frozen or asleep, before anything is done.

        What came in meanwhile is handled before any timer runs out, because all of them are pushed on by the gap.
        """
        gap = now - max(self._last, min(self.deadline, now))
        self._last = now
        if gap <= self.settings.lag_seconds:
            return
        self.prober.worsen()
        if gap <= self.settings.freeze_seconds:
            return
        if gap > self.settings.sleep_seconds:
            self.prober.start(now)
            self.sync.start(now)
            self.overlay.start(now)
            self.membership.calm(now)
            for peer in self.links:
                self.sync.compare(peer)
            return
        self.prober.shift(gap)
        self.sync.shift(gap)
        self.overlay.shift(gap)
        self.membership.shift(gap)

    def _done(self) -> list[Effect]:
        self.deadline = min(
            self.prober.deadline,
            self.sync.repair_at,
            self.sync.flush_at,
            self.overlay.link_at,
            self.overlay.heal_at,
            self.membership.deadline,
        )
        return self.outbox.take()

    @property
    def mesh(self) -> bool:
        """Whether everybody keeps a stream to everybody."""
        return len(self.replica.members) <= MESH_MAX
