"""Trajectory balance: rules of the loss that ``node.losses.trajectory_balance`` computes."""

from __future__ import annotations

from collections.abc import Iterator

from libra_cli.config.problems import Problem
from libra_cli.core.algorithms.base import Objective


class Balance(Objective):
    """Trajectory balance: the controller computes nothing for it."""

    def problems(self) -> Iterator[Problem]:
        """Yield the terms that the loss cannot add."""
        training = self.recipe.training
        yield from self._term_problems()
        if training.kl_coef > 0:
            yield Problem(
                ("training.kl_coef", "training.loss"),
                f"is {training.kl_coef}, but the loss tba has a KL term of its own: leave it out "
                "and set loss_args: {beta: ...}",
            )
