"""The orders in which replicated facts grow, and their joins.

A join is idempotent, commutative and associative, and its result is never below either side: whatever is lost, doubled or
reordered on the way, replicas that have seen the same facts are equal, and none ever goes back.

Everything here is built of three pieces:

- a chain (a total order) joined by max: `Generation`, `Standing`, an attempt number, a terminal status;
- maps joined key by key (`join_maps`);
- a chain above a family of lattices (`join_under`): the larger head wins with all that it carries, equal heads join theirs.

Pure: no clock, no randomness, no IO.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeVar

from msgspec import Meta

COUNTER_MAX = 1 << 53
NONCE_MAX = (1 << 63) - 1
INCARNATION_MAX = (1 << 32) - 1

K = TypeVar("K")
V = TypeVar("V")


class Generation(NamedTuple):
    """One life of a node's namespace.

    The counter only has to grow, and what it was taken from (a wall clock, a file) decides nothing: a node that finds a higher
    one of its own out there outbids it. The nonce tells boots apart and is kept when the counter is raised, so whatever refers
    to a boot refers to the nonce.
    """

    counter: Annotated[int, Meta(ge=0, le=COUNTER_MAX)]
    nonce: Annotated[int, Meta(ge=0, le=NONCE_MAX)]


class Liveness(IntEnum):
    """What is said of a member; among equal incarnations the worse news wins."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class Standing(NamedTuple):
    """A member's place in the membership lattice; the join is `max`.

    Only the member itself raises its incarnation, which is how it refutes. That leaves its generation, and so its records, as
    they are: were refuting done by a new generation, replayed claims would reset healthy namespaces.
    """

    generation: Generation
    incarnation: Annotated[int, Meta(ge=0, le=INCARNATION_MAX)]
    liveness: Liveness


class Grave(NamedTuple):
    """What is kept of a forgotten member: only a standing above it may return.

    It holds the incarnation too: a member that was buried by mistake comes back by raising it, with no new generation.
    """

    generation: Generation
    incarnation: int


H = TypeVar("H", int, Generation)  # a chain's values

ALIVE = Liveness.ALIVE
SUSPECT = Liveness.SUSPECT
DEAD = Liveness.DEAD
LEFT = Liveness.LEFT


def join_standings(ours: Standing, theirs: Standing) -> Standing:
    """The higher of two standings of one member."""
    return max(ours, theirs)


def rises_from(grave: Grave, standing: Standing) -> bool:
    """Whether the standing is news that the grave doesn't cover."""
    return (standing.generation, standing.incarnation) > grave


def join_maps(ours: Mapping[K, V], theirs: Mapping[K, V], join: Callable[[V, V], V]) -> dict[K, V]:
    """Union of two maps; values under a key that both have are joined."""
    joined = dict(ours)
    for key, value in theirs.items():
        joined[key] = join(joined[key], value) if key in joined else value
    return joined


def join_under(ours: tuple[H, V], theirs: tuple[H, V], join: Callable[[V, V], V]) -> tuple[H, V]:
    """Join of two (head, value) pairs: a larger head wins with its value, the values under equal heads are joined."""
    if ours[0] < theirs[0]:
        return theirs
    if theirs[0] < ours[0]:
        return ours
    return ours[0], join(ours[1], theirs[1])
