"""Keeps a node connected: dials whom it should know and isn't connected to, again and again, with growing delays.

A target is an address that people gave (`--join`) or a node that is known by its id (members, nodes that discovery found, nodes
of former days). All due targets are dialled side by side, and all addresses of one target too, so that the dead ones hold up
nobody. What failed stays visible with its reason. The decisions are pure functions over `Target`s; `Dialler.run` acts on them.
"""

import contextlib
import math
import random
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

import trio

from p2p.addresses import AddressError, parse_address
from p2p.ids import NodeId
from p2p.stream import Peer
from p2p.transport import ITSELF, Transport, Unreachable

DELAY_SECONDS_MIN = 0.5
DELAY_SECONDS_MAX = 5.0  # for few targets; see `delay`
TRIES_PER_SECOND = 2.0  # all targets together, once they are many
REDIAL_SECONDS_MAX = 0.2  # after a connection was lost, within which it is dialled again
LOOK_SECONDS = 0.01  # at least, between looks at all targets: many tries may end at once
DIALS_MAX = 128  # at once; each is a socket
TARGETS_MAX = 512
ADDRESSES_MAX = 8  # of one target
REST_SECONDS = 600.0  # for an address that people gave, once a connection to its node was given up on purpose
STEADY_SECONDS = 5.0  # a connection that lasts less counts as a failure, so that two nodes don't connect and part without end


@dataclass(eq=False, slots=True)
class Target:
    """Somebody to be connected to. `joined`: the address as people gave it; `node_id`: once it is known."""

    addresses: tuple[str, ...]
    node_id: NodeId | None = None
    joined: str | None = None
    failures: int = 0  # in a row
    since: float | None = None  # connected
    next_try: float = -math.inf
    dialling: bool = False
    resting: bool = False  # until `next_try`: given up on purpose
    why: Unreachable | None = None


@dataclass(frozen=True, slots=True)
class Unreached:
    """A target that the last dial did not reach, for people."""

    target: str  # the address as given, or the node's id
    addresses: tuple[str, ...]
    reason: str
    failures: int
    next_try_seconds: float


def delay(failures: int, unconnected: int, spread: float) -> float:
    """Seconds until a target is tried again. `spread` in 0..1 keeps nodes from doing so in step.

    It doubles up to `DELAY_SECONDS_MAX`; with many unconnected targets up to what keeps all tries together at
    `TRIES_PER_SECOND`. So after the longest outage the first connection to the other side comes within seconds.
    """
    longest = max(DELAY_SECONDS_MAX, unconnected / TRIES_PER_SECOND)
    grown = DELAY_SECONDS_MIN * 2.0 ** min(failures - 1, 16) if failures > 0 else 0.0
    return min(grown, longest) * (0.8 + 0.4 * spread)


def due(targets: Iterable[Target], connected: Container[NodeId], now: float) -> list[Target]:
    """Whom to dial now, those that failed least first."""
    waiting = [target for target in targets if _wanted(target, connected) and target.next_try <= now]
    return sorted(waiting, key=lambda target: (target.failures, target.next_try))


def next_due(targets: Iterable[Target], connected: Container[NodeId]) -> float:
    """When the next target is due."""
    return min((target.next_try for target in targets if _wanted(target, connected)), default=math.inf)


def _wanted(target: Target, connected: Container[NodeId]) -> bool:
    return not target.dialling and bool(target.addresses) and target.node_id not in connected and target.why != ITSELF


