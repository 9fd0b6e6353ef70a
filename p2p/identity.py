"""A node's identity: an Ed25519 key on disk, from which its id follows. Whoever has the file is the node."""

import contextlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from p2p.durable import write_durably
from p2p.ids import NodeId, node_id_of

KEY_FILE_BYTES_MAX = 4096


class IdentityError(Exception):
    """The identity key can't be read or made; `str()` is one sentence that names the file."""


class Identity:
    """A private key and the node id that belongs to it."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self.private_key = private_key
        self.node_id: NodeId = node_id_of(private_key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"Identity({self.node_id})"

    def to_pem(self) -> bytes:
        """The key as PKCS#8 in PEM, not encrypted."""
        return self.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @classmethod
    def new(cls) -> "Identity":
        """One that nobody had before."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes) -> "Identity":
        """Raises: ValueError where this is no unencrypted Ed25519 key in PEM."""
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ValueError("no private key in PEM") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError("not an Ed25519 key")  # noqa: TRY004 - the file is at fault, not its reader
        return cls(key)


def load_or_create(path: Path) -> Identity:
    """The identity kept at `path`; one is made there if there is none. The caller holds the data directory's lock.

    A damaged key is never replaced, since the node's id would change with it. A key that others may read is closed to them.

    Raises: IdentityError.
    """
    try:
        with path.open("rb") as file:
            pem = file.read(KEY_FILE_BYTES_MAX)
    except FileNotFoundError:
        return _create(path)
    except OSError as error:
        raise IdentityError(f"the identity key {path} can't be read: {error.strerror}") from None
    try:
        identity = Identity.from_pem(pem)
    except ValueError as error:
        raise IdentityError(
            f"the identity key {path} is damaged ({error}): restore it, or delete it to become a new node"
        ) from None
    with contextlib.suppress(OSError):  # some file systems have no modes
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    return identity


def _create(path: Path) -> Identity:
    identity = Identity.new()
    try:
        write_durably(path, identity.to_pem())
    except OSError as error:
        raise IdentityError(f"the identity key {path} can't be written: {error.strerror}") from None
    return identity
