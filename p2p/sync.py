"""How replicas become equal: changes are pushed at once, and pairs compare what they hold once a second.

Push is the fast way and may fail in any way; repair finds whatever was missed, also standings. A repair costs one hash when
nothing differs, so an idle cluster is quiet at any size:

    ROOT -> (equal: end) -> BUCKETS (or, among few, SUMMARY) -> SUMMARY of unequal buckets -> DELTA and SUMMARY back -> DELTA

Pure: no clock, no randomness of its own, no IO.
"""

from collections.abc import Callable

from msgspec import Struct

from p2p.effects import Chance, Outbox, shuffled
from p2p.lattice import DEAD, Standing
from p2p.links import Link, Links
from p2p.namespace import Written
from p2p.replica import PART_BYTES, Joined, Member, Replica, bucket_of
from p2p.settings import MESH_MAX, Settings
from p2p.sync_wire import (
    BUCKETS,
    FRAME_BYTES_MAX,
    ROOT_BYTES,
    RUMOURS_MAX,
    Buckets,
    Delta,
    Part,
    Root,
    Row,
    Rumour,
    Summary,
)

FLUSH_BYTES_MAX = 32 << 10  # of changes to one peer at a time; a snapshot may be larger and then goes alone
SUMMARY_WHOLE_MAX = 2 * BUCKETS  # members up to which all rows are sent at once
SNAPSHOTS_MAX = 4  # larger than a flush, in one flush to all peers
ALL_BUCKETS = (1 << BUCKETS) - 1

Learn = Callable[[bytes, Standing, bytes], bool]


class Counts(Struct):
    """What the sync did, for metrics and tests."""

    rounds: int = 0
    equal: int = 0
    parts: int = 0
    gaps: int = 0
    snapshots: int = 0


