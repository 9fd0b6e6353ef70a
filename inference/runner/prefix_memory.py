"""What the fake engine remembers of evaluated ids, counted in bytes as a real prefix cache would be."""

import bisect
from collections.abc import Sequence

ENTRIES_MAX = 32


class PrefixMemory:
    """Evaluated id sequences, least recently used first, at most `bytes_max` of pretended KV."""

    def __init__(self, bytes_per_token: int, tokens_step: int, bytes_max: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._tokens_step = tokens_step
        self._bytes_max = bytes_max
        self._entries: list[tuple[int, ...]] = []
        self.bytes = 0

    def size(self, tokens: int) -> int:
        """Bytes that so many tokens take, in whole steps."""
        return -(-tokens // self._tokens_step) * self._tokens_step * self._bytes_per_token

    def longest(self, ids: tuple[int, ...]) -> int:
        """How many of the first ids are remembered; at least one always remains to be evaluated."""
        best, found = 0, None
        for entry in self._entries:
            length = _shared(entry, ids)
            if length > best:
                best, found = length, entry
        if found is not None:
            self._entries.remove(found)
            self._entries.append(found)
        return min(best, len(ids) - 1)

    def add(self, ids: tuple[int, ...]) -> None:
        """Remember ids; entries that are a beginning of them go."""
        if not ids:
            return
        for entry in [entry for entry in self._entries if entry == ids[: len(entry)]]:
            self._forget(entry)
        self._entries.append(ids)
        self.bytes += self.size(len(ids))
        while len(self._entries) > ENTRIES_MAX:
            self._forget(self._entries[0])
        self.trim(self._bytes_max)

    def trim(self, bytes_max: int) -> None:
        """Forget the least recently used until no more than that is held."""
        while self.bytes > bytes_max:
            self._forget(self._entries[0])

    def _forget(self, entry: tuple[int, ...]) -> None:
        self._entries.remove(entry)
        self.bytes -= self.size(len(entry))


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning: by halves, each compared in one go."""
    longest = min(len(one), len(other))
    return bisect.bisect_left(range(1, longest + 1), x=True, key=lambda length: one[:length] != other[:length])
