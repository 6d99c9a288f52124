"""The steps that training is priced by."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from libra_cli.core.evidence import TrainedStep
from libra_cli.core.records import (
    GroupRecord,
    MoveRecord,
    PlanRecord,
    SlotRecord,
    StepRecord,
    TrajectoryRecord,
)
from libra_cli.core.types import Seconds, SlotId, Tokens

RECENT_STEPS = 50
"""Newest steps that the costs of training are fitted to, where no profile is given."""
LEAST_STEPS = 2
"""Steps under one plan that it takes to price training."""


@dataclass(slots=True)
class _SteadyStep:
    """A step and what is known of it so far; its groups are told after it.

    ``trained`` is how many times the tokens of its batch it trained.
    """

    number: int
    seconds: Seconds
    tokens: Tokens
    trained: float = 1.0
    pairs: float = 0.0


class TrainedSteps:
    """The newest steps under one plan with all its slots in place, and how many GPUs trained."""

    def __init__(self) -> None:
        self._pairs: dict[int, float] = {}
        self._moving: set[SlotId] = set()
        self._gpus: dict[SlotId, int] = {}
        self._slots: tuple[SlotId, ...] = ()
        #: When all slots were in place.
        self._since: Seconds = 0.0
        self._steady: deque[_SteadyStep] = deque(maxlen=RECENT_STEPS)
        self._before: tuple[tuple[TrainedStep, ...], tuple[SlotId, ...]] = ((), ())

    @property
    def steps(self) -> tuple[TrainedStep, ...]:
        """The steps under the newest plan that has enough of them."""
        return self._trained if self._is_enough else self._before[0]

    @property
    def ranks(self) -> int:
        """GPUs that trained in these steps; a slot without GPUs counts as one."""
        slots = self._slots if self._is_enough else self._before[1]
        return max(1, sum(self._gpus.get(slot, 1) for slot in slots))

    @property
    def _trained(self) -> tuple[TrainedStep, ...]:
        return tuple(
            TrainedStep(step.seconds, step.trained * step.tokens, step.trained * step.pairs)
            for step in self._steady
        )

    @property
    def _is_enough(self) -> bool:
        return len(self._steady) >= LEAST_STEPS or not self._before[0]

    def slot(self, row: SlotRecord) -> None:
        """Remember the number of the slot's GPUs."""
        if row.slot not in self._gpus:
            self._gpus[row.slot] = len(row.gpus) or 1

    def plan(self, row: PlanRecord) -> None:
        """Begin with a new plan; the one before is used until this one has steps of its own."""
        if len(self._steady) >= LEAST_STEPS:
            self._before = self._trained, self._slots
        self._steady.clear()
        self._moving.clear()
        self._slots = (*row.train, *row.gradient)
        self._since = row.at

    def move(self, row: MoveRecord) -> None:
        """Note that a slot is on its way, or has arrived."""
        if row.ended_at is None:
            self._moving.add(row.slot)
        else:
            self._moving.discard(row.slot)
            self._since = max(self._since, row.ended_at)

    def finished(self, row: TrajectoryRecord) -> None:
        """A trajectory that its group may be trained with."""
        pairs = row.context_tokens**2 / 2
        self._pairs[row.group_id] = self._pairs.get(row.group_id, 0.0) + pairs

    def group(self, row: GroupRecord) -> None:
        """Add the tokens' pairs of a trained group to its step;
        those of a dropped one are forgotten.
        """
        if row.state in ("open", "ready", "claimed"):
            return
        pairs = self._pairs.pop(row.group_id, 0.0)
        for step in reversed(self._steady):
            if row.state == "trained" and step.number == row.step:
                step.pairs += pairs
                return

    def step(self, row: StepRecord, trained: float) -> None:
        """Take in an optimizer step, which counts if all slots were in place throughout."""
        if self._moving or row.started_at < self._since:
            return
        seconds = max(row.train_s - row.compile_s, 1e-9)
        self._steady.append(_SteadyStep(row.step, seconds, row.context_tokens, trained))
