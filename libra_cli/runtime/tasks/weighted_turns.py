"""Which of several environments a group plays: always the same for a number and its weights.

Groups are dealt as smooth weighted round robin deals requests: each environment gains its weight a
turn, the one that has most plays and pays the sum of all. So after any number of groups each has
had its share to within one group, in every step as well as in the long run, and a group that is
played again, in this run or by one that goes on, plays what it did. An environment numbers its own
groups without gaps, so that it goes through its tasks in order.
"""

from __future__ import annotations

from collections.abc import Sequence


class Mixture:
    """Deals groups to environments by their weights; it remembers how it has dealt those so far."""

    def __init__(self, weights: Sequence[float]) -> None:
        """``weights`` are positive; only their ratios matter."""
        self._weights = tuple(weights)
        self._credit = [0.0] * len(weights)
        self._played = [0] * len(weights)
        self._dealt: list[tuple[int, int]] = []

    def of(self, group: int) -> tuple[int, int]:
        """Return a group's environment, and how many groups have played that one before it."""
        if len(self._weights) == 1:
            return 0, group
        while len(self._dealt) <= group:
            self._dealt.append(self._deal())
        return self._dealt[group]

    def _deal(self) -> tuple[int, int]:
        credit = self._credit = [a + b for a, b in zip(self._credit, self._weights, strict=True)]
        chosen = credit.index(max(credit))
        credit[chosen] -= sum(self._weights)
        index = self._played[chosen]
        self._played[chosen] += 1
        return chosen, index
