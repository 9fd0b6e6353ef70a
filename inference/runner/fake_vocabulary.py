"""The fake engine's tokens: chosen so that whatever can go wrong between ids and text does.

Ids 0 to 255 are the single bytes: text is encoded with them, so every text makes the round trip. Then come the special tokens,
then the pieces that are generated: words, parts of likely stop strings ("stop", "END", "abc", blank lines), characters of two
to four bytes, and the same characters split over two to four tokens. A split character's parts follow one another in any
answer (`FOLLOWING`), so that only an end in the middle leaves an incomplete one.

Pure.
"""

from collections.abc import Sequence

STOP, SYSTEM, USER, ASSISTANT, TOOL, PAUSE = range(256, 262)
SPECIAL = range(STOP, PAUSE + 1)  # decoded to nothing
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}

_WORDS = (
    " the", " node", " peer", " fish", " swims", " and", " in", " a", " shoal", "s", "st", "op", " st", "ops", "to", "p",
    "E", "N", "D", "EN", "ND", " END", "a", "b", "c", "ab", "bc", "abc", "\n", "\n\n", "\n#", " ", "  ", ".", ",", "!",
    "1", "42", "é", "ß", "日", "本", "語", "😀", "𝄞", "é\n", " 日a",
)  # fmt: skip
_SPLIT = (
    ("é", 1), ("ñ", 1), ("日", 1), ("本", 2), ("語", 1, 1), ("😀", 2), ("𝄞", 1, 1, 1), ("🐟", 3), (" ü", 2), ("€s", 2),
    ("a🐟b", 3, 1),
)  # fmt: skip


def _parts(text: str, sizes: Sequence[int]) -> list[bytes]:
    data, parts, start = text.encode(), [], 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return [*parts, data[start:]]


def _build() -> tuple[list[bytes], list[int], dict[int, int]]:
    pieces = [bytes([value]) for value in range(256)] + [b""] * len(SPECIAL)
    first = [PAUSE]
    following: dict[int, int] = {}
    for word in _WORDS:
        first.append(len(pieces))
        pieces.append(word.encode())
    for text, *sizes in _SPLIT:
        first.append(len(pieces))
        parts = _parts(text, sizes)
        for offset in range(len(parts) - 1):
            following[len(pieces) + offset] = len(pieces) + offset + 1
        pieces.extend(parts)
    return pieces, first, following


PIECES, FIRST, FOLLOWING = _build()
"""Bytes of each id; ids that may follow any finished character; the one id that must follow a part of one."""

SIZE = len(PIECES)
TOKEN_CHARACTERS_MAX = max(map(len, PIECES))


def encode(text: str) -> tuple[int, ...]:
    """One id a byte of UTF-8; an unpaired surrogate, which JSON can carry, becomes "?"."""
    return tuple(text.encode("utf-8", "replace"))


def decode(token_ids: Sequence[int]) -> str:
    """The text of ids below SIZE, U+FFFD for bytes that make no character."""
    return b"".join([PIECES[token_id] for token_id in token_ids]).decode("utf-8", "replace")
