"""Prices from measured times: least squares in which no price is below 0.

    seconds of an observation = sum over the columns of (price x amount)

Errors are relative: an observation counts by how many percent it is off, so that a step of a
millisecond and one of a minute weigh alike.

Guarantee: the best non-negative prices there are, to rounding. Limit: columns that always rise
together cannot be told apart; one of the equally good solutions is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra_cli.config.errors import LibraError
from libra_cli.core.costs.nnls import non_negative_least_squares
from libra_cli.core.types import Seconds

SPARE = 2
"""Observations a fit must have beyond its columns; chosen, not measured."""


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

    def summary(self) -> str:
        """The number of measurements and the errors, for people."""
        return (
            f"{self.observations} measurements, {self.mean_error:.1%} off on average, "
            f"{self.worst_error:.1%} at worst"
        )


def fit(what: str, columns: Sequence[str], observed: Sequence[Observed]) -> Fit:
    """The prices of ``columns``, in seconds a unit, that explain the observations best.

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
    # Columns differ by factors of a million, and the solver's tolerance is absolute.
    scales = [max(map(abs, column)) or 1.0 for column in zip(*rows, strict=True)]
    scaled = [[x / scale for x, scale in zip(row, scales, strict=True)] for row in rows]
    found = non_negative_least_squares(scaled, [1.0] * len(rows))
    prices = tuple(x / scale for x, scale in zip(found, scales, strict=True))
    if not any(prices):
        raise FittingError(f"{what}: the times measured do not depend on what was done")
    errors = [abs(sum(p * a for p, a in zip(prices, row, strict=True)) - 1.0) for row in rows]
    return Fit(prices, len(observed), sum(errors) / len(errors), max(errors))
