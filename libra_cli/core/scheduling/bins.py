"""The bins that counts of tokens are told in: two to a doubling, the same everywhere."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS: tuple[float, ...] = tuple(float(round(8 * 2 ** (i / 2))) for i in range(32))
"""Upper edges of the bins, in tokens: (0, 8], (8, 11], ... What is above is in the last."""
BINS = len(BOUNDS)


def bin_of(tokens: float) -> int:
    """The index of the bin that a count of tokens falls in."""
    place = bisect_left(BOUNDS, tokens)
    return place if place < BINS else BINS - 1
