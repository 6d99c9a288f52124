"""Prices from measured times: least squares, with no price below 0.

    seconds of an observation = sum over the columns of (price x amount)

Errors are relative: an observation counts by how many percent it is off, so that a step of a
millisecond and one of a minute weigh alike. What is below 0 in the plain solution is worth nothing,
and which prices that leaves is found by trying every set of columns: exact, and quick for the
handful of columns a law has.

Guarantee: the best non-negative prices there are, to rounding; the same for any order of the
observations. Limit: columns that always rise together cannot be told apart; the smaller set that
explains as much is taken, and the rest is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from libra_cli.config.errors import LibraError
from libra_cli.core.types import Seconds

SPARE = 2
"""Observations a fit must have beyond its columns."""
SINGULAR = 1e-10
"""Of a column's own size: what is left of it below this is made of the columns before it."""
GAIN = 1e-9
"""Of the squared error: a column that explains less than this more is left out."""


class FittingError(LibraError):
    """The measurements do not say what was asked of them."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One measurement: the amounts of what was done, and the seconds it took."""

    amounts: tuple[float, ...]
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Fit:
    """Prices in the order of the columns, and how far they are off where they were measured.

    Errors are relative: ``mean_error`` is the mean of their sizes, ``worst_error`` the largest.
    """

    prices: tuple[float, ...]
    observations: int
    mean_error: float
    worst_error: float

    def told(self) -> str:
        """For people."""
        return (
            f"{self.observations} measurements, {self.mean_error:.1%} off on average, "
            f"{self.worst_error:.1%} at worst"
        )


def fit(what: str, columns: Sequence[str], observed: Sequence[Observed]) -> Fit:
    """The prices of ``columns`` that explain the observations best.

    Raises:
        FittingError: too few observations, all alike, or a time that is none; says of ``what``.
    """
    needed = len(columns) + SPARE
    if len(observed) < needed:
        raise FittingError(
            f"{what}: {len(observed)} measurements are too few for {len(columns)} prices "
            f"({', '.join(columns)}); {needed} are needed",
            hint="measure more sizes: a larger max_num_seqs or max_len leaves room for them",
        )
    if any(not 0 < point.seconds < float("inf") for point in observed):
        raise FittingError(f"{what}: a measurement took no time, or for ever; measure again")
    rows = [[amount / point.seconds for amount in point.amounts] for point in observed]
    prices = _best(rows, len(columns))
    if not any(prices):
        raise FittingError(f"{what}: the times measured do not depend on what was done")
    errors = [abs(sum(p * a for p, a in zip(prices, row, strict=True)) - 1.0) for row in rows]
    return Fit(prices, len(observed), sum(errors) / len(errors), max(errors))


def _best(rows: Sequence[Sequence[float]], width: int) -> tuple[float, ...]:
    """The non-negative solution of ``rows x prices = 1`` with the least squared error."""
    scales = [max(abs(row[column]) for row in rows) for column in range(width)]
    used = [column for column in range(width) if scales[column] > 0]
    squares = {
        (i, j): sum(row[i] * row[j] for row in rows) / (scales[i] * scales[j])
        for i in used
        for j in used
    }
    ones = {i: sum(row[i] for row in rows) / scales[i] for i in used}
    # With x the solution of the normal equations, the squared error is len(rows) - x . ones.
    best, explained = dict.fromkeys(used, 0.0), 0.0
    for columns in _subsets(used):
        matrix = [[squares[i, j] for j in columns] for i in columns]
        found = solve(matrix, [ones[i] for i in columns])
        if found is None or min(found) < 0:
            continue
        here = sum(x * ones[i] for i, x in zip(columns, found, strict=True))
        if here > explained + GAIN * len(rows):
            best, explained = dict(zip(columns, found, strict=True)), here
    return tuple(best.get(i, 0.0) / scales[i] if scales[i] else 0.0 for i in range(width))


def _subsets(columns: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every set of them but the empty one, small ones first."""
    for size in range(1, len(columns) + 1):
        yield from combinations(columns, size)


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Of a small symmetric positive definite system, by elimination; None if it is singular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        if rows[pivot][pivot] <= SINGULAR * abs(matrix[pivot][pivot]):
            return None
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[below][column] -= factor * rows[pivot][column]
    found = [0.0] * size
    for row in range(size - 1, -1, -1):
        known = sum(rows[row][column] * found[column] for column in range(row + 1, size))
        found[row] = (rows[row][size] - known) / rows[row][row]
    return found
