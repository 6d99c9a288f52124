"""Student's distribution, of means of few values whose spread is measured from them alone."""

from __future__ import annotations

import math
from functools import cache


@cache
def student_t(freedom: int) -> float:
    """Return the distance from 0 within which 95 % of Student's distribution lie."""
    low, high = 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:
        if _share_within(angle, freedom) < 0.95:
            low = angle
        else:
            high = angle
    return math.tan(high) * math.sqrt(freedom)


def _share_within(angle: float, freedom: int) -> float:
    """The share of Student's distribution between +-t, with ``tan(angle) = t / sqrt(freedom)``.

    A finite series: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for n in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * n / (n + 1)
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total
