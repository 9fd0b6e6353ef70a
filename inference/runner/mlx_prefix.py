"""The prefix cache: KV of earlier prompts and answers, for requests that begin alike.

Knows nothing of MLX: a KV is a list of parts that can be copied and, for most models, cut to a shorter prefix. Bounded in
bytes; what was used least recently goes first.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PREFIX_TOKENS_MIN = 16  # a shorter one costs more to keep and to find than to compute


class KvPart(Protocol):
    """One layer's cache, as mlx-lm has it."""

    @property
    def nbytes(self) -> int:
        """What it holds."""

    def is_trimmable(self) -> bool:
        """Whether it can be cut."""

    def trim(self, n: int, /) -> int:
        """Cut so many tokens off its end."""


Kv = list[Any]  # KvParts: mlx-lm's classes are untyped
Ids = NDArray[np.int64]


class _Entry:
    def __init__(self, tokens: Ids, kv: Kv) -> None:
        self.tokens = tokens
        self.kv = kv
        self.bytes = sum(part.nbytes for part in kv)
        self.trimmable = all(part.is_trimmable() for part in kv)

    def usable(self, tokens: Ids, most: int) -> int:
        """How many tokens of a prompt's start this entry can stand for, `most` at most."""
        shared = _common_prefix(self.tokens, tokens)
        if self.trimmable:
            return min(shared, most)
        return shared if shared == len(self.tokens) <= most else 0


class PrefixCache:
    """KV by the tokens that it stands for."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # least recently used first

    @property
    def bytes(self) -> int:
        """What the entries hold."""
        return sum(entry.bytes for entry in self._entries)

    def fetch(self, tokens: Sequence[int]) -> tuple[Kv | None, int]:
        """A KV of the longest known prefix and its length; at least one token is left to evaluate.

        The KV is the caller's own: what it does to it changes no entry.
        """
        wanted = np.asarray(tokens, dtype=np.int64)
        usable = [entry.usable(wanted, len(tokens) - 1) for entry in self._entries]
        if not usable or max(usable) < PREFIX_TOKENS_MIN:
            return None, 0
        length = max(usable)
        entry = self._entries.pop(usable.index(length))
        self._entries.append(entry)
        kv = copy.deepcopy(entry.kv)  # arrays are values in MLX: their copies share memory until one is written to
        surplus = len(entry.tokens) - length
        if surplus:
            for part in kv:
                part.trim(surplus)
        return kv, length

    def store(self, tokens: Sequence[int], kv: Kv, bytes_max: int, evaluate: Callable[[Kv], None]) -> None:
        """Keep a KV that stands for exactly these tokens, with what else is kept within `bytes_max`; it is the cache's own
        from now on. `evaluate` is called once room is made for it, and not at all where there is none.
        """
        size = sum(part.nbytes for part in kv)
        if len(tokens) < PREFIX_TOKENS_MIN or size > bytes_max:
            return
        entry = _Entry(np.asarray(tokens, dtype=np.int64), kv)
        self.trim(bytes_max - size)
        evaluate(kv)
        self._entries = [other for other in self._entries if not _replaces(entry, other)]
        self._entries.append(entry)

    def trim(self, bytes_max: int) -> None:
        """Let go of the least recently used until that many bytes are left."""
        held = self.bytes
        while self._entries and held > bytes_max:
            held -= self._entries.pop(0).bytes


def _replaces(new: _Entry, old: _Entry) -> bool:
    """Whether all that the old entry can do the new one can: it goes on from it and can be cut, or is the same."""
    shared = _common_prefix(new.tokens, old.tokens)
    return shared == len(old.tokens) and (new.trimmable or len(new.tokens) == shared)


def _common_prefix(one: Ids, other: Ids) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
