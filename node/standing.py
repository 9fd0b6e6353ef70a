"""How a model stands in the cluster, for a request that asks for it by name."""

from msgspec import Struct


class Serving(Struct, frozen=True):
    """Some instance of it is ready."""


class Coming(Struct, frozen=True):
    """It is on its way; `reason` is a sentence for whoever has waited long enough."""

    reason: str
    since: float  # on trio's clock
    done: int = 0  # of `total` bytes; 0: not known
    total: int = 0


class Lost(Struct, frozen=True):
    """It can't be had; `reason` is a sentence."""

    reason: str


class Standing(Struct, frozen=True):
    """A model's state, and the hashes that its name stands for, the one that is meant first."""

    state: Serving | Coming | Lost
    hashes: tuple[str, ...] = ()
