"""Each turn is weighed by what came after it.

The **return** of turn t of trajectory i is the discounted sum of what it and later turns have
earned, with g = ``training.gamma``::

    G_it = r_it + g r_i,t+1 + g^2 r_i,t+2 + ...

``turn`` compares it with that turn of the others of the group::

    A_it = (G_it - b_t) / s      b_t = mean of G_jt over the members j that have a turn t

Where only one has a turn t, b_t is b_t-1. s is 1, or with ``scale_rewards: group`` the standard
deviation of all returns of the group about the mean of their turn, with ``batch`` that of all
returns of the batch; 1e-4 is added. With one turn it is ``grpo``. What was earned before t is not
in G_it: nothing that happens at t can change it, so it only adds variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.advantages.scales import STD_FLOOR, mean_of, pooled_std, std_of
from libra_cli.core.types import Outcome


def returns_of(outcome: Outcome, gamma: float) -> tuple[float, ...]:
    """Return the return of each turn; of a trajectory without turns its reward."""
    found: list[float] = []
    value = 0.0
    for turn in reversed(outcome.turns):
        value = turn.reward + gamma * value
        found.append(value)
    return tuple(reversed(found)) or (outcome.reward,)


def turn(groups: Sequence[ComparedGroup], training: TrainingSpec) -> Estimate:
    """The return of each turn, less the mean of that turn in the group."""
    gamma, scale = training.gamma, training.scale_rewards or "group"
    by_turn = [_by_turn(group.everyone, gamma) for group in groups]
    whole = std_of(all_returns(groups, gamma)) + STD_FLOOR
    estimate = []
    for group, columns in zip(groups, by_turn, strict=True):
        scales = {"none": 1.0, "batch": whole, "group": pooled_std(columns) + STD_FLOOR}
        baselines = _baselines(group, gamma)
        estimate.append(
            [
                tuple(
                    (value - baselines[min(place, len(baselines) - 1)]) / scales[scale]
                    for place, value in enumerate(returns_of(one, gamma))
                )
                for one in group.members
            ]
        )
    return estimate


def all_returns(groups: Sequence[ComparedGroup], gamma: float) -> list[float]:
    """The returns of all turns of the members of these groups."""
    members = chain.from_iterable(group.members for group in groups)
    return [value for one in members for value in returns_of(one, gamma)]


def _by_turn(outcomes: Sequence[Outcome], gamma: float) -> list[list[float]]:
    """Return for each turn the returns of the members that have such a turn."""
    columns = zip_longest(*(returns_of(one, gamma) for one in outcomes))
    return [[value for value in column if value is not None] for column in columns]


def _baselines(group: ComparedGroup, gamma: float) -> list[float]:
    """Return the baseline b_t of each turn; where too few members
    have a turn, that of the turn before.
    """
    enough = 1 if group.before else 2
    found: list[float] = []
    for values in _by_turn(group.compared, gamma):
        found.append(mean_of(values) if len(values) >= enough or not found else found[-1])
    return found
