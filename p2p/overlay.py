"""Which streams a node keeps: one to everybody in a small cluster, a few random ones in a large one.

A random graph of degree six and more holds together and spreads news in a few hops. Beyond that, one address in a while is
dialled for healing: members held for dead, and addresses kept for ever, so that no split is too long to heal.

Pure: no clock, no randomness of its own, no IO.
"""

from collections.abc import Sequence

from p2p.effects import Chance, Dial, Outbox
from p2p.lattice import DEAD
from p2p.links import Links
from p2p.membership import Membership
from p2p.replica import Replica
from p2p.settings import BOOK_MAX, LINKS_MAX, LINKS_MIN, MESH_MAX, Settings

MESH_DIALS = 4  # a second
SECOND = 1.0
PATIENCE_SECONDS = 2.0  # left to the member with the smaller name to dial the other; also between two tries
GREETING_SECONDS = 3.0  # for a peer's first frame
HEALERS = 3


class Overlay:
    """The choice of streams of one node."""

    def __init__(
        self,
        *,
        own: bytes,
        replica: Replica,
        membership: Membership,
        links: Links,
        outbox: Outbox,
        settings: Settings,
        chance: Chance,
    ) -> None:
        self._own = own
        self._replica = replica
        self._membership = membership
        self._links = links
        self._outbox = outbox
        self._settings = settings
        self._chance = chance
        self._tries: dict[bytes, float] = {}  # when a member may be dialled next
        self._heals = 0
        self.join: list[str] = []  # addresses that were given to this node
        self.found: dict[str, bytes] = {}  # who answered at them
        self.book: dict[bytes, None] = {}  # forgotten members, the longest first; the shell keeps their addresses
        # Members whose streams must stay, with the number of reasons. They come on top, and both ends have to watch.
        self.watched: dict[bytes, int] = {}
        self.link_at = 0.0
        self.heal_at = 0.0
        membership.buried = self._remember

    @property
    def mesh(self) -> bool:
        """Whether the cluster is small enough for streams between all."""
        return len(self._replica.members) <= MESH_MAX

    def start(self, now: float) -> None:
        """Begin at random moments."""
        self.link_at = now + self._chance.random() * SECOND
        self.heal_at = now + self._chance.random() * self._settings.heal_seconds
        self._heals = self._chance.randrange(self._settings.stroll_rounds)
        self._tries.clear()
        self._knock()

    def shift(self, gap: float) -> None:
        """Push timers on after a freeze."""
        self.link_at += gap
        self.heal_at += gap

    def tick(self, now: float) -> None:
        """Open what is missing, close what is too much, now and then look beyond."""
        if now >= self.link_at:
            self.link_at = now + SECOND
            for peer, link in list(self._links.items()):
                if not link.greeted and now - link.opened > GREETING_SECONDS:
                    self._links.close(peer, "never said who it is", fault=True)
            if not self._links:
                self._knock()
            if self.mesh:
                self._fill_mesh(now)
            else:
                self._fill_overlay(now)
        if now >= self.heal_at:
            self.heal_at = now + self._settings.heal_seconds * (0.9 + 0.2 * self._chance.random())
            self._heal()

    def _fill_mesh(self, now: float) -> None:
        if len(self._links) >= self._membership.live - 1 and not self._tries:
            return
        missing = [node for node in self._membership.live_members() if node not in self._links]
        self._tries = {node: self._tries[node] for node in missing if node in self._tries}
        dials = MESH_DIALS
        for node in missing:
            first = now if self._own < node else now + PATIENCE_SECONDS
            if self._tries.setdefault(node, first) <= now and dials:
                dials -= 1
                self._dial(node, now)
        for node in self.watched:
            if node not in self._links and node not in missing and node in self._replica.members:
                self._dial(node, now)

    def _fill_overlay(self, now: float) -> None:
        for node in self.watched:
            if node not in self._links and self._tries.get(node, now) <= now:
                self._dial(node, now)
        spare = [peer for peer in self._links if peer not in self.watched]
        lacking = LINKS_MIN - len(spare)
        if lacking > 0:
            self._tries = {node: at for node, at in self._tries.items() if at > now}
            strangers = [node for node in self._strangers() if node not in self._tries]
            for _ in range(min(lacking, len(strangers))):
                self._dial(strangers.pop(self._chance.randrange(len(strangers))), now)
        elif len(spare) > LINKS_MAX:
            # Half of what is too much: the other ends do the same, and a mesh that grew into an overlay gets there in seconds.
            for _ in range((len(spare) - LINKS_MAX + 1) // 2):
                self._links.close(spare.pop(self._chance.randrange(len(spare))), "enough streams")

    def _dial(self, node: bytes, now: float) -> None:
        self._tries[node] = now + PATIENCE_SECONDS
        self._outbox.add(Dial(node))

    def _heal(self) -> None:
        """Dial one address outside, together with the others about HEALERS times a period cluster-wide.

        In an overlay each member also takes a new random stream once in a while, for which an old one goes, so that the graph
        stays random, whatever it grew from.
        """
        self._heals += 1
        self._knock()
        if not self.mesh and self._heals % self._settings.stroll_rounds == 0:
            self._dial_one(self._strangers())
        if self._chance.random() * self._membership.live < HEALERS:
            lost: list[bytes | str] = [
                n for n, m in self._replica.members.items() if m.standing.liveness >= DEAD and n not in self._links
            ]
            lost += [node for node in self.book if node not in self._links]
            if not self._links:
                lost += self._strangers()
            self._dial_one(lost)

    def _knock(self) -> None:
        """Dial given addresses behind which no live member was found yet, some at a time in turn."""
        members = self._replica.members
        missing = []
        for address in self.join:
            member = members.get(self.found.get(address, b""))
            if member is None or member.standing.liveness >= DEAD:
                missing.append(address)
        turn = missing[:MESH_DIALS]
        self.join = [address for address in self.join if address not in turn] + turn
        for address in turn:
            self._outbox.add(Dial(address))

    def _strangers(self) -> list[bytes]:
        return [node for node in self._membership.live_members() if node not in self._links]

    def _dial_one(self, targets: Sequence[bytes | str]) -> None:
        if targets:
            self._outbox.add(Dial(targets[self._chance.randrange(len(targets))]))

    def _remember(self, node: bytes) -> None:
        self.book.pop(node, None)
        self.book[node] = None
        while len(self.book) > BOOK_MAX:
            del self.book[next(iter(self.book))]
