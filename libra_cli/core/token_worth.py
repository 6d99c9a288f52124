"""What a generated token is worth by its age, as steps report it, and what it would be when older.

A trainer tells, for the tokens of a step that were as many versions behind, how many there were and
the share of them that weighted ones are worth: with the weights w that the loss gives n of them,
(sum of w)^2 / (n sum of w^2), the effective sample size (Kong 1992, Kish 1965). A token that
``sampler_correction`` masks weighs 0, so the share that is masked is in it. It falls with the age
a, in versions, as ::

    worth(a) = worth(0) exp(-decay a)

which is exact where the log ratio of two policies is normal with a variance that grows by ``decay``
a version: the share is then exp(-variance). ``decay`` is the mean slope of -log(worth) over the
ages within each of the newest steps, weighted by what a step tells (its tokens times the squared
deviations of their ages), beside ``DECAY`` as one step more; its standard error is that of the
weighted mean. Under another bound tokens are taken to be as many versions older or younger as the
bounds differ, for admission keeps the mean token about the bound behind (``rollout.staleness``).

Limit: it counts variance. What a late policy gradient is off in its mean it does not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean

from libra_cli.config.age_metrics import AGE_TOKENS, AGE_WORTH, OLDEST
from libra_cli.core.types import Version

WINDOW = 10
"""Newest steps that tell the decay. Chosen."""
DECAY = 0.02
"""Nats a version, before a step has told it: three runs of pointer-chase at an exact staleness of
1, 2 and 8 had a KL divergence of up to 0.005, 0.02 and 0.08 (``core.warnings.rules``), of which
the effective share is exp(-2 KL)."""
SPREAD = 0.02
"""The standard deviation of the decay over runs, as far as the same runs tell it."""
LEAST_WORTH = 1e-6
"""What a token is worth of an age at which all are masked."""


@dataclass(frozen=True, slots=True)
class AgeWorth:
    """The tokens of a step that were ``age`` versions behind, and the share that they are worth."""

    age: Version
    tokens: float
    worth: float

    @property
    def lost(self) -> float:
        """Return -log(worth), in nats."""
        return -log(max(self.worth, LEAST_WORTH))


@dataclass(frozen=True, slots=True)
class StepWorth:
    """What a step tells of its tokens: their worth by age, of at least one, and the KL divergence
    of the trainer's policy from theirs in nats a token; None where that is not told."""

    ages: tuple[AgeWorth, ...]
    rollout_kl: float | None = None

    @property
    def tokens(self) -> float:
        """Tokens of all ages."""
        return sum(one.tokens for one in self.ages)

    @property
    def mean_age(self) -> float:
        """Versions that a token is behind, in the mean."""
        return sum(one.tokens * one.age for one in self.ages) / self.tokens

    @property
    def mean_lost(self) -> float:
        """-log(worth) of a token in nats, in the mean."""
        return sum(one.tokens * one.lost for one in self.ages) / self.tokens

    @property
    def information(self) -> float:
        """Tokens times the squared deviations of their ages: what the slope is known by."""
        mean = self.mean_age
        return sum(one.tokens * (one.age - mean) ** 2 for one in self.ages)

    @property
    def slope(self) -> float:
        """Return the nats by which -log(worth) grows a version: least squares, of several ages."""
        mean = self.mean_age
        return sum(one.tokens * (one.age - mean) * one.lost for one in self.ages) / self.information


def step_worth(metrics: Mapping[str, float | None]) -> StepWorth | None:
    """Return what a step's metrics tell; None where they tell nothing, as those of an older
    libra."""
    found = []
    for age in range(OLDEST + 1):
        tokens, worth = metrics.get(AGE_TOKENS.format(age)), metrics.get(AGE_WORTH.format(age))
        if tokens and worth is not None:
            found.append(AgeWorth(age, tokens, worth))
    return StepWorth(tuple(found), metrics.get("rollout_kl")) if found else None


def settling(before: int, after: int) -> int:
    """Return the steps after a change of the bound until what was begun before it is trained."""
    return 1 + max(before, after)


@dataclass(frozen=True, slots=True)
class Decay:
    """The nats by which the logarithm of a token's worth falls a version, with a standard error."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class BoundEvidence:
    """The staleness ``bound`` of a run that may choose it among ``bounds`` (versions, ascending).

    ``steps`` are the newest since all that was begun under another bound is trained; ``several``
    the newest whose tokens were of several ages, under whatever bound.
    """

    bound: int
    bounds: tuple[int, ...]
    steps: tuple[StepWorth, ...] = ()
    several: tuple[StepWorth, ...] = ()

    @property
    def candidates(self) -> tuple[int, ...]:
        """The bounds that may be chosen: up to the one after the present one."""
        return self.bounds[: self.bounds.index(self.bound) + 2]

    @property
    def decay(self) -> Decay:
        """The decay by the law of the module; not below 0."""
        told = self.several
        if not told:
            return Decay(DECAY, SPREAD)
        usual = fmean(step.information for step in told)
        weights = [usual, *(step.information for step in told)]
        slopes = [DECAY, *(step.slope for step in told)]
        total = sum(weights)
        mean = sum(w * s for w, s in zip(weights, slopes, strict=True)) / total
        squares = sum((w * (s - mean)) ** 2 for w, s in zip(weights, slopes, strict=True))
        least = (usual * SPREAD) ** 2  # as far off as ``DECAY`` may be
        return Decay(max(0.0, mean), sqrt(max(squares, least)) / total)

    @property
    def mean_age(self) -> float:
        """Versions that a token is behind under the present bound."""
        return fmean(step.mean_age for step in self.steps) if self.steps else float(self.bound)

    @property
    def worth(self) -> float:
        """The share that a token is worth under the present bound."""
        if self.steps:
            return exp(-fmean(step.mean_lost for step in self.steps))
        return exp(-self.decay.mean * self.bound)

    def older(self, bound: int) -> float:
        """Versions that tokens would be older by under another bound; negative: younger."""
        return max(-self.mean_age, float(bound - self.bound))

    def worth_of_age(self, bound: int) -> float:
        """The share that age alone leaves of a token under a bound."""
        return exp(-self.decay.mean * (self.mean_age + self.older(bound)))

    def aged_kl(self, bound: int) -> float:
        """The KL divergence under a bound that is of the tokens' age, in nats a token.

        Half of what is lost of the worth, and no more than was seen: what servers and trainer
        compute differently is no matter of age.
        """
        told = [step.rollout_kl for step in self.steps if step.rollout_kl is not None]
        half = self.decay.mean / 2
        now = min(half * self.mean_age, fmean(told)) if told else half * self.mean_age
        return max(0.0, now + half * self.older(bound))
