"""Generalized advantage estimation over turns (GAE, arXiv 1506.02438), as a pure function.

With r_k the reward of turn k of a trajectory and V_k what the critic expected of it and all later
turns before it was taken::

    delta_k = r_k + gamma V_k+1 - V_k
    A_k     = delta_k + gamma lam A_k+1          the target of V_k is A_k + V_k

V after the last turn is 0, of a trajectory that a limit cut too: its reward is what it was scored
with as it stood, and nothing of what might have come is in it. With lam 1 the target is the
discounted return, whatever the critic says, and A is that less V; with lam below 1 later rewards
are replaced, more and more, by what the critic expects of them.

Turns and not tokens: turns are what the environment answers, and what ArCHer (arXiv 2402.19446)
credits. All tokens of a turn have its advantage, normalised over the tokens of the batch as PPO
does (``whitened``), or with ``scale_rewards: none`` as it is.

This is in ``node`` and not in ``core.algorithms``, since values are known where the model is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import TypeAlias

from libra_cli.config.training import TrainingSpec
from libra_cli.node.batch.samples import TokenSample

VARIANCE_FLOOR = 1e-8
"""Added to the variance; verl's value, as in ``core.algorithms.reinforce``."""

TurnKey: TypeAlias = tuple[int, int, int]
"""Group, member, and number of a turn in its trajectory, all its branches."""


def generalized_advantages(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float
) -> list[float]:
    """The advantages of a trajectory's turns, in order."""
    found: list[float] = []
    next_value = advantage = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        next_value = value
        found.append(advantage)
    return found[::-1]


def whitened(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Return the values with mean 0 and variance 1 (n - 1), each counted for ``weights`` tokens."""
    tokens = sum(weights)
    if tokens < 2:
        return [0.0] * len(values)
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / tokens
    if min(values) == max(values):
        mean = values[0]  # of equal values exactly, or rounding would be made 1
    squares = sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True))
    std = sqrt(squares / (tokens - 1) + VARIANCE_FLOOR)
    return [(value - mean) / std for value in values]


def turn_advantages(
    samples: Sequence[TokenSample], values: Mapping[TurnKey, float], training: TrainingSpec
) -> dict[TurnKey, float]:
    """The advantages of all turns of these samples, not normalised yet."""
    rewards: dict[tuple[int, int], dict[int, float]] = {}
    for sample in samples:
        known = rewards.setdefault(sample.trajectory, {})
        known.update((number, reward) for number, _, reward in sample.turns)
    found: dict[TurnKey, float] = {}
    for trajectory, by_number in rewards.items():
        keys = [(*trajectory, number) for number in sorted(by_number)]
        advantages = generalized_advantages(
            [by_number[number] for *_, number in keys],
            [values[key] for key in keys],
            gamma=training.gamma,
            lam=training.lam,
        )
        found |= zip(keys, advantages, strict=True)
    return found


def scaled(
    advantages: Mapping[TurnKey, float], samples: Sequence[TokenSample], training: TrainingSpec
) -> Mapping[TurnKey, float]:
    """Normalised over the tokens that count, unless the recipe wants them as they are."""
    if training.scale_rewards == "none":
        return advantages
    sizes = {key: size for sample in samples for key, size in _sizes(sample)}
    values = whitened([advantages[key] for key in sizes], list(sizes.values()))
    return dict(zip(sizes, values, strict=True))


def credited(
    samples: Sequence[TokenSample], advantages: Mapping[TurnKey, float]
) -> list[TokenSample]:
    """The samples with the advantages of their turns; without turns a sample has none."""
    return [
        replace(
            sample,
            advantages=tuple(
                (token, advantages[*sample.trajectory, number]) for number, token, _ in sample.turns
            ),
        )
        for sample in samples
    ]


def _sizes(sample: TokenSample) -> list[tuple[TurnKey, int]]:
    """Return each turn's number of tokens that count in the loss, up to the branch's next turn."""
    ends = [*(token for _, token, _ in sample.turns), len(sample.loss_mask)][1:]
    return [
        ((*sample.trajectory, number), int(sample.loss_mask[start:end].sum()))
        for (number, start, _), end in zip(sample.turns, ends, strict=True)
    ]
