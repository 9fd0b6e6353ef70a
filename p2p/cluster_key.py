"""Which cluster a node is of: a name, and a key that all its nodes hold. Without both, the handshake fails.

Name and key go into the prologue of the Noise handshake (Noise specification, section 5.3), so that nodes of different
clusters fail at the first encrypted message, in milliseconds, before a byte of theirs is looked at. A recorded handshake lets
an attacker try keys at leisure; therefore only keys too long to be guessed are taken, best those that `new_key` makes.
"""

import hashlib
import math
import secrets
from dataclasses import dataclass, field

KEY_BITS = 256
KEY_BITS_MIN = 128
DISTINCT_CHARACTERS_MIN = 8  # 32 random hexadecimal digits have fewer with a probability of 4e-8
KEY_CHARACTERS_MAX = 1024
NAME_BYTES_MAX = 64

# Of the handshake itself. The versions of what is spoken afterwards are exchanged in it, so that they can be shown.
HANDSHAKE = b"shoal handshake 1"


class ClusterKeyError(ValueError):
    """The cluster's name or key can't be used; `str()` is one sentence that says what to do and never holds the key."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster's name and the digest of its key; no key is one of its own kind, for nodes of one machine."""

    name: str
    key_digest: bytes | None = field(default=None, repr=False)

    @property
    def prologue(self) -> bytes:
        """What both ends of a Noise handshake must hold alike."""
        name = self.name.encode()
        key = b"\0" if self.key_digest is None else b"\1" + self.key_digest
        return b"%s%c%s%s" % (HANDSHAKE, len(name), name, key)

    @property
    def tag(self) -> str:
        """8 hexadecimal digits that tell clusters apart where names are public; they say nothing about the key."""
        return hashlib.sha256(b"tag" + self.prologue).hexdigest()[:8]


def cluster(name: str, key: str | None) -> Cluster:
    """The cluster of this name and key.

    Raises: ClusterKeyError.
    """
    if not name or len(name.encode()) > NAME_BYTES_MAX:
        raise ClusterKeyError(f"a cluster's name has 1 to {NAME_BYTES_MAX} bytes")
    return Cluster(name, None if key is None else key_digest(key))


def new_key() -> str:
    """A new random cluster key of 256 bits, as 64 hexadecimal digits."""
    return secrets.token_hex(KEY_BITS // 8)


def key_digest(key: str) -> bytes:
    """32 bytes that stand for the key. Spaces and line ends around it don't count.

    Raises: ClusterKeyError where a key of that length and those characters could be guessed.
    """
    text = key.strip()
    if len(text) > KEY_CHARACTERS_MAX:
        raise ClusterKeyError(f"the cluster key has more than {KEY_CHARACTERS_MAX} characters")
    if strength_bits(text) < KEY_BITS_MIN:
        raise ClusterKeyError(
            f"the cluster key is too short: below {KEY_BITS_MIN} bits it can be guessed; `node key` makes one"
        )
    return hashlib.sha256(b"shoal cluster key" + text.encode()).digest()


def strength_bits(text: str) -> float:
    """The most bits that a text can hold, judged by its length and the smallest usual alphabet that has its characters."""
    if len(set(text)) < DISTINCT_CHARACTERS_MIN:
        return 0.0
    return len(text) * math.log2(_alphabet_size(text))


def _alphabet_size(text: str) -> int:
    """Digits 10, hexadecimal 16, letters of one case and digits 36, of both 62, anything else 64."""
    if text.isdecimal():
        return 10
    if all(character in "0123456789abcdefABCDEF" for character in text):
        return 16
    if text.isalnum():
        return 36 if text in {text.lower(), text.upper()} else 62
    return 64
