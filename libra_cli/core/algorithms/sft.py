"""Imitation of demonstrations: rules of the loss that ``node.losses.imitation`` computes."""

from __future__ import annotations

from collections.abc import Iterator

from libra_cli.config.problems import Problem
from libra_cli.core.algorithms.base import Objective

_READ = ("run", "nodes", "model", "demonstrations", "training", "weight_sync", "planner")
"""Sections of a recipe that are used where nothing is played."""
_PLAYED_IN_TRAINING = (
    *("loss_args", "kl_coef", "kl_estimator", "entropy_coef", "stream", "staleness"),
    *("advantage", "gamma", "lam", "critic", "scale_rewards"),
    *("sampler_correction", "tis_cap", "tis_floor", "clip_low", "clip_high"),
)
"""Keys of ``training`` that only what is played needs, for rewards and for ratios to the rollout
policy. A key with its default counts as left out.
"""


class Imitation(Objective):
    """The cross-entropy of demonstrations: nothing is played, and nothing is rewarded."""

    def problems(self) -> Iterator[Problem]:
        """Yield the keys that mean nothing to it."""
        if self.recipe.training.needs.offline:
            yield from self._term_problems()
        if self.recipe.demonstrations:
            yield from self._unread_problems()

    def _unread_problems(self) -> Iterator[Problem]:
        """Yield what is given beside demonstrations for what would be played."""
        recipe, training = self.recipe, self.recipe.training
        for key, field in type(recipe).model_fields.items():
            if key not in _READ and getattr(recipe, key) != field.default:
                yield Problem(
                    (key, "demonstrations"),
                    "means nothing in a run on demonstrations, which plays nothing: leave it out",
                )
        for key in _PLAYED_IN_TRAINING:
            if getattr(training, key) != type(training).model_fields[key].default:
                yield Problem(
                    (f"training.{key}", "demonstrations"),
                    "means nothing to loss sft, the cross-entropy of demonstrations: leave it out",
                )
