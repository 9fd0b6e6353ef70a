"""How long a suspicion lasts, by how many independent accusers it has (Lifeguard, arXiv 1707.00788, section IV-B)."""

from math import log

from msgspec import Struct

from p2p.lattice import Standing


class Suspicion(Struct, weakref=False):
    """One running suspicion of a member at one incarnation."""

    standing: Standing
    started: float
    low: float  # seconds, with `wanted` confirmations
    high: float  # seconds, with none
    wanted: int
    accusers: dict[bytes, bool]  # who, and whether it was refused a new stream after its old one broke

    @property
    def deadline(self) -> float:
        """When the member is declared dead if nothing is heard."""
        return self.started + timeout(len(self.accusers) - 1, self.wanted, self.low, self.high)

    @property
    def attesters(self) -> int:
        """How many found the member's process gone."""
        return sum(self.accusers.values())


def timeout(confirmed: int, wanted: int, low: float, high: float) -> float:
    """Seconds from the first accusation to the verdict, falling from high to low with the log of the confirmations."""
    if wanted <= 0 or confirmed >= wanted:
        return low
    return high - (high - low) * log(max(confirmed, 0) + 1) / log(wanted + 1)
