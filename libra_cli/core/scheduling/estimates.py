"""How many tokens a trajectory has yet to generate: a distribution, and who gives one.

An ``Estimate`` is a histogram over the bins of ``bins.BOUNDS``. An ``Estimator`` sees the past
only: it is told when a trajectory begins, what its tools return and when it ends, and answers with
what may be left. libra's own is in ``causal_estimator``, others are in ``baseline_estimators``.
``choose_bucket`` turns a distribution into the bucket to be in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Protocol

from libra_cli.core.scheduling.bins import BINS, BOUNDS, bin_of
from libra_cli.core.types import Tokens, ToolReturn, TrajectoryId

LOWER: tuple[float, ...] = (0.0, *BOUNDS[:-1])
"""Lower edges of the bins, in tokens."""
MIDDLES: tuple[float, ...] = tuple((low + up) / 2 for low, up in zip(LOWER, BOUNDS, strict=True))
"""What a trajectory of a bin counts for, in tokens."""
MARGIN = 1.2
"""How much likelier, against its prior share, the better bucket must be than the present one."""
ODDS = 0.4
"""The least odds of a move bringing a trajectory nearer to its true bucket, not further from it."""
RARE = 0.02
"""A bucket rarer than this counts as this rare."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A distribution of the tokens yet to be generated (tool tokens not counted).

    ``weights`` holds a probability for every bin of ``BOUNDS`` and sums to 1; inside a bin it is
    spread evenly. ``certain`` is set where the count is known for sure (the clairvoyant's).
    """

    weights: tuple[float, ...]
    mean: float
    certain: float | None = None

    @classmethod
    def of(cls, weights: Sequence[float]) -> Estimate:
        """From the weights alone; they need not sum to 1."""
        scale = 1 / sum(weights)
        shares = tuple([weight * scale for weight in weights])
        return cls(shares, sum(map(mul, shares, MIDDLES)))

    @classmethod
    def point(cls, tokens: float) -> Estimate:
        """The estimate of one who knows."""
        place = bin_of(tokens)
        weights = (0.0,) * place + (1.0,) + (0.0,) * (BINS - place - 1)
        return cls(weights, float(tokens), float(tokens))

    def share_below(self, tokens: float) -> float:
        """The probability that at most ``tokens`` are yet to come."""
        if self.certain is not None:
            return 1.0 if self.certain <= tokens else 0.0
        if tokens >= BOUNDS[-1]:
            return 1.0
        place = bin_of(tokens)
        part = max(0.0, tokens - LOWER[place]) / (BOUNDS[place] - LOWER[place])
        return min(1.0, sum(self.weights[:place]) + self.weights[place] * part)

    def quantile(self, q: float) -> float:
        """The count of tokens that is exceeded with probability 1 - ``q``."""
        return self.quantiles((q,))[0]

    def quantiles(self, qs: Sequence[float]) -> tuple[float, ...]:
        """``quantile`` of each, for the cost of one."""
        if self.certain is not None:
            return (self.certain,) * len(qs)
        below = [0.0, *accumulate(self.weights)]
        return tuple([_quantile(below, q) for q in qs])

    def shares(self, bounds: Sequence[float]) -> tuple[float, ...]:
        """The probability of each bucket: up to bounds[0], from there to bounds[1], ..., above."""
        below = [0.0, *(self.share_below(bound) for bound in bounds), 1.0]
        return tuple(up - low for low, up in pairwise(below))


def _quantile(below: Sequence[float], q: float) -> float:
    """Where the share ``q`` is reached, if ``below[i]`` is what lies below bin i."""
    place = bisect_left(below, q, lo=1) - 1
    if place == BINS:
        return BOUNDS[-1]
    weight = below[place + 1] - below[place]
    part = (q - below[place]) / weight if weight > 0.0 else 0.0
    return LOWER[place] + part * (BOUNDS[place] - LOWER[place])


class Estimator(Protocol):
    """What a placement asks. It sees the past only, and learns from what has finished."""

    def begin(self, trajectory: TrajectoryId, *, prompt: Tokens) -> Estimate:
        """A trajectory starts; its prompt has so many tokens."""
        ...

    def returned(
        self,
        trajectory: TrajectoryId,
        *,
        generated: Tokens,
        context: Tokens,
        returns: Sequence[ToolReturn],
    ) -> Estimate:
        """A turn is over and another follows; ``generated`` and ``context`` are totals so far."""
        ...

    def finished(self, trajectory: TrajectoryId, *, generated: Tokens) -> None:
        """It came to its own end after ``generated`` tokens."""
        ...

    def withdrawn(self, trajectory: TrajectoryId) -> None:
        """It was given up, played again or cut: how long it would have been is not known."""
        ...


def bucket_of(tokens: float, bounds: Sequence[float]) -> int:
    """The bucket a remainder belongs to. ``bounds``: upper edges of all but the last, ascending."""
    return sum(tokens > bound for bound in bounds)


def choose_bucket(
    estimate: Estimate, prior: Estimate, bounds: Sequence[float], current: int
) -> int:
    """The bucket to be in now; ``current`` unless another is clearly better.

    A bucket's score is its probability over its share of all returns (``prior``): the bucket of
    the greatest score is the one that maximises the mean recall over the buckets, where the most
    probable bucket would nearly always be the short one. A move needs ``MARGIN`` times the present
    score, and odds of at least ``ODDS`` that it ends nearer to the true bucket rather than further
    away: a rare bucket's score alone would make most moves into it wrong ones.
    """
    shares, usual = estimate.shares(bounds), prior.shares(bounds)
    scores = [share / max(base, RARE) for share, base in zip(shares, usual, strict=True)]
    best = max(range(len(scores)), key=scores.__getitem__)
    if scores[best] <= MARGIN * scores[current]:
        return current
    nearer = further = 0.0
    for bucket, share in enumerate(shares):
        gain = abs(bucket - current) - abs(bucket - best)
        nearer += share * (gain > 0)
        further += share * (gain < 0)
    return best if nearer >= ODDS * further else current
