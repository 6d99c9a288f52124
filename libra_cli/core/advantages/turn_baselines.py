"""Estimators that weigh each turn by what came after it.

The **return** of turn t of trajectory i is the discounted sum of what it and later turns have
earned, with g = ``training.gamma``::

    G_it = r_it + g r_i,t+1 + g^2 r_i,t+2 + ...

``turn`` compares it with that turn of the others of the group::

    A_it = (G_it - b_t) / s      b_t = mean of G_jt over the members j that have a turn t

Where only one has a turn t, b_t is b_t-1. s is 1, or with ``scale_rewards: group`` the standard
deviation of all returns of the group about the mean of their turn, with ``batch`` that of all
returns of the batch; 1e-4 is added. With one turn it is ``grpo``. What was earned before t is not
in G_it: nothing that happens at t can change it, so it only adds variance.

``gigpo`` (arXiv 2505.10978) compares it with turns of the group that were shown the same, and adds
what ``grpo`` says of the whole::

    A_it = grpo_i + (G_it - mean of G over turns with the anchor of turn t) / s

with ``scale_rewards: group`` s is the standard deviation of those turns, or 1 of one turn; the
weight of the second part is the paper's, 1. The **anchor** is what the model was shown just before
it spoke, token for token: the prompt, or what its tool or user answered. Not the whole context:
that has the policy's own words in it, which hardly two trajectories share, so that after the first
turn nothing could be compared. Where an observation does not tell the state ("ok"), turns are
compared that should not be: such an environment is one for ``turn``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.group_baselines import grpo
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.advantages.scales import STD_FLOOR, mean_of, pooled_std, std_of
from libra_cli.core.types import Outcome


def returns_of(outcome: Outcome, gamma: float) -> tuple[float, ...]:
    """The return of each turn; of a trajectory without turns its reward."""
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
    whole = std_of(_all_returns(groups, gamma)) + STD_FLOOR
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


def _all_returns(groups: Sequence[ComparedGroup], gamma: float) -> list[float]:
    members = chain.from_iterable(group.members for group in groups)
    return [value for one in members for value in returns_of(one, gamma)]


def _by_turn(outcomes: Sequence[Outcome], gamma: float) -> list[list[float]]:
    """For each turn the returns of those who have one."""
    columns = zip_longest(*(returns_of(one, gamma) for one in outcomes))
    return [[value for value in column if value is not None] for column in columns]


def _baselines(group: ComparedGroup, gamma: float) -> list[float]:
    """For each turn the mean that it is compared with, as far as there are such; then the last."""
    enough = 1 if group.before else 2
    found: list[float] = []
    for values in _by_turn(group.compared, gamma):
        found.append(mean_of(values) if len(values) >= enough or not found else found[-1])
    return found


def gigpo(groups: Sequence[ComparedGroup], training: TrainingSpec) -> Estimate:
    """The advantage of the whole, and that of each turn among those that were shown the same."""
    whole, gamma = grpo(groups, training), training.gamma
    divide = _divisor_of(training, std_of(_all_returns(groups, gamma)))
    return [
        [
            tuple(episode + step for step in steps)
            for (episode,), steps in zip(members, _steps(group, gamma, divide), strict=True)
        ]
        for group, members in zip(groups, whole, strict=True)
    ]


def _divisor_of(training: TrainingSpec, batch: float) -> Callable[[Sequence[float]], float]:
    """What the returns that are compared with one another are divided by."""
    match training.scale_rewards:
        case "none":
            return lambda values: 1.0
        case "batch":
            return lambda values: batch + STD_FLOOR
        case _:
            return lambda values: std_of(values) + STD_FLOOR if len(values) > 1 else 1.0


def _steps(
    group: ComparedGroup, gamma: float, divide: Callable[[Sequence[float]], float]
) -> list[list[float]]:
    """Of each member the second part of each turn; 0 where no other was shown the same."""
    shown: dict[int, list[float]] = defaultdict(list)
    for one in group.compared:
        for anchor, value in _anchored(one, gamma):
            shown[anchor].append(value)
    return [
        [
            (value - mean_of(alike)) / divide(alike) if (alike := shown.get(anchor, [])) else 0.0
            for anchor, value in _anchored(one, gamma)
        ]
        for one in group.members
    ]


def _anchored(outcome: Outcome, gamma: float) -> Iterator[tuple[int, float]]:
    """Of each turn what it was shown, and its return; of one without turns 0 and its reward."""
    anchors = [one.anchor for one in outcome.turns] or [0]
    return zip(anchors, returns_of(outcome, gamma), strict=True)
