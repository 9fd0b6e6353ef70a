"""The open streams of a node, and what is still to be said on each."""

from msgspec import Struct, field

from p2p.effects import Close, Outbox
from p2p.sync_wire import Rumour


class Link(Struct, weakref=False):
    """One open stream to a peer.

    `pending` is all that is kept of what the peer has: for members with news, the version above which it lacks changes (0:
    all). A wrong guess can't hurt: a peer that is further behind sees the gap and says where it stands.
    """

    peer: bytes
    opened: float
    greeted: bool = False
    heard: float = -1e9  # when its last frame came
    answered: float = -1e9  # when it last answered a ping
    pending: dict[bytes, int] = field(default_factory=dict)
    rumours: dict[tuple[bytes, bytes], Rumour] = field(default_factory=dict)  # by member and accuser
    asks: dict[bytes, None] = field(default_factory=dict)  # members of which the peer is to be told how far we are

    @property
    def dirty(self) -> bool:
        """Whether anything is to be said."""
        return bool(self.pending or self.rumours or self.asks)


class Links(dict[bytes, Link]):
    """All open streams, by peer."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def close(self, peer: bytes, reason: str, *, fault: bool = False) -> None:
        """End a stream; nothing more is said or heard on it."""
        if self.pop(peer, None) is not None:
            self._outbox.add(Close(peer, reason, fault))
