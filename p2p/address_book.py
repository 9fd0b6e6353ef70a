"""Where nodes were last seen, kept on disk: after a restart, or the longest outage, there is somebody to dial.

A cache and not a truth: one that is damaged or of another cluster is begun anew.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
import trio

from p2p.dialler import ADDRESSES_MAX, merge_addresses
from p2p.durable import write_durably
from p2p.ids import NodeId, public_key_of
from p2p.transport import Transport

NODES_MAX = 256  # the longest unseen goes first
BOOK_BYTES_MAX = 1 << 20
SAVE_SECONDS = 5.0  # at most once in so long

_log = structlog.get_logger("p2p")

Addresses = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=400)], ...], msgspec.Meta(max_length=ADDRESSES_MAX)]


class Entry(msgspec.Struct, frozen=True):
    """A node's addresses, newest first, and when it was last connected (Unix seconds)."""

    addresses: Addresses
    seen: int


class _File(msgspec.Struct, frozen=True):
    cluster: str
    nodes: dict[str, Entry]


class AddressBook:
    """The nodes of one cluster, told apart by its tag."""

    def __init__(self, cluster_tag: str, entries: Mapping[NodeId, Entry] | None = None) -> None:
        self.cluster_tag = cluster_tag
        self._entries = dict(entries or {})

    @property
    def entries(self) -> Mapping[NodeId, Entry]:
        """What is known; not a copy."""
        return self._entries

    def record(self, node_id: NodeId, addresses: Sequence[str], seen: int) -> bool:
        """A node is connected and says that it listens there; whether that was news."""
        known = self._entries.pop(node_id, None)
        before = known.addresses if known is not None else ()
        self._entries[node_id] = Entry(merge_addresses(addresses, before), seen)
        while len(self._entries) > NODES_MAX:
            del self._entries[min(self._entries, key=lambda other: self._entries[other].seen)]
        return self._entries[node_id].addresses != before if node_id in self._entries else False

    def forget(self, node_id: NodeId) -> None:
        """Take a node out."""
        self._entries.pop(node_id, None)

    def to_json(self) -> bytes:
        """The file's content."""
        return msgspec.json.format(
            msgspec.json.encode(_File(self.cluster_tag, {str(node_id): entry for node_id, entry in self._entries.items()})),
            indent=1,
        )


def load_book(path: Path, cluster_tag: str) -> AddressBook:
    """The book at `path`, or an empty one where there is none, or none of this cluster that can be read."""
    try:
        with path.open("rb") as file:
            content = file.read(BOOK_BYTES_MAX)
        read = msgspec.json.decode(content, type=_File)
        entries = {NodeId(node_id): entry for node_id, entry in read.nodes.items() if public_key_of(node_id)}
    except FileNotFoundError:
        return AddressBook(cluster_tag)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        _log.warning("the address book can't be read and is begun anew", file=str(path), why=str(error))
        return AddressBook(cluster_tag)
    return AddressBook(cluster_tag, entries if read.cluster == cluster_tag else None)


async def keep_book(book: AddressBook, path: Path, transport: Transport) -> None:
    """Record whoever connects, and save what is new, for ever. A disk that fails costs the book, not the node."""
    while True:
        revision = transport.revision
        news = [
            book.record(peer.node_id, peer.addresses, int(time.time())) for peer in transport.peers.values() if peer.addresses
        ]
        if any(news):
            try:
                await trio.to_thread.run_sync(write_durably, path, book.to_json())
            except OSError as error:
                _log.warning("the address book can't be saved", file=str(path), why=error.strerror)
            await trio.sleep(SAVE_SECONDS)
        await transport.wait_past(revision)
