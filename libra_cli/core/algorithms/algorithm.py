"""The algorithm of a run: the pair of an advantage and a loss, put together for its recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from libra_cli.config.algorithms import ADVANTAGES, LOSSES, controller_of
from libra_cli.config.errors import PluginError
from libra_cli.config.plugins import PluginGroup
from libra_cli.config.recipe import Recipe
from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.estimates import Advantages, checked
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.advantages.roles import estimated_by_role, roles_of
from libra_cli.core.algorithms.base import Advantage, Objective
from libra_cli.core.algorithms.replay import ReplayBuffer
from libra_cli.core.rollout.groups import Group

Find: TypeAlias = Callable[[PluginGroup, str], Any]
"""Imports what a name of a group stands for, which the core does not do by itself."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What a recipe's advantage and loss do in the controller.

    The core never asks for their names.
    """

    recipe: Recipe
    advantage: Advantage
    objective: Objective

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """The advantages of all members of these groups, which are compared with one another.

        Raises:
            PluginError: what the estimator returned is not what ``core.advantages.protocol`` asks.
        """
        compared = [group.compared for group in groups]
        return checked(groups, self._estimate(compared), self.recipe.training.advantage)

    def has_signal(self, group: ComparedGroup) -> bool:
        """Whether a group in which all rewards are the same has an advantage that is not 0: only
        what weighs turns can find one."""
        training = self.recipe.training
        if not training.needs.turns:
            return False
        return any(map(any, self._estimate([group])[0]))

    def _estimate(self, groups: Sequence[ComparedGroup]) -> Estimate:
        training = self.recipe.training
        if any(map(roles_of, groups)):
            check_roles(training)
        return estimated_by_role(self.advantage.estimate, groups, training)

    def replay_buffer(self) -> ReplayBuffer | None:
        """Return the buffer of groups that are kept to be trained again; None: no group is."""
        spec = self.recipe.replay
        return None if spec is None else ReplayBuffer(spec, self.recipe.run.seed)


def check_roles(training: TrainingSpec) -> None:
    """Raise PluginError if ``training`` has no advantages for an environment with roles."""
    if training.needs.critic:
        raise PluginError(
            f"training.advantage: {training.advantage} estimates no advantages by role, and the "
            "environment has several roles",
            hint="training: {advantage: grpo}, or any other without a critic "
            "(libra help multi-agent)",
        )


def algorithm_of(recipe: Recipe, find: Find) -> Algorithm:
    """Return the algorithm that the recipe's ``training`` names.

    Raises:
        PluginError: ``find`` knows no such estimator or loss.
    """
    training = recipe.training
    found, path = find(ADVANTAGES, training.advantage), controller_of(training.loss)
    advantage = found if isinstance(found, Advantage) else Advantage(found)
    objective = find(LOSSES, path) if path else Objective
    return Algorithm(recipe, advantage, objective(recipe))
