"""Nodes with nothing but their replicated state, in memory or over the real network, for tests of the loop around it."""

import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Struct

from p2p.core import Core
from p2p.dialler import Dialler
from p2p.gossip import Gossip
from p2p.identity import Identity
from p2p.ids import NodeId
from p2p.lattice import ALIVE, Generation, Liveness
from p2p.memory_transport import PORT, MemoryNetwork, open_network
from p2p.replica import Schema
from p2p.settings import Settings
from p2p.sync_wire import node16
from p2p.transport import OUR_VERSIONS, Transport, Versions
from tests.p2p.transport_lab import CLUSTER, Libp2pLab

PROFILE, NOTE = 1, 2


class Profile(Struct, frozen=True, array_like=True):
    """Who a member is and where it can be dialled."""

    peer_id: str
    addresses: tuple[str, ...]


SCHEMA = Schema({PROFILE: (int, Profile), NOTE: (int, str)})


def identity(number: int) -> Identity:
    """The same one each time."""
    return Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big")))


class Member:
    """One node. `run` is to be cancelled for its end."""

    def __init__(
        self,
        transport: Transport,
        joins: Sequence[str],
        boot: int,
        *,
        book: Mapping[NodeId, Sequence[str]] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.boot = boot
        self._scope = trio.CancelScope()
        self.transport = transport
        chance = random.Random(f"{transport.node_id}/{boot}")
        self.node = node16(transport.node_id)
        self.core = Core(self.node, Generation(boot, boot), cluster=bytes(16), schema=SCHEMA, chance=chance, settings=settings)
        self.dialler = Dialler(transport, joins, chance)
        self.gossip = Gossip(self.core, transport, self.dialler, profile=self._profile, remembered=book)
        self.gossip.write(PROFILE, 0, Profile(transport.node_id, transport.addresses))

    def _profile(self, node: bytes) -> tuple[str, tuple[str, ...]] | None:
        member = self.core.replica.members.get(node)
        record = member.namespace.records.get((PROFILE, 0)) if member is not None else None
        profile = record.content if record is not None else None
        return (profile.peer_id, profile.addresses) if isinstance(profile, Profile) else None

    async def run(self) -> None:
        with self._scope:
            await self._run()

    def stop(self) -> None:
        """End the loop, not the transport."""
        self._scope.cancel()

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.dialler.run)
            await self.gossip.run()

    @property
    def node_id(self) -> NodeId:
        return self.transport.node_id

    @property
    def address(self) -> str:
        return self.transport.addresses[0]

    @property
    def root(self) -> bytes:
        return self.core.replica.root

    def sees(self, other: "Member") -> Liveness | None:
        return self.gossip.believe(other.node)

    def note(self, other: "Member", name: int) -> object:
        """What it holds of another one's notes."""
        member = self.core.replica.members.get(other.node)
        record = member.namespace.records.get((NOTE, name)) if member is not None else None
        return record.content if record is not None else None

    def listed(self) -> set[bytes]:
        """Who is there, in this node's view."""
        return {node for node in self.core.replica.members if self.gossip.believe(node) in {ALIVE, Liveness.SUSPECT}}


class Gossips:
    """Nodes on one network, by number; each in a task of its own, so that any can end at any time."""

    def __init__(self, network: MemoryNetwork, nursery: trio.Nursery, settings: Settings | None) -> None:
        self.network = network
        self._settings = settings
        self._nursery = nursery
        self._boots = 0
        self._scopes: dict[int, trio.CancelScope] = {}
        self.members: dict[int, Member] = {}
        self.ended: dict[int, BaseException] = {}  # by number of the boot

    async def start(
        self,
        number: int,
        joins: Iterable[int | str] = (),
        *,
        host: str | None = None,
        versions: Versions = OUR_VERSIONS,
        remembered: Iterable[Member] = (),
        before: Callable[[Member], None] = lambda _: None,
    ) -> Member:
        """A new process of node `number`, at its own address unless told otherwise; `before` it runs, something may be done."""
        self._boots += 1
        boot = self._boots
        addresses = [join if isinstance(join, str) else self.members[join].address for join in joins]
        book = {other.node_id: other.transport.addresses for other in remembered}
        host = host or f"10.0.{number >> 8}.{number & 255}"
        while self.network.node_at(host, PORT) is not None:  # one that was just killed takes no time to go
            await trio.lowlevel.checkpoint()
        opening = self.network.open_transport(
            identity(number).node_id,
            CLUSTER,
            host=host,
            versions=versions,
            boot=boot.to_bytes(8, "big"),
        )

        self._scopes[number] = trio.CancelScope()

        async def live(*, task_status: trio.TaskStatus[Member]) -> None:
            try:
                with self._scopes[number]:
                    async with opening as transport:
                        member = Member(transport, addresses, boot, book=book, settings=self._settings)
                        before(member)
                        task_status.started(member)
                        await member.run()
                        await trio.sleep_forever()
            except* Exception as group:  # noqa: BLE001 - the test looks at it
                self.ended[boot] = _only(group)

        member: Member = await self._nursery.start(live)
        self.members[number] = member
        return member

    async def leave(self, number: int) -> Member:
        """As a node does that is told to stop."""
        member = self.members.pop(number)
        await member.gossip.leave()
        self._scopes[number].cancel()
        return member

    def kill(self, number: int, *, silent: bool = False) -> Member:
        """As kill -9 does, or a power cut."""
        member = self.members.pop(number)
        self.network.crash(member.node_id, silent=silent)
        return member

    async def mesh(self, count: int, first: int = 1) -> list[Member]:
        """So many nodes with a stream between any two."""
        members = [await self.start(first)]
        members += [await self.start(number, [first]) for number in range(first + 1, first + count)]
        await until(lambda: meshed(members), 10)
        return members


@asynccontextmanager
async def open_gossips(settings: Settings | None = None, *, seed: int = 0) -> AsyncIterator[Gossips]:
    async with open_network(seed) as network, trio.open_nursery() as nursery:
        network.set_latency(0.001, jitter=0.001)
        yield Gossips(network, nursery, settings)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_real(count: int) -> AsyncIterator[list[Member]]:
    """Nodes over libp2p on loopback; the first one's address is everybody's `--join`."""
    members: list[Member] = []

    async def live(*, task_status: trio.TaskStatus[None]) -> None:
        async with Libp2pLab().node() as transport:
            members.append(Member(transport, [member.address for member in members[:1]], len(members) + 1))
            task_status.started()
            await members[-1].run()

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            await nursery.start(live)
        yield members
        nursery.cancel_scope.cancel()


def _only(error: BaseException) -> BaseException:
    """What a group holds, if that is one thing."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def until(condition: Callable[[], bool], seconds: float, step: float = 0.005) -> float:
    """How long it took, to within a step. For virtual time, where waiting costs nothing."""
    began = trio.current_time()
    while not condition():
        assert trio.current_time() - began < seconds, f"not within {seconds:g} s"
        await trio.sleep(step)
    return trio.current_time() - began


def agree(members: Iterable[Member]) -> bool:
    """Whether all hold the same, and each other for alive."""
    members = list(members)
    return len({member.root for member in members}) == 1 and all(
        member.sees(other) is ALIVE for member in members for other in members
    )


def meshed(members: Iterable[Member]) -> bool:
    """Whether all agree, and each has a stream to each other."""
    members = list(members)
    return (
        agree(members)
        and all(link.greeted for member in members for link in member.core.links.values())
        and all(len(member.core.links) == len(members) - 1 for member in members)
    )
