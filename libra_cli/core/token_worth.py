"""What a generated token is worth by its age, as steps report it, and what it would be when older.

A trainer tells, for the tokens of a step that were as many versions behind, how many there were and
the share of them that weighted ones are worth: with the ratios w of trainer to rollout probability
of n of them, (sum of w)^2 / (n sum of w^2), the effective sample size (Kong 1992, Kish 1965). The
ratios are before any bound: with those that ``token_mask`` leaves, ten steps of two live runs whose
reward fell still told 94 and 99 %, and before the bound 69 and 94 %. It falls with the age a, in
versions, as ::

    worth(a) = worth(0) exp(-decay a)

which is exact where the log ratio of two policies is normal with a variance that grows by ``decay``
a version: the share is then exp(-variance), and the KL divergence is half the variance. Of a step
``decay`` is the slope of -log(worth) through that of tokens of age 0, least squares over its tokens
n: sum of n a (lost - lost of age 0) / sum of n a^2. Not the slope within a step: which tokens of a
batch are old is no chance, they are of long trajectories. Of a run it is the mean over the newest
steps, weighted by sum of n a^2, beside ``DECAY`` as one step more; its standard error is that of
the weighted mean. The KL divergence of each version is found in the same way. Under another bound
tokens are taken to be as many versions older or younger as the bounds differ, for admission keeps
the mean token about the bound behind (``rollout.staleness``).

Limit: it counts variance. What a late policy gradient is off in its mean it does not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log, sqrt
from statistics import fmean

from libra_cli.config.age_metrics import AGE_KL, AGE_TOKENS, AGE_WORTH, OLDEST
from libra_cli.core.evidence import Recalibration
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
"""What a token is taken to be worth at least. Chosen."""


@dataclass(frozen=True, slots=True)
class AgeWorth:
    """The tokens of a step that were ``age`` versions behind, the share that they are worth, and
    the KL divergence of the trainer's policy from theirs in nats a token."""

    age: Version
    tokens: float
    worth: float
    kl: float = 0.0

    @property
    def lost(self) -> float:
        """Return -log(worth), in nats."""
        return -log(max(self.worth, LEAST_WORTH))


@dataclass(frozen=True, slots=True)
class StepWorth:
    """What a step tells of its tokens, by their age; at least one."""

    ages: tuple[AgeWorth, ...]

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
    def mean_kl(self) -> float:
        """The KL divergence in nats a token, in the mean."""
        return sum(one.tokens * one.kl for one in self.ages) / self.tokens

    @property
    def information(self) -> float:
        """Tokens times their squared ages: what slopes are known by; 0 where all are of age 0."""
        return sum(one.tokens * one.age**2 for one in self.ages)

    def decay(self, fresh: float) -> float:
        """Return the nats by which -log(worth) grows a version, from ``fresh`` at age 0."""
        grown = (one.tokens * one.age * (one.lost - fresh) for one in self.ages)
        return sum(grown) / self.information

    def kl_a_version(self, fresh: float) -> float:
        """Return the nats by which the KL divergence grows a version, from ``fresh`` at age 0."""
        grown = (one.tokens * one.age * (one.kl - fresh) for one in self.ages)
        return sum(grown) / self.information


def step_worth(metrics: Mapping[str, float | None]) -> StepWorth | None:
    """Return what a step's metrics tell; None where they tell nothing, as those of an older
    libra."""
    found = []
    for age in range(OLDEST + 1):
        tokens, worth, kl = (
            metrics.get(name.format(age)) for name in (AGE_TOKENS, AGE_WORTH, AGE_KL)
        )
        if tokens and worth is not None:
            found.append(AgeWorth(age, tokens, worth, kl or 0.0))
    return StepWorth(tuple(found)) if found else None


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

    ``steps`` are the newest since all that was begun under another bound is trained; ``aged`` the
    newest with tokens that were behind, under whatever bound. ``left`` are the bounds that the run
    had before, with the factors by which steps differed from their prices then.
    """

    bound: int
    bounds: tuple[int, ...]
    steps: tuple[StepWorth, ...] = ()
    aged: tuple[StepWorth, ...] = ()
    left: Mapping[int, Recalibration] = field(default_factory=dict)

    @property
    def candidates(self) -> tuple[int, ...]:
        """The bounds that may be chosen: up to the one after the present one."""
        return self.bounds[: self.bounds.index(self.bound) + 2]

    @property
    def fresh(self) -> AgeWorth:
        """Tokens of age 0 of all steps, with their mean loss of worth and KL divergence."""
        found = [one for step in (*self.aged, *self.steps) for one in step.ages if one.age == 0]
        tokens = sum(one.tokens for one in found)
        if not tokens:
            return AgeWorth(0, 0.0, 1.0)
        lost = sum(one.tokens * one.lost for one in found) / tokens
        return AgeWorth(0, tokens, exp(-lost), sum(one.tokens * one.kl for one in found) / tokens)

    @property
    def decay(self) -> Decay:
        """The decay by the law of the module; not below 0."""
        if not self.aged:
            return Decay(DECAY, SPREAD)
        fresh, usual = self.fresh.lost, fmean(step.information for step in self.aged)
        weights = [usual, *(step.information for step in self.aged)]
        slopes = [DECAY, *(step.decay(fresh) for step in self.aged)]
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
        worth = self.worth * exp(-self.decay.mean * self.older(bound))
        return min(1.0, worth / self.fresh.worth)

    def kl_of_age(self, bound: int) -> float:
        """The KL divergence that is of the tokens' age under a bound, in nats a token.

        What tokens of age 0 have too is what servers and trainer compute differently.
        """
        fresh, told = self.fresh.kl, self.aged or self.steps
        now = fmean(step.mean_kl for step in self.steps) - fresh if self.steps else 0.0
        grown = [step.kl_a_version(fresh) for step in told if step.information]
        a_version = fmean(grown) if grown else DECAY / 2
        return max(0.0, now + a_version * self.older(bound))
