"""Prices that a run corrects by what it sees: least squares that forgets, held to a prior.

A law is ``seconds = sum(price x amount)``; here ``step = a + b x running + c x KV tokens``. Prices
are learned as factors on a prior, from relative errors, so that microseconds a token and
milliseconds a step weigh alike. With f the share of each price in what the prior predicts, y the
seconds over that prediction, and weights w that fade by ``1 - 1 / MEMORY`` an observation::

    (sum w f f' + TRUST I) z = sum w f y + TRUST s,    log s = sum w log y / (sum w + 1)

So a prior that is wrong by one factor everywhere (s, the level) costs nothing, and what the
observations cannot tell apart (a server always as full as now) keeps the proportions of the prior.
The sums are all that is kept. The prices are, with L the Cholesky factor of the matrix above, the
z >= 0 with the least |L' z - L^-1 (right side)|.

What is beyond ``OUTLIER`` times the level, either way, counts as that much. Readings of a server
come at equal times, so one with longer steps stands for fewer of them and weighs that much less
(w = level / y): a stall is not a thousand slow steps. Beyond ``CREDIBLE`` times the prior's
prediction one says nothing: its square would be more than a float holds.

Guarantee: constant memory and time an observation; prices are never negative, and 0 where the prior
is 0; with no observation the prior. Limit: it learns what a step takes in use, the prefill of
others and the way to the server included, and a machine that changes within ``MEMORY``
observations is followed late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log

from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.nnls import non_negative_least_squares
from libra_cli.core.types import Bucket, Seconds

MEMORY = 500.0
"""Observations until one has faded to 1/e; chosen, not measured."""
TRUST = 0.1
"""Weight of the prior's proportions, in observations; chosen, not measured."""
OUTLIER = 8.0
"""Times the level, beyond which an observation counts as that much; chosen, not measured."""
CREDIBLE = 1e9
"""Times the prior's prediction, either way, beyond which a reading says nothing; chosen."""
SETTLED = 8
"""Observations before one can be an outlier; chosen, not measured."""


class ForgettingLeastSquares:
    """Non-negative prices of a linear law, in seconds a unit, learned from (amounts, seconds)."""

    def __init__(
        self, prior: Sequence[float], *, memory: float = MEMORY, trust: float = TRUST
    ) -> None:
        self._prior = tuple(prior)
        self._trust = trust
        self._keep = 1.0 - 1.0 / memory
        size = range(len(self._prior))
        self._squares = [[0.0 for _ in size] for _ in size]
        self._products = [0.0 for _ in size]
        self._weight = 0.0
        self._logs = 0.0
        self.seen = 0

    @property
    def level(self) -> float:
        """Seconds over what the prior predicts, a geometric mean; 1 before the first."""
        return exp(self._logs / (self._weight + 1.0))

    def observe(self, amounts: Sequence[float], seconds: Seconds, *, by_time: bool = False) -> None:
        """Take one in; amounts that the prior gives no price for, no time, or one beyond belief,
        say nothing.

        ``by_time``: it stands for as much time as the others do, so for the fewer the longer it
        took.
        """
        parts = [price * amount for price, amount in zip(self._prior, amounts, strict=True)]
        predicted = sum(parts)
        if not 0 < predicted < float("inf"):
            return
        ratio = seconds / predicted
        if not 1 / CREDIBLE <= ratio <= CREDIBLE:  # also if it is not a number
            return
        shares = [part / predicted for part in parts]
        if self.seen >= SETTLED:
            ratio = min(max(ratio, self.level / OUTLIER), self.level * OUTLIER)
        weight = min(max(self.level / ratio, 1 / OUTLIER), OUTLIER) if by_time else 1.0
        self._add(shares, ratio, weight)

    def _add(self, shares: Sequence[float], ratio: float, weight: float) -> None:
        self.seen += 1
        for row, share in zip(self._squares, shares, strict=True):
            for column, other in enumerate(shares):
                row[column] = row[column] * self._keep + weight * share * other
        self._products = [
            old * self._keep + weight * share * ratio
            for old, share in zip(self._products, shares, strict=True)
        ]
        self._weight = self._weight * self._keep + weight
        self._logs = self._logs * self._keep + weight * log(ratio)

    def prices(self) -> tuple[float, ...]:
        """The prices that explain what was observed best, in seconds a unit, none below 0."""
        factors = self._factors()
        return tuple(price * factor for price, factor in zip(self._prior, factors, strict=True))

    def _factors(self) -> tuple[float, ...]:
        # Here, not above: most commands learn nothing.
        import numpy as np

        size = len(self._prior)
        lower = np.linalg.cholesky(np.array(self._squares) + self._trust * np.eye(size))
        right = np.array(self._products) + self._trust * self.level
        return non_negative_least_squares(lower.T, np.linalg.solve(lower, right))


class OnlineServerCost:
    """The decode prices of one server shape, learned from observed steps.

    Prices of prefill keep their proportion to those of decoding.
    """

    def __init__(self, prior: ServerLaw) -> None:
        self._prior = prior
        self._line = ForgettingLeastSquares(prior.decode_prices)

    @property
    def seen(self) -> int:
        """The number of observations so far."""
        return self._line.seen

    def observe(self, running: float, kv_tokens: float, step_s: Seconds) -> None:
        """Take in a step of ``step_s`` that decoded ``running`` sequences with ``kv_tokens``."""
        self._line.observe(self._prior.decode_amounts(running, kv_tokens), step_s, by_time=True)

    def cost(self) -> ServerLaw:
        """The prior with the prices learned so far."""
        return self.applied_to(self._prior)

    def applied_to(self, cost: ServerLaw) -> ServerLaw:
        """``cost`` with the prices learned so far; it has the same shape and another KV cache."""
        if not self._line.seen:
            return cost
        learned = self._prior.repriced(self._line.prices(), self._line.level)
        return learned.with_kv_tokens(cost.kv_tokens)


class LearnedCosts:
    """The prices of each server shape of a run, learned so far. ``cost_of`` gives the priors."""

    def __init__(self, cost_of: Callable[[Bucket], ServerLaw]) -> None:
        self._cost_of = cost_of
        self._refiners: dict[int, OnlineServerCost] = {}

    def of(self, bucket: Bucket) -> ServerLaw:
        """Return the prices of one server of this bucket, as learned so far."""
        refiner = self._refiners.get(bucket.tensor_parallel)
        cost = self._cost_of(bucket)
        return refiner.applied_to(cost) if refiner is not None else cost

    def observe(self, bucket: Bucket, *, running: float, kv_tokens: float, step_s: Seconds) -> None:
        """Take in that a server of the bucket took ``step_s`` a token at that load."""
        degree = bucket.tensor_parallel
        if degree not in self._refiners:
            self._refiners[degree] = OnlineServerCost(self._cost_of(bucket))
        self._refiners[degree].observe(running, kv_tokens, step_s)
