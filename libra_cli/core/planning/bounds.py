"""Which staleness bound to have: the one with the least seconds for what a token teaches.

    the bound b with the least  step_s(b) / worth(b)

``step_s`` is the planner's price of the best placement under b, ``worth`` what a token is worth
there (``core.token_worth``). Another bound is taken if its time for what a token teaches is less by
at least ``min_gain`` even with the worth at the lower end of its interval, as an error of ``Z``
standard deviations has it. It is at most one notch of the recipe's bounds above the present one, so
worth is extrapolated no further than that. A bound that the run left for a higher one is taken
again if the higher one does not gain ``min_gain`` over it by what was measured under both: prices
can be wrong, and an old policy gradient is also off in its mean. To rise to it once more it has to
promise ``AGAIN`` times as much. The bound goes down a notch at any price, to 1 at least, where age
puts the two policies further apart than ``core.warnings`` lets pass (``ROLLOUT_KL``,
``EFFECTIVE``), and does not rise to where it is expected to.

Limit: what a bound gains that was not tried yet is as good as the prices. At a bound of 0 all
tokens are of one age, so the last that was learned of others stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp

from libra_cli.core.bound_choice import BoundChoice, PricedBound
from libra_cli.core.explanation import Z
from libra_cli.core.rollout.staleness import StalenessRule
from libra_cli.core.token_worth import BoundEvidence
from libra_cli.core.types import Seconds
from libra_cli.core.warnings.rules import EFFECTIVE, ROLLOUT_KL
from libra_cli.core.workload import Workload

LEAST_FORCED = 1
"""The bound below which only a gain leads: at 0 the halves take turns, for twice as long or so, and
a version that alone moves the policy too far is as large there."""
LEAST = 3
"""Steps that have to tell what old tokens are worth before the bound is changed. Chosen."""

AGAIN = 2.0
"""How many times the least gain a bound has to promise that was tried and left. Chosen."""


def under(rule: StalenessRule, work: Workload) -> Workload:
    """Return the same work under another staleness rule."""
    holders = rule.holders(work.group_size)
    return replace(work, overlap=rule.overlap, late=rule.late, holders=holders, ready=rule.ready)


def priced_bound(evidence: BoundEvidence, bound: int, layout: str, step_s: Seconds) -> PricedBound:
    """Return a bound of which a step takes so long, with what its tokens are worth."""
    older, decay = evidence.older(bound), evidence.decay
    worth, factor = evidence.worth * exp(-decay.mean * older), exp(Z * decay.error * abs(older))
    low, high = worth / factor, worth * factor
    return PricedBound(bound, layout, step_s, *(min(1.0, share) for share in (worth, low, high)))


def chosen_bound(
    evidence: BoundEvidence, priced: Mapping[int, PricedBound], min_gain: float
) -> BoundChoice:
    """Return which of the priced bounds to have: a candidate of the evidence, of which today's is
    one.

    ``min_gain`` is the least gain that is worth a change, as a share of the time.
    """
    today = priced[evidence.bound]
    others = [
        priced[bound] for bound in evidence.candidates if bound != today.bound and bound in priced
    ]
    if not others:
        return BoundChoice(today, today, None, "no other bound can run")
    if len(evidence.steps) < LEAST:
        told = f"{len(evidence.steps)} of {LEAST} steps have told what old tokens are worth"
        return BoundChoice(today, today, None, told)
    if (lowered := _lowered(evidence, today, others, min_gain)) is not None:
        return lowered
    refused = {
        one.bound: _too_far(evidence, one.bound) for one in others if one.bound > today.bound
    }
    allowed = [one for one in others if not refused.get(one.bound)]
    if not allowed:
        why = "; ".join(f"bound {bound}: {words}" for bound, words in refused.items())
        return BoundChoice(today, today, None, why)
    best = min(allowed, key=lambda one: one.step_s / one.low)
    gain = 1 - (best.step_s / best.low) / today.effective_s
    if gain < (least := _least_gain(evidence, best.bound, min_gain)):
        why = f"bound {best.bound}: at least {gain:+.1%} less time is below {least:.0%}"
        return BoundChoice(today, today, best, "; ".join(filter(None, (why, *refused.values()))))
    return BoundChoice(
        today, best, today, f"at least {gain:.0%} less time for what a token teaches"
    )


def _lowered(
    evidence: BoundEvidence, today: PricedBound, others: Sequence[PricedBound], min_gain: float
) -> BoundChoice | None:
    """Return the choice of a lower bound, where age puts the policies too far apart or today's has
    not gained what it was chosen for; else None.
    """
    lower = [one for one in others if LEAST_FORCED <= one.bound < today.bound]
    if lower and (why := _too_far(evidence, today.bound)):
        return BoundChoice(today, max(lower, key=lambda one: one.bound), today, why)
    left = [one for one in others if one.bound < today.bound and one.bound in evidence.left]
    for one in reversed(left):
        gain = 1 - today.effective_s / one.effective_s
        if gain < min_gain:
            why = f"{gain:+.1%} less time came than under bound {one.bound}, below {min_gain:.0%}"
            return BoundChoice(today, one, today, why)
    return None


def _least_gain(evidence: BoundEvidence, bound: int, min_gain: float) -> float:
    """Return the gain that a bound has to promise, as a share of the time."""
    tried = bound > evidence.bound and bound in evidence.left
    return min_gain * AGAIN if tried else min_gain


def _too_far(evidence: BoundEvidence, bound: int) -> str:
    """Say how far age puts the two policies apart under a bound, if that is too far; empty: it is
    not.
    """
    kl, worth = evidence.kl_of_age(bound), evidence.worth_of_age(bound)
    if kl > ROLLOUT_KL:
        return f"age makes {kl:.2g} nats a token of rollout_kl, over {ROLLOUT_KL:g}"
    if worth < EFFECTIVE:
        return f"age leaves a token worth {worth:.0%}, below {EFFECTIVE:.0%}"
    return ""
