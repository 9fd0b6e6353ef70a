"""The loop around the replicated state: streams in, effects out, one timer. The decisions are all in `p2p.core`.

Calls. Everything that calls the core does so between two awaits, so nothing here needs a lock. What the core asks for is done
in order, at once. What is to be sent waits in a bounded queue for each peer (`p2p.gossip_link`); where that overflows all of it
is dropped, since repair finds what a peer lacks without any memory of what was said.

Time. The core's clock is passed in, and goes on in sleep (`p2p.boot_clock`). Waiting is trio's; after each wait the time that
is left is worked out anew.

Doubles. Of two processes with one identity the newcomer stops. Who that is, the transport finds out where one of them meets the
other, or a node that the other is connected to (`p2p.hello`), before the core hears of it. The core is told of a new stream
only after it was told of the old one's end, so its own claim "I have a stream to another life of yours" never comes up here.
Where nobody met both of them, as can be in a large cluster, the core finds out by their outbidding each other.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import trio

from p2p.core import Core
from p2p.dialler import Dialler
from p2p.effects import Changed, Clash, Close, Dial, Effect, Renewed, Send
from p2p.gossip_dials import Dials, Profile
from p2p.gossip_link import Counters
from p2p.gossip_streams import SyncStreams
from p2p.ids import NodeId
from p2p.lattice import Generation, Liveness
from p2p.stream import TransportError
from p2p.sync_wire import Name
from p2p.transport import Transport, Unreachable

GOODBYE_SECONDS = 1.0  # for a goodbye to go out, and for answers to whoever has not heard it
GOODBYE_SECONDS_MESH = 0.25  # of that, after it went out, where everybody heard it at first hand
TICK_SECONDS_MIN = 0.001  # between two ticks, and between two looks at what is to go out
COPY_SECONDS = 10.0  # between two looks at addresses where this node's own identity was found

__all__ = ["Counters", "Gossip", "IdentityClash", "Profile"]


class IdentityClash(TransportError):
    """Another process has this node's identity, and was there first."""


