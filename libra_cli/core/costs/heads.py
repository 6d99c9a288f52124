"""Attention heads, and what becomes of them where ranks share a forward pass (Ulysses).

Each of n ranks attends with an n-th of the query heads. Heads of keys and values that are no
multiple of n are repeated r = n / gcd(n, heads of keys) times, as ``node.model.context_parallel``
does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one layer; ``query`` and ``key`` are units of all heads together."""

    query: int
    key: int
    """Units of all key heads together, and as many of values."""
    width: int
    """Units of one head."""

    def divides(self, ranks: int) -> bool:
        """Whether so many ranks can share a forward pass."""
        return round(self.query / self.width) % ranks == 0

    def repeated(self, ranks: int) -> int:
        """Units of keys and values that so many ranks have of a token beside its own."""
        heads = max(1, round(self.key / self.width))
        return 2 * self.key * (ranks // gcd(ranks, heads) - 1)

    def exchanged(self, ranks: int) -> int:
        """Units of a token that the attention of a layer gives to other ranks and takes back,
        forward: queries, keys, values and results, but for what stays."""
        given = 2 * self.query + 2 * self.key + self.repeated(ranks)
        return given * (ranks - 1) // ranks
