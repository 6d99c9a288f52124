"""The critic of one rank during a step: what it has seen, what it says, and what it learns from.

    look        at every turn of the batch, each rank at those of its own samples
    credit      values of all ranks -> advantages of all turns, the same on every rank
    learn       at the end of the step, from the turns that were looked at

All before the first update: what a batch is weighed by does not change while it is trained on.
A step that comes in parts (a batch in which the trainer has died is sent group by group) has
advantages that are normalised part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from libra_cli.config.training import TrainingSpec
from libra_cli.node.batch.samples import TokenSample
from libra_cli.node.critic.advantages import TurnKey, credited, scaled, turn_advantages
from libra_cli.node.critic.value_head import ValueHead, features_of

Gather = Callable[[Any], list[Any]]
"""A *collective* function that returns the values of all ranks, in rank order."""


@dataclass(frozen=True, slots=True)
class TurnTarget:
    """What a turn's value was before the step, and what it should have been."""

    value: float
    target: float


class Critic:
    """The value head, and the turns of the step under way."""

    def __init__(self, width: int, training: TrainingSpec, gather: Gather) -> None:
        self.head = ValueHead(width, training.critic)
        self._training = training
        self._gather = gather
        self._looked: dict[TurnKey, Tensor] = {}
        """Features of this rank's turns, of the samples that are being scored. A pass that begins
        again looks at the same."""
        self._known: dict[TurnKey, Tensor] = {}
        """Features of this rank's turns, of the samples that have advantages."""
        self._targets: dict[TurnKey, TurnTarget] = {}
        """Old and target value of each turn of all ranks."""
        self._advantages: dict[TurnKey, float] = {}

    def look(self, samples: Sequence[TokenSample], hidden: Tensor) -> None:
        """Take in the hidden states before the turns of these samples, in order."""
        keys = [(*one.trajectory, number) for one in samples for number, *_ in one.turns]
        self._looked |= zip(keys, features_of(hidden), strict=True)

    def credit(self, samples: Sequence[TokenSample]) -> list[TokenSample]:
        """*Collective.* The samples, which all ranks have looked at, with their advantages."""
        values = self._values()
        advantages = turn_advantages(samples, values, self._training)
        weights = scaled(advantages, samples, self._training)
        self._known |= self._looked
        self._looked = {}
        self._advantages |= weights
        self._targets |= {
            key: TurnTarget(values[key], values[key] + advantage)
            for key, advantage in advantages.items()
        }
        return credited(samples, weights)

    def _values(self) -> dict[TurnKey, float]:
        """*Collective.* Those of the turns that any rank has looked at."""
        own: dict[TurnKey, float] = {}
        if self._looked:
            with torch.no_grad():
                told = self.head.values(torch.stack(list(self._looked.values()))).tolist()
            own = dict(zip(self._looked, told, strict=True))
        ranks = self._gather((list(own), list(own.values())))
        return {key: one for keys, values in ranks for key, one in zip(keys, values, strict=True)}

    def learn(self) -> dict[str, Any]:
        """*Collective.* Move the values towards their targets, and forget the step's turns.

        Returns:
            The mean loss over the updates, how much of the targets' variance the values of before
            explain, and the advantages of the turns (``told``).
        """
        features, targets, before = self._own()
        losses = [
            self.head.update(features, targets, before, self._total)
            for _ in range(self._training.critic.epochs)
        ]
        metrics = {
            "value_loss": fmean(losses),
            "explained_variance": explained_variance(list(self._targets.values())),
            "advantages": told(self._advantages),
        }
        self._known, self._targets, self._advantages = {}, {}, {}
        return metrics

    def _own(self) -> tuple[Tensor, Tensor, Tensor]:
        """Features, targets and values of this rank's turns."""
        pairs = [self._targets[key] for key in self._known]
        features = list(self._known.values()) or [torch.zeros(0, len(self.head.weights))]
        stacked = torch.stack(features) if self._known else features[0]
        return (
            stacked,
            torch.tensor([one.target for one in pairs]),
            torch.tensor([one.value for one in pairs]),
        )

    def _total(self, vector: Tensor) -> tuple[Tensor, int]:
        """*Collective.* The sum over the ranks, in their order, and the turns of all."""
        ranks = self._gather(vector.double().numpy())
        return torch.from_numpy(np.sum(ranks, axis=0)).float(), len(self._targets)


def explained_variance(turns: Sequence[TurnTarget]) -> float | None:
    """1 - variance of (target - value) / variance of the targets; None where these are all alike.

    1 of values that are right, 0 of those that tell no more than a constant does.
    """
    targets = np.asarray([one.target for one in turns], dtype=np.float64)
    errors = targets - np.asarray([one.value for one in turns], dtype=np.float64)
    if not (len(turns) and np.isfinite(errors).all() and np.ptp(targets) > 0):
        return None
    return float(1 - errors.var() / targets.var())


def told(advantages: Mapping[TurnKey, float]) -> list[list[Any]]:
    """The advantages of each trajectory as ``[group, member, [one a turn]]``, to four digits; none
    of a step that cannot be used.
    """
    if not all(map(isfinite, advantages.values())):
        return []
    by_trajectory: dict[tuple[int, int], list[float]] = {}
    for group, member, number in sorted(advantages):
        value = round(advantages[group, member, number], 4)
        by_trajectory.setdefault((group, member), []).append(value)
    return [[group, member, values] for (group, member), values in by_trajectory.items()]
