"""Non-negative least squares by the active-set method of Lawson and Hanson.

*Solving Least Squares Problems* (1974), chapter 23: columns enter the solution one at a time, the
one along which the error falls fastest first; one whose coefficient would turn negative leaves it.

Guarantee: the solution has no negative coefficient and, to rounding, the least error of all such.
Limit: of columns that are multiples of one another one is taken.
"""

from __future__ import annotations

from typing import Any

ROUNDS = 30
"""Times that each column may enter on average; chosen. Only rounding errors bring a set back."""


def non_negative_least_squares(matrix: Any, right: Any) -> tuple[float, ...]:
    """The ``x >= 0`` with the least ``|matrix x - right|``; any two- and one-dimensional arrays."""
    # Here, not above: most commands fit nothing.
    import numpy as np

    a, b = np.asarray(matrix, dtype=float), np.asarray(right, dtype=float)
    size = a.shape[1]
    tolerance = 10 * max(a.shape) * np.finfo(float).eps * np.abs(a).sum(axis=0).max(initial=0.0)
    x = np.zeros(size)
    inside, refused = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    for _ in range(ROUNDS * size):
        descent = np.where(inside | refused, 0.0, a.T @ (b - a @ x))
        entering = int(descent.argmax())
        if descent[entering] <= tolerance:
            break
        inside[entering] = True
        x, inside = _least_error(a, b, x, inside)
        # One that leaves at once had its descent from rounding, and would enter for ever.
        refused = refused & ~inside[entering]
        refused[entering] = not inside[entering]
    return tuple(map(float, x))


def _least_error(a: Any, b: Any, x: Any, inside: Any) -> tuple[Any, Any]:
    """Go from ``x`` to the least error over the columns ``inside``; return where that ends, and the
    columns left: each that would be negative leaves on the way, at 0.
    """
    import numpy as np

    while inside.any():
        target = np.zeros_like(x)
        target[inside] = np.linalg.lstsq(a[:, inside], b, rcond=None)[0]
        falling = inside & (target <= 0.0)
        if not falling.any():
            return target, inside
        share = np.where(falling, 0.0, np.inf)
        np.divide(x, x - target, out=share, where=falling & (x > 0.0))
        leaving = share <= share.min()
        x = np.where(leaving, 0.0, x + share.min() * (target - x))
        inside = inside & ~leaving
    return x, inside
