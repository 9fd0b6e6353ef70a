"""A node among its peers: identity and generation from the disk, transport, discovery, and the replicated state on top."""

import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio
from msgspec import Struct

from node.config import Config
from node.documents import TaskDocument
from node.dump_stream import cluster_of
from node.ended_tasks import ask_home
from node.records import PROFILE, SCHEMA, Profile
from p2p.address_book import keep_book, load_book
from p2p.boot_clock import boot_clock, new_nonce
from p2p.core import Core
from p2p.dialler import Dialler, Unreached
from p2p.durable import write_durably
from p2p.gossip import Gossip
from p2p.identity import Identity
from p2p.ids import NodeId
from p2p.lattice import COUNTER_MAX, Generation
from p2p.replica import Replica
from p2p.sync_wire import node16
from p2p.transport import Incompatible, Transport

if TYPE_CHECKING:
    from p2p.cluster_key import Cluster

GENERATION_FILE = "generation.json"
BOOK_FILE = "peers.json"
GENERATION_BYTES_MAX = 4096

_log = structlog.get_logger("p2p")


class Membership(Struct, frozen=True):
    """What keeps this node in its cluster."""

    transport: Transport
    dialler: Dialler
    gossip: Gossip

    @property
    def unreached(self) -> tuple[Unreached, ...]:
        """Whom it should be connected to and can't reach."""
        return self.dialler.unreached

    @property
    def incompatible(self) -> tuple[Incompatible, ...]:
        """Peers of other versions."""
        return tuple(self.transport.incompatible.values())

    async def ask_home(self, home: NodeId, task_id: str) -> TaskDocument | None:
        """What the home of a task remembers of it; None where it is not reached either."""
        if home not in self.transport.peers:
            await self.dialler.redial(home)
        return await ask_home(self.transport, home, task_id)

    @property
    def counters(self) -> dict[str, int]:
        """What went in and out, and what went wrong."""
        edge = {name: getattr(self.transport.counters, name) for name in self.transport.counters.__slots__}
        return {**edge, **msgspec.structs.asdict(self.gossip.counters)}


class _Counter(Struct, frozen=True):
    counter: int


def next_counter(path: Path, wall_seconds: float) -> int:
    """The counter of this life's generation: above those of earlier ones, as far as the disk and the clock know.

    Neither is trusted: a node that is greeted with a higher one outbids it (`p2p.core`).
    """
    kept = 0
    try:
        with path.open("rb") as file:
            kept = msgspec.json.decode(file.read(GENERATION_BYTES_MAX), type=_Counter).counter
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        pass
    counter = max(kept + 1, int(wall_seconds))
    return counter if 0 <= counter < COUNTER_MAX else kept % COUNTER_MAX


def keep_counter(path: Path, counter: int) -> None:
    """Put it on the disk; one that fails costs nothing but a round of outbidding."""
    try:
        write_durably(path, msgspec.json.encode(_Counter(counter)) + b"\n")
    except OSError as error:
        _log.warning("the generation can't be saved", file=str(path), why=error.strerror)


@asynccontextmanager
async def open_membership(config: Config, identity: Identity, wall_seconds: float) -> AsyncIterator[Membership]:
    """Listen, find the others and share state with them, until the context ends.

    Raises: ListenFailed; IdentityClash, in a group, once another node with this identity is met.
    """
    # More than a second's worth of imports: in a thread, so that whatever else starts meanwhile does.
    libp2p_transport = await trio.to_thread.run_sync(import_module, "p2p.libp2p_transport")
    cluster = cluster_of(config)
    nonce = new_nonce(wall_seconds, random.SystemRandom())
    boot = nonce.to_bytes(8, "big")
    async with (
        libp2p_transport.open_transport(identity, [str(config.listen)], cluster, boot=boot) as transport,
        trio.open_nursery() as nursery,
    ):
        path = config.data_dir / GENERATION_FILE
        generation = Generation(next_counter(path, wall_seconds), nonce)
        keep_counter(path, generation.counter)
        core = Core(
            node16(identity.node_id),
            generation,
            cluster=_cluster16(cluster),
            schema=SCHEMA,
            chance=random.Random(),  # noqa: S311 - spreads probes and choices, hides nothing
        )
        book = load_book(config.data_dir / BOOK_FILE, cluster.tag)
        dialler = Dialler(transport, config.join)
        remembered = {node_id: entry.addresses for node_id, entry in book.entries.items()}
        gossip = Gossip(
            core,
            transport,
            dialler,
            profile=lambda node: profile_of(core.replica, node),
            clock=boot_clock,
            remembered=remembered,
        )
        gossip.on_renewed.append(lambda renewed: keep_counter(path, renewed.counter))
        nursery.start_soon(dialler.run)
        nursery.start_soon(keep_book, book, config.data_dir / BOOK_FILE, transport)
        if config.discovery:
            discovery = await trio.to_thread.run_sync(import_module, "p2p.discovery")
            run = partial(discovery.discover, cluster.tag, identity.node_id, lambda: transport.addresses, gossip.found)
            nursery.start_soon(run)
        yield Membership(transport, dialler, gossip)
        nursery.cancel_scope.cancel()


def profile_of(replica: Replica, node: bytes) -> tuple[str, tuple[str, ...]] | None:
    """The peer id and the addresses that a member has published."""
    member = replica.members.get(node)
    record = member.namespace.records.get((PROFILE, 0)) if member is not None else None
    content = record.content if record is not None else None
    return (content.peer_id, content.addresses) if isinstance(content, Profile) else None


def _cluster16(cluster: "Cluster") -> bytes:
    """What tells clusters apart in the greeting of the replicated state; the handshake has done so already."""
    return hashlib.sha256(b"sync" + cluster.prologue).digest()[:16]


def alone(config: Config) -> str | None:
    """One line for whoever started a node that no other device can join, and what to do; None where others can."""
    if config.cluster_key is not None:
        return None
    return (
        "alone on this machine: run `node key > cluster.key` once, copy the file to each device, and start them all with "
        "--cluster-key-file cluster.key"
    )
