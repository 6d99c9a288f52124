"""The estimator whose advantages a critic in the trainer says: the controller has none to send.

``node.critic`` says what they are. They come back with the step that was trained on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.types import Trajectory


def gae(groups: Sequence[ComparedGroup], training: TrainingSpec) -> Estimate:
    """0 for every trajectory, until the trainer has said."""
    return [[(0.0,) for _ in group.members] for group in groups]


def turns_of(trajectory: Trajectory, branch: int | None) -> tuple[tuple[int, int, float], ...]:
    """What a critic needs to know of a branch: (number of a turn, its first token, its reward).

    Turns are numbered through all branches of the trajectory. None: its own tokens.
    """
    own = trajectory.number if branch is None else branch
    return tuple(
        (number, turn.start, turn.reward)
        for number, turn in enumerate(trajectory.turn_rewards)
        if turn.branch == own
    )