def merge_addresses(newest: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The newest first, then those known before, once each, `ADDRESSES_MAX` in all."""
    return tuple(dict.fromkeys((*newest, *known)))[:ADDRESSES_MAX]


def addresses_of(node_id: NodeId, claimed: Iterable[str]) -> list[str]:
    """The claimed addresses that can be dialled, each with the node's id, so that nobody else is taken for it."""
    found = []
    for text in claimed:
        with contextlib.suppress(AddressError):
            address = parse_address(text)
            if address.node_id in {None, node_id} and address.port:
                found.append(replace(address, node_id=node_id).multiaddr)
    return found


def summary(outcomes: dict[str, Unreachable]) -> Unreachable:
    """What to say of a target whose addresses all failed: the reason, by address where they differ."""
    reasons = {outcome.reason for outcome in outcomes.values()}
    refused = all(outcome.refused for outcome in outcomes.values())
    if len(reasons) == 1:
        return Unreachable(reasons.pop(), refused)
    return Unreachable("; ".join(f"{address}: {outcome.reason}" for address, outcome in outcomes.items()), refused)


class Dialler:
    """Run `run` as long as the node should be connected."""

    def __init__(self, transport: Transport, joins: Sequence[str] = (), randomness: random.Random | None = None) -> None:
        self._transport = transport
        self._random = random.Random() if randomness is None else randomness  # noqa: S311 - spreads tries, hides nothing
        self._joins = [Target((address,), joined=address) for address in dict.fromkeys(joins)]
        self._nodes: dict[NodeId, Target] = {}
        self._addresses = transport.addresses
        self._unconnected = 0
        self._woken = trio.Event()
        self._places = trio.CapacityLimiter(DIALS_MAX)

    def know(self, node_id: NodeId, addresses: Sequence[str]) -> None:
        """There is such a node, at these addresses or those known of it already. New addresses are tried at once."""
        if node_id == self._transport.node_id:
            return
        target = self._nodes.get(node_id)
        if target is None:
            self._make_room()
            target = self._nodes[node_id] = Target((), node_id)
        before = target.addresses
        target.addresses = merge_addresses(addresses_of(node_id, addresses), before)
        if not set(target.addresses) <= set(before):
            target.failures, target.next_try = 0, -math.inf
            self._woken.set()

    def forget(self, node_id: NodeId) -> None:
        """Don't dial this node any more; at an address that people gave, not for a while, or until `knock`."""
        self._nodes.pop(node_id, None)
        for target in self._joins:
            if target.node_id == node_id:
                target.since, target.next_try, target.resting = None, trio.current_time() + REST_SECONDS, True

    def knock(self) -> None:
        """Nobody is connected: the addresses that people gave are wanted again, soon."""
        for target in self._joins:
            if target.resting:
                target.resting = False
                target.next_try = trio.current_time() + delay(max(1, target.failures), 0, self._random.random())
        self._woken.set()

    def hurry(self) -> None:
        """Try every target now: the network has changed, or the device woke up."""
        for target in self._targets():
            target.failures, target.next_try = 0, -math.inf
            if target.why == ITSELF:
                target.why = None
        self._woken.set()

    @property
    def unreached(self) -> tuple[Unreached, ...]:
        """The targets that are not connected and were tried in vain, addresses that people gave first."""
        now = trio.current_time()
        return tuple(
            Unreached(
                target.joined or str(target.node_id),
                target.addresses,
                target.why.reason,
                target.failures,
                max(0.0, target.next_try - now),
            )
            for target in self._targets()
            if target.why not in {None, ITSELF} and target.node_id not in self._transport.peers
        )

    async def redial(self, node_id: NodeId, addresses: Sequence[str] = ()) -> Peer | Unreachable:
        """Dial a node now, whatever its delay: whether a lost peer can be reached still.

        `addresses`: to be tried beside those that are known; they are not kept.
        """
        target = self._nodes.get(node_id)
        merged = merge_addresses(addresses_of(node_id, addresses), target.addresses if target is not None else ())
        if not merged:
            return Unreachable("no address of it is known")
        return await self._dial(Target(merged, node_id))

    async def run(self) -> None:
        """Dial what is due, for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                revision = self._transport.revision
                self._woken = trio.Event()
                self._look_at_peers()
                for target in due(self._targets(), self._transport.peers, trio.current_time()):
                    target.dialling = True
                    nursery.start_soon(self._try, target)
                await self._wait(revision)
                await trio.sleep(LOOK_SECONDS)

    async def _wait(self, revision: int) -> None:
        """Until a target is due, the peers change, or somebody says so."""
        with trio.move_on_at(next_due(self._targets(), self._transport.peers)):
            async with trio.open_nursery() as either:

                async def changed() -> None:
                    await self._transport.wait_past(revision)
                    either.cancel_scope.cancel()

                either.start_soon(changed)
                await self._woken.wait()
                either.cancel_scope.cancel()

    def _look_at_peers(self) -> None:
        """Remember where peers say that they listen; whoever was lost is due again within `REDIAL_SECONDS_MAX`."""
        peers = self._transport.peers
        now = trio.current_time()
        for peer in peers.values():
            known = self._nodes.get(peer.node_id)
            if peer.addresses and (known is None or known.since is None):
                self.know(peer.node_id, peer.addresses)
        for target in self._targets():
            if target.node_id is not None and target.node_id in peers:
                target.since, target.why = peers[target.node_id].since, None
            elif target.since is not None:
                steady = now - target.since >= STEADY_SECONDS
                target.failures = 0 if steady else target.failures + 1
                wait = self._random.uniform(0, REDIAL_SECONDS_MAX) if steady else self._delay(target)
                target.since, target.next_try = None, now + wait
        self._unconnected = sum(1 for target in self._targets() if target.node_id not in peers)
        if self._transport.addresses != self._addresses:
            self._addresses = self._transport.addresses
            self.hurry()

    def _delay(self, target: Target) -> float:
        return delay(target.failures, self._unconnected, self._random.random())

    async def _try(self, target: Target) -> None:
        try:
            outcome = await self._dial(target)
        finally:
            target.dialling = False
        now = trio.current_time()
        if isinstance(outcome, Peer):
            if target.joined is not None:
                target.node_id = outcome.node_id  # of whoever is at that address now
            target.why, target.since = None, outcome.since
        else:
            target.failures += 1
            target.why = outcome
            target.next_try = now + self._delay(target)
        self._woken.set()

    async def _dial(self, target: Target) -> Peer | Unreachable:
        """All addresses of a target side by side; the first that works ends the others."""
        peers: list[Peer] = []
        failed: dict[str, Unreachable] = {}
        async with trio.open_nursery() as nursery:

            async def attempt(address: str) -> None:
                async with self._places:
                    outcome = await self._transport.dial(address)
                if isinstance(outcome, Unreachable):
                    failed[address] = outcome
                else:
                    peers.append(outcome)
                    nursery.cancel_scope.cancel()

            for address in target.addresses:
                nursery.start_soon(attempt, address)
        return peers[0] if peers else summary(failed)

    def _targets(self) -> list[Target]:
        return [*self._joins, *self._nodes.values()]

    def _make_room(self) -> None:
        """Of too many known nodes, the one that failed most often is the least likely to come back."""
        if len(self._nodes) >= TARGETS_MAX:
            del self._nodes[max(self._nodes, key=lambda node_id: self._nodes[node_id].failures)]
