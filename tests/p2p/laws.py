"""The laws of a join, checked over all that is given."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeVar

T = TypeVar("T")


def check_all(states: Sequence[T], join: Callable[[T, T], T]) -> int:
    """All four laws over all triples of states; the number of triples."""
    numbers: dict[T, int] = {state: number for number, state in enumerate(dict.fromkeys(states))}
    distinct = list(numbers)
    table = [[numbers[join(one, other)] for other in distinct] for one in distinct]  # KeyError: a join leaves the domain
    size = range(len(distinct))
    for a in size:
        assert table[a][a] == a, f"not idempotent: {distinct[a]}"
        for b in size:
            ab = table[a][b]
            assert ab == table[b][a], f"not commutative: {distinct[a]}, {distinct[b]}"
            assert table[a][ab] == ab, f"not inflating: {distinct[a]}, {distinct[b]}"
            row = table[ab]
            assert all(row[c] == table[a][table[b][c]] for c in size), f"not associative: {distinct[a]}, {distinct[b]}"
    return len(distinct) ** 3


def check_triple(a: T, b: T, c: T, join: Callable[[T, T], T]) -> None:
    """All four laws for three states."""
    assert join(a, a) == a
    assert join(a, b) == join(b, a)
    assert join(a, join(a, b)) == join(a, b)
    assert join(join(a, b), c) == join(a, join(b, c))


__all__ = ["check_all", "check_triple", "product"]
