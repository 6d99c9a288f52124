"""GiGPO (arXiv 2505.10978): a turn is compared with those that were shown the same.

To the comparison of its return (``turn``) is added what ``grpo`` says of the whole::

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

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.advantages.scales import STD_FLOOR, mean_of, std_of
from libra_cli.core.algorithms.grpo import grpo
from libra_cli.core.algorithms.turn import all_returns, returns_of
from libra_cli.core.types import Outcome


def gigpo(groups: Sequence[ComparedGroup], training: TrainingSpec) -> Estimate:
    """The advantage of the whole, and that of each turn among those that were shown the same."""
    whole, gamma = grpo(groups, training), training.gamma
    divide = _divisor_of(training, std_of(all_returns(groups, gamma)))
    return [
        [
            tuple(episode + step for step in steps)
            for (episode,), steps in zip(members, _steps(group, gamma, divide), strict=True)
        ]
        for group, members in zip(groups, whole, strict=True)
    ]


def _divisor_of(training: TrainingSpec, batch: float) -> Callable[[Sequence[float]], float]:
    """Return the function that gives the divisor s for the returns of turns with one anchor."""
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
    """Return the second part of each turn of each member; 0 where no other turn has its anchor."""
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
    """Yield the anchor and the return of each turn; without turns 0 and the reward."""
    anchors = [one.anchor for one in outcome.turns] or [0]
    return zip(anchors, returns_of(outcome, gamma), strict=True)
