"""What the core asks of its shell; it does nothing by itself."""

from typing import Protocol

from msgspec import Struct

from p2p.lattice import Generation
from p2p.namespace import Written
from p2p.sync_wire import MESSAGES, Message
from p2p.wire import HEADER_BYTES


class Chance(Protocol):
    """A source of randomness that its owner has seeded."""

    def random(self) -> float:
        """A number in [0, 1)."""

    def randrange(self, stop: int, /) -> int:
        """A number in 0..stop-1."""


class Send(Struct, frozen=True, gc=False):
    """Write this frame's body to the stream of that peer."""

    peer: bytes
    body: bytes


class Dial(Struct, frozen=True, gc=False):
    """Open a stream, to a member or to an address that was given to this node; answered by `connected` or `dial_failed`."""

    target: bytes | str


class Close(Struct, frozen=True, gc=False):
    """End the stream of that peer; `reason` counts as the peer's fault where `fault` is set."""

    peer: bytes
    reason: str
    fault: bool


class Changed(Struct, frozen=True, gc=False):
    """Something about a member changed: its records (`changes`; None: any of them) or what is to be thought of it (empty)."""

    node: bytes
    changes: tuple[Written, ...] | None


class Renewed(Struct, frozen=True, gc=False):
    """The generation of this node was raised to outbid what is left of an earlier life; to be kept on disk."""

    generation: Generation


class Clash(Struct, frozen=True, gc=False):
    """Another node runs under this one's identity; this one has to stop, with this message."""

    message: str


Effect = Send | Dial | Close | Changed | Renewed | Clash


class Outbox:
    """Effects in the order in which they came up."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def send(self, peer: bytes, message: Message) -> int:
        """Send one message; returns the length of its body."""
        body = MESSAGES.encode(message)[HEADER_BYTES:]
        self.effects.append(Send(peer, body))
        return len(body)

    def add(self, effect: Effect) -> None:
        """Any other effect."""
        self.effects.append(effect)

    def take(self) -> list[Effect]:
        """All effects since the last call."""
        effects = self.effects
        self.effects = []
        return effects


def shuffled(items: list[bytes], chance: Chance) -> list[bytes]:
    """The items in random order."""
    result = list(items)
    for i in range(len(result) - 1, 0, -1):
        j = int(chance.random() * (i + 1))
        result[i], result[j] = result[j], result[i]
    return result


class Violations(Struct):
    """Why streams were ended, counted."""

    bad_frame: int = 0
    bad_hello: int = 0
    not_greeted: int = 0
