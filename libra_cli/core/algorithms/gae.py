"""Generalized advantage estimation: a critic in the trainer says what each turn is worth.

The controller has no advantages to send: it tells the trainer of turns and their rewards, and the
advantages come back with the step that was trained on them. ``node.critic`` says what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libra_cli.config.problems import Problem
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.algorithms.base import Advantage, Turns
from libra_cli.core.types import Trajectory


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the settings that cannot be used with ``advantage: gae``."""
    if recipe.training.kl_in_reward:
        yield Problem(
            ("training.kl_in_reward", "training.advantage"),
            "takes the KL of a trajectory less the mean of its group from the reward, and "
            "advantage: gae has no group: leave it out, and kl_coef adds the KL to the loss",
        )
    if recipe.rollout.dynamic_sampling:
        yield Problem(
            ("rollout.dynamic_sampling", "training.advantage"),
            "leaves out groups in which all rewards are the same, and with advantage: gae they "
            "teach as others do: leave it out",
        )
    yield from _worker_problems(recipe.nodes)


def _worker_problems(nodes: Sequence[NodeSpec]) -> Iterator[Problem]:
    """Yield hybrid slots: gradient workers cannot compute shares of a step with a critic."""
    for index, node in enumerate(nodes):
        if "hybrid" in (node.pool or ()):
            yield Problem(
                (f"nodes[{index}].pool", "training.advantage"),
                "is hybrid, but gradient workers cannot help a batch that a critic in the trainer "
                "weighs as a whole (gae): make it auto (its side is then chosen once), train or "
                "rollout",
            )


def _estimate(groups: Sequence[ComparedGroup], training: TrainingSpec) -> Estimate:
    """Return 0 for every trajectory: the advantages come from the trainer."""
    return [[(0.0,) for _ in group.members] for group in groups]


def turns_of(trajectory: Trajectory, branch: int | None) -> Turns:
    """Return (number of a turn, its first token, its reward) for each turn of a branch.

    Turns are numbered through all branches of the trajectory. None: the trajectory's own branch.
    """
    own = trajectory.number if branch is None else branch
    return tuple(
        (number, turn.start, turn.reward)
        for number, turn in enumerate(trajectory.turn_rewards)
        if turn.branch == own
    )


GAE = Advantage(_estimate, problems, turns_of)