class Gossip:
    """One node's. Make it before the first `await` after the transport was opened; nothing happens until `run`."""

    def __init__(
        self,
        core: Core,
        transport: Transport,
        dialler: Dialler,
        *,
        profile: Profile,
        clock: Callable[[], float] = trio.current_time,
        remembered: Mapping[NodeId, Sequence[str]] | None = None,
    ) -> None:
        """`profile` looks up what a member has published; `remembered` are nodes of former days, the last seen at the end."""
        self.core = core
        self.on_changed: list[Callable[[Changed], None]] = []
        self.on_renewed: list[Callable[[Generation], None]] = []
        self._transport = transport
        self._clock = clock
        self._dials = Dials(core, transport, dialler, profile, remembered or {})
        self._streams = SyncStreams(core, transport, self._dials, clock, self._perform)
        self._dialling: set[bytes] = set()
        self._effects: deque[Effect] = deque()
        self._nursery: trio.Nursery | None = None  # while it runs
        self._sooner = trio.Event()
        self._sleeps_until = -math.inf
        self._copy_looked_at = -math.inf
        self._clash: str | None = None
        self._revision = 0
        self._change = trio.Event()

    @property
    def counters(self) -> Counters:
        """What went in and out since the start."""
        return self._streams.counters

    def write(self, kind: int, name: Name, value: object, *, urgent: bool = False) -> None:
        """Publish a record; whoever listens has heard of it when this returns. What is urgent may use the room kept for it.

        Raises: NamespaceFull.
        """
        self.core.write(kind, name, value, self._clock(), urgent=urgent)
        self._perform(self.core.outbox.take())

    def delete(self, kind: int, name: Name) -> None:
        """Take a record back, if there is one; whoever listens has heard of it when this returns."""
        self.core.delete(kind, name, self._clock())
        self._perform(self.core.outbox.take())

    def believe(self, node: bytes) -> Liveness | None:
        """What this node takes a member for; None for one it doesn't know."""
        return self.core.believe(node, self._clock())

    def watch(self, node: bytes) -> None:
        """Keep a stream to this member for one more reason; the member has to do so too."""
        self.core.watch(node)

    def unwatch(self, node: bytes) -> None:
        """One reason less."""
        self.core.unwatch(node)

    def node_id(self, node: bytes) -> NodeId | None:
        """The peer id behind a member's 16 bytes, once it is known."""
        return self._dials.node_id(node)

    def found(self, node_id: NodeId, addresses: Sequence[str]) -> None:
        """There is a node of this cluster, says discovery. One of this id elsewhere is a copy of this node, or its original."""
        if node_id != self._transport.node_id:
            self._dials.found(node_id, addresses)
            return
        elsewhere = [address for address in addresses if address not in self._transport.addresses]
        now = trio.current_time()
        if elsewhere and self._nursery is not None and now - self._copy_looked_at >= COPY_SECONDS:
            self._copy_looked_at = now
            for address in elsewhere:
                self._nursery.start_soon(self._transport.dial, address)

    @property
    def revision(self) -> int:
        """Rises with every change."""
        return self._revision

    async def wait_past(self, revision: int) -> int:
        """Wait until the revision is above this one; returns it."""
        while self._revision <= revision:
            await self._change.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        return self._revision

    async def leave(self) -> None:
        """Say goodbye, have it go out, and go on answering for a moment; a second in all, at most."""
        self._perform(self.core.leave(self._clock()))
        with trio.move_on_after(GOODBYE_SECONDS):
            while not self._streams.idle:  # noqa: ASYNC110 - once in a life; an event for it would be set with every frame
                await trio.sleep(TICK_SECONDS_MIN)
            if len(self._streams):
                await trio.sleep(GOODBYE_SECONDS_MESH if self.core.mesh else GOODBYE_SECONDS)

    async def run(self) -> None:
        """Take part, for ever; once.

        Raises: IdentityClash.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                self._perform(self.core.start(self._clock()))
                nursery.start_soon(self._streams.run)
                nursery.start_soon(self._watch_clash)
                await self._tick()
            finally:
                self._nursery = None
        if self._clash is not None:
            raise IdentityClash(self._clash)

    async def _tick(self) -> None:
        while True:
            self._sooner = trio.Event()
            self._sleeps_until = self.core.deadline
            with trio.move_on_after(max(self.core.deadline - self._clock(), TICK_SECONDS_MIN)):
                await self._sooner.wait()
            self._sleeps_until = -math.inf
            now = self._clock()
            if now >= self.core.deadline:
                self._perform(self.core.tick(now))

    async def _watch_clash(self) -> None:
        transport = self._transport
        while transport.clash is None:
            await transport.wait_past(transport.revision)
        self._stop(
            f"another running node, met at {transport.clash}, has this node's identity {transport.node_id}: its data directory "
            "was copied, and each node needs one of its own"
        )

    def _stop(self, message: str) -> None:
        self._clash = self._clash or message
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    # Effects.

    def _perform(self, effects: list[Effect]) -> None:
        """Do them all, in order. What comes up meanwhile, as by a write of whoever is told of a change, comes after them."""
        self._effects.extend(effects)
        while self._effects:
            self._do(self._effects.popleft())
        if self.core.deadline < self._sleeps_until:
            self._sooner.set()

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(peer=node, body=body):
                self._streams.send(node, body)
            case Changed():
                self._tell(effect)
            case Dial(target=target):
                self._dial(target)
            case Close():
                self._streams.close(effect)
            case Renewed(generation=generation):
                for callback in tuple(self.on_renewed):
                    callback(generation)
            case Clash(message=message):
                self._stop(f"{message} (identity {self._transport.node_id})")

    def _tell(self, change: Changed) -> None:
        self._revision += 1
        self._change.set()
        self._change = trio.Event()
        self._dials.changed(change.node)
        for callback in tuple(self.on_changed):
            callback(change)

    def _dial(self, target: bytes | str) -> None:
        assert isinstance(target, bytes), "addresses that people gave are the dialler's"
        if target not in self._dialling and self._nursery is not None:
            self._dialling.add(target)
            self._nursery.start_soon(self._redial, target)

    async def _redial(self, node: bytes) -> None:
        """Connect to a member; what comes of it reaches the core as a stream, or here."""
        self.counters.dials += 1
        try:
            outcome = await self._dials.reach(node)
        finally:
            self._dialling.discard(node)
        if isinstance(outcome, Unreachable):
            self._perform(self.core.dial_failed(node, self._clock(), refused=outcome.refused))
