"""Node ids: libp2p peer ids, computed here, because importing libp2p takes more than a second and most commands need none.

A peer id is base58 of the multihash of the protobuf-coded public key; an Ed25519 key is short enough for the identity
multihash, so the id holds the key itself (libp2p specifications, peer-ids).
"""

from typing import NewType

NodeId = NewType("NodeId", str)

ED25519_PUBLIC_KEY_BYTES = 32
# identity multihash (0x00) of 36 bytes: field 1 (key type) = 1, Ed25519; field 2 (data), 32 bytes
_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_ID_CHARACTERS_MAX = 64


def node_id_of(public_key: bytes) -> NodeId:
    """The node id (`12D3Koo...`, 52 characters) of an Ed25519 public key of 32 bytes."""
    assert len(public_key) == ED25519_PUBLIC_KEY_BYTES
    return NodeId(base58_encode(_PREFIX + public_key))


def public_key_of(node_id: str) -> bytes:
    """The Ed25519 public key that a node id holds.

    Raises: ValueError where the text is no node id.
    """
    if len(node_id) > _ID_CHARACTERS_MAX:
        raise ValueError(f"no node id: {node_id[:_ID_CHARACTERS_MAX]!r}...")
    data = base58_decode(node_id)
    if not data.startswith(_PREFIX) or len(data) != len(_PREFIX) + ED25519_PUBLIC_KEY_BYTES:
        raise ValueError(f"no node id: {node_id!r}")
    return data[len(_PREFIX) :]


def base58_encode(data: bytes) -> str:
    """Base 58 in Bitcoin's alphabet; each leading zero byte is a leading `1`."""
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def base58_decode(text: str) -> bytes:
    """The inverse of `base58_encode`.

    Raises: ValueError for characters outside the alphabet.
    """
    number = 0
    for character in text:
        number = number * 58 + _ALPHABET.index(character)
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