class Sync:
    """Push and repair between one replica and its peers."""

    def __init__(
        self, *, own: bytes, replica: Replica, links: Links, outbox: Outbox, settings: Settings, chance: Chance
    ) -> None:
        self._own = own
        self._replica = replica
        self._links = links
        self._outbox = outbox
        self._settings = settings
        self._chance = chance
        self._queue: list[bytes] = []  # whom to compare with next
        self.repair_at = 0.0
        self.flush_at = float("inf")
        self.counts = Counts()

    def start(self, now: float) -> None:
        """Begin, or begin anew after a long gap, with a first round at a random moment of a period."""
        self.repair_at = now + self._chance.random() * self._settings.repair_seconds

    def shift(self, gap: float) -> None:
        """Push timers on after a freeze."""
        self.repair_at += gap

    # Push.

    def spread(self, node: bytes, since: int, source: bytes | None, now: float, *, introduce: bool = False) -> None:
        """News of a member above `since` is here, from its own node (None) or from a peer.

        In a mesh only the one who made news pushes it, everybody else would be told twice; in an overlay it is passed on.
        Whoever is greeted by a new boot introduces it to all: it has no streams to them yet, and its old records are to go at
        once.
        """
        if not self._settings.push:
            return
        if source is not None and len(self._replica.members) <= MESH_MAX and not introduce:
            return
        for peer, link in self._links.items():
            if peer not in (source, node) and link.pending.get(node, since) >= since:
                link.pending[node] = since
        self._flush_soon(now)

    def spread_rumour(self, rumour: Rumour, source: bytes | None, now: float) -> None:
        """Pass on bad news with its accuser, to the accused too: it will refute."""
        if not self._settings.push or (source is not None and len(self._replica.members) <= MESH_MAX):
            return
        for peer, link in self._links.items():
            if peer == source:
                continue
            if len(link.rumours) < RUMOURS_MAX:
                link.rumours[rumour.node, rumour.accuser] = rumour
            else:
                link.pending.setdefault(rumour.node, self._replica.members[rumour.node].version)
        self._flush_soon(now)

    def tell(self, peer: bytes, node: bytes, since: int, now: float) -> None:
        """Let one peer have what there is of a member above `since`."""
        link = self._links.get(peer)
        if link is not None:
            link.pending[node] = min(since, link.pending.get(node, since))
            self._flush_soon(now)

    def _flush_soon(self, now: float) -> None:
        if self.flush_at == float("inf"):
            mesh = len(self._replica.members) <= MESH_MAX
            self.flush_at = now + (self._settings.flush_seconds_mesh if mesh else self._settings.flush_seconds_overlay)

    def flush(self, now: float) -> None:
        """Send what is pending, FLUSH_BYTES_MAX a peer; the rest waits for the next flush."""
        self.flush_at = float("inf")
        snapshots = SNAPSHOTS_MAX
        for link in self._links.values():
            if link.dirty and link.greeted:
                snapshots -= self._flush(link, snapshots)
                if link.dirty:
                    self._flush_soon(now)

    def _flush(self, link: Link, snapshots: int) -> int:
        if link.asks:
            rows = [self._replica.row(node) for node in link.asks]
            self._outbox.send(link.peer, Summary(0, False, [row for row in rows if row is not None]))
            link.asks = {}
        rumours = list(link.rumours.values())
        link.rumours = {}
        parts: list[Part] = []
        room, large = FLUSH_BYTES_MAX, 0
        for node in self._in_order(link.pending):
            if room < PART_BYTES:
                break
            part, size, cut = self._replica.part(node, link.pending[node], room)
            if size > room:
                # A snapshot above what is left of the flush goes alone in its frame, or waits for its turn.
                if size > FRAME_BYTES_MAX or large >= snapshots:
                    if size > FRAME_BYTES_MAX:
                        del link.pending[node]
                    continue
                large += 1
                self._outbox.send(link.peer, Delta([], [part]))
            else:
                room -= size
                parts.append(part)
            self.counts.snapshots += part.snapshot
            if cut:
                link.pending[node] = part.upto
                break
            del link.pending[node]
        if parts or rumours:
            self.counts.parts += len(parts)
            self._outbox.send(link.peer, Delta(rumours, parts))
        return large

    def _in_order(self, pending: dict[bytes, int]) -> list[bytes]:
        """Standings alone first, then members new to the peer (smallest first), then the most stale."""
        if len(pending) == 1:
            node = next(iter(pending))
            return [node] if node in self._replica.members else self._drop(pending, node)
        ranked: list[tuple[int, int, bytes]] = []
        for node in list(pending):
            member = self._replica.members.get(node)
            if member is None:
                self._drop(pending, node)
                continue
            behind = member.version - pending[node]
            ranked.append((0, 0, node) if behind <= 0 else (1, behind, node) if not pending[node] else (2, -behind, node))
        return [node for _, _, node in sorted(ranked)]

    @staticmethod
    def _drop(pending: dict[bytes, int], node: bytes) -> list[bytes]:
        del pending[node]
        return []

    # Repair.

    def repair(self, now: float) -> None:
        """Compare with the next peer, in a random order that reaches all of them before any comes twice."""
        period = self._settings.repair_seconds
        self.repair_at = now + period * (1 + self._settings.repair_jitter * (2 * self._chance.random() - 1))
        while True:
            if not self._queue:
                self._queue = shuffled([peer for peer, link in self._links.items() if link.greeted], self._chance)
                if not self._queue:
                    return
            peer = self._queue.pop()
            if peer in self._links:
                break
        self.compare(peer)

    def compare(self, peer: bytes) -> None:
        """Begin one exchange."""
        self.counts.rounds += 1
        self._outbox.send(peer, Root(self._replica.root))

    def on_root(self, peer: bytes, root: Root) -> None:
        """Equal replicas say no more."""
        if root.root == self._replica.root:
            self.counts.equal += 1
        elif len(self._replica.members) <= SUMMARY_WHOLE_MAX:
            self._outbox.send(peer, Summary(ALL_BUCKETS, True, self._replica.rows(ALL_BUCKETS)))
        else:
            self._outbox.send(peer, Buckets(self._replica.bucket_roots))

    def on_buckets(self, peer: bytes, buckets: Buckets) -> None:
        """Rows of the buckets that differ."""
        ours, theirs = self._replica.bucket_roots, buckets.hashes
        differing = 0
        for bucket in range(BUCKETS):
            at = slice(bucket * ROOT_BYTES, (bucket + 1) * ROOT_BYTES)
            if ours[at] != theirs[at]:
                differing |= 1 << bucket
        if differing:
            self._outbox.send(peer, Summary(differing, True, self._replica.rows(differing)))

    def on_summary(self, peer: bytes, summary: Summary, learn: Learn, now: float) -> None:
        """Join the standings, plan what the peer lacks, and ask for what is missing here."""
        link = self._links[peer]
        lacking: list[Row] = []
        seen: set[bytes] = set()
        for row in summary.rows:
            learn(row.node, row.standing, peer)
            member = self._replica.members.get(row.node)
            if member is None:
                # Buried here. That is no news for whoever holds it for dead too, least of all for one who buried it as well.
                if row.standing.liveness < DEAD:
                    link.asks[row.node] = None
                continue
            seen.add(row.node)
            self._plan(link, member, row)
            behind = member.version < row.version if member.standing.generation == row.standing.generation else False
            if behind or row.standing > member.standing:
                lacking.append(Row(row.node, member.standing, member.version))
        if summary.reply:
            for node in self._replica.members:
                if node not in seen and summary.buckets >> bucket_of(node) & 1:
                    link.pending[node] = 0
            if lacking:
                self._outbox.send(peer, Summary(0, False, lacking))
        self._flush(link, SNAPSHOTS_MAX)
        if link.dirty:
            self._flush_soon(now)

    @staticmethod
    def _plan(link: Link, member: Member, row: Row) -> None:
        """The peer's own word replaces whatever was thought to be pending for it."""
        link.pending.pop(member.node, None)
        if row.standing.generation == member.standing.generation:
            if row.version < member.version:
                link.pending[member.node] = row.version
            elif row.standing < member.standing:
                link.pending[member.node] = member.version
        elif row.standing < member.standing:
            link.pending[member.node] = 0

    # Deltas.

    def heard(self, peer: bytes, part: Part) -> bool:
        """A peer told of a member: what it says itself it need not be told. Whether its changes are of any use here."""
        member = self._replica.members[part.node]
        if part.standing != member.standing:
            return part.standing.generation == member.standing.generation
        link = self._links.get(peer)
        if link is not None and part.upto >= member.version:
            link.pending.pop(part.node, None)
        return part.upto > member.version or part.snapshot

    def ask(self, peer: bytes, node: bytes, now: float) -> None:
        """Tell a peer how far a member's records, or its grave, are here; it sends what is missing, or learns."""
        link = self._links.get(peer)
        if link is not None:
            link.asks[node] = None
            self._flush_soon(now)

    def on_part(self, peer: bytes, part: Part, changes: list[Written], now: float) -> tuple[Written, ...] | None:
        """Join a checked part whose standing was learnt; the changes that were new, None for all of them."""
        member = self._replica.members.get(part.node)
        before = member.version if member is not None else 0
        joined, fresh = self._replica.join_records(part, changes)
        if joined is Joined.NEW:
            self.spread(part.node, before, peer, now)
        elif joined is Joined.GAP:
            self.counts.gaps += 1
            self.ask(peer, part.node, now)
        return None if fresh is None else tuple(fresh)
