"""From a TCP connection to a peer that is known: Noise with the cluster in its prologue, then the two hellos.

No libp2p host takes part, so no other security than Noise can be negotiated, and what a stranger sends reaches Noise and no
further.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag

from p2p.cluster_key import Cluster
from p2p.hello import HELLO_CODEC, Greeting
from p2p.identity import Identity
from p2p.ids import NodeId, public_key_of
from p2p.libp2p_sealed import SocketBytes
from p2p.wire import ProtocolViolation

# isort: split
from libp2p.crypto.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.patterns import IPattern, PatternXX
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.security.secure_session import SecureSession
from libp2p.security.security_multistream import SecurityMultistream

HANDSHAKE_BYTES_MAX = 32 * 1024  # what is read before the hellos were exchanged


class HandshakeFailed(Exception):
    """`str()` says what the far end is not, in a few words."""


class ClusterNoise(NoiseTransport):  # type: ignore[misc]
    """Noise for the nodes of one cluster."""

    def __init__(self, identity: Identity, cluster: Cluster) -> None:
        private = Ed25519PrivateKey.from_bytes(identity.private_key.private_bytes_raw())
        public = Ed25519PublicKey.from_bytes(identity.private_key.public_key().public_bytes_raw())
        super().__init__(KeyPair(private, public), noise_privkey=create_x25519_key_pair().private_key)
        self._prologue = cluster.prologue

    def get_pattern(self) -> IPattern:
        """The handshake, bound to the cluster."""
        return PatternXX(self.local_peer, self.libp2p_privkey, self.noise_privkey, prologue=self._prologue)


@contextmanager
def _failing_as(socket: SocketBytes) -> Iterator[None]:
    """Whatever goes wrong in a handshake, in words. libp2p, noiseprotocol, protobuf and cryptography each raise their own."""
    try:
        yield
    except InvalidTag as error:
        raise HandshakeFailed("a node of another cluster: its cluster name or key differs") from error
    except PeerIDMismatchesPubkey as error:
        raise HandshakeFailed("another node than the one expected answers there") from error
    except ProtocolViolation as error:
        raise HandshakeFailed(f"its hello makes no sense ({error})") from error
    except Exception as error:
        why = "it closed the connection during" if socket.ended else "no node of this kind: it failed"
        raise HandshakeFailed(f"{why} the handshake") from error


@dataclass(frozen=True, slots=True)
class Secured:
    """A connection whose far end proved its id."""

    node_id: NodeId
    session: SecureSession
    socket: SocketBytes

    async def send(self, message: Greeting) -> None:
        """Raises: HandshakeFailed."""
        with _failing_as(self.socket):
            await self.session.conn.write_msg(HELLO_CODEC.encode(message))

    async def receive(self) -> Greeting:
        """The next message, which fills one Noise message.

        Raises: HandshakeFailed.
        """
        with _failing_as(self.socket):
            messages = list(HELLO_CODEC.reader().feed(await self.session.conn.read_msg()))
        if len(messages) != 1:
            raise HandshakeFailed("its hello makes no sense")
        return messages[0]


def security(identity: Identity, cluster: Cluster) -> SecurityMultistream:
    """What `secure` needs: Noise alone, for this identity and cluster."""
    return SecurityMultistream({NOISE_ID: ClusterNoise(identity, cluster)})


async def secure(
    options: SecurityMultistream, socket: SocketBytes, *, dialled: bool, expected: NodeId | None = None
) -> Secured:
    """Do the Noise handshake; afterwards both ends know each other's ids, and that both are of this cluster.

    Raises: HandshakeFailed.
    """
    raw = RawConnection(socket, dialled)
    with _failing_as(socket):
        if dialled:
            session = await options.secure_outbound(raw, None if expected is None else ID.from_string(expected))
        else:
            session = await options.secure_inbound(raw)
    node_id = session.get_remote_peer().to_string()
    try:
        public_key_of(node_id)
    except ValueError as error:
        raise HandshakeFailed("no node of this kind: its key is not Ed25519") from error
    return Secured(NodeId(node_id), session, socket)
