"""What a run has shown of its own costs: its turns, its steps, its starts, and how far these are
from what was predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra_cli.core.types import Seconds, SlotId, Tokens


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """One turn on one server. ``fresh`` are the tokens of its prompt that were not cached."""

    slot: SlotId
    began: Seconds
    ended: Seconds
    prompt: Tokens
    fresh: Tokens
    generated: Tokens


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One optimizer step. ``pairs`` counts each token with each token it attends to."""

    seconds: Seconds
    tokens: float
    pairs: float


@dataclass(frozen=True, slots=True)
class Starts:
    """Seconds until servers and trainers were ready, as seen in the run; None for never.

    ``to_training_s`` and ``to_rollout_s`` are the seconds in which a slot that moved did nothing.
    """

    server_s: Seconds | None = None
    trainer_s: Seconds | None = None
    to_training_s: Seconds | None = None
    to_rollout_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class CostEvidence:
    """What a run has measured of its own costs.

    ``steps`` are the newest ones under one plan with all its slots in place, and ``ranks`` is the
    number of GPUs that trained under it. ``version_bytes`` is the size of a weight version;
    ``link_bandwidth`` the most bytes a second at which one came to another host, 0 if none did.
    """

    turns: tuple[PlayedTurn, ...] = ()
    steps: tuple[TrainedStep, ...] = ()
    ranks: int = 1
    starts: Starts = Starts()
    version_bytes: int = 0
    link_bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class Recalibration:
    """The factors by which measured seconds of a step differ from predicted ones, for each half."""

    rollout: float = 1.0
    training: float = 1.0

    def blended(self, before: Recalibration, *, rollout: float, training: float) -> Recalibration:
        """Return the geometric mean with an earlier one; ``rollout`` and ``training``, 0 to 1,
        weigh this one.
        """
        return Recalibration(
            rollout=self.rollout**rollout * before.rollout ** (1 - rollout),
            training=self.training**training * before.training ** (1 - training),
        )
