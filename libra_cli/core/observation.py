"""What a planner knows when it decides: one value, made by the machine, read by every planner.

A decision is a pure function of an ``Observation``, so a live run, the simulator and
``libra rebalance --dry-run`` decide alike: none of them reads a database, a file or a clock for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from libra_cli.core.evidence import CostEvidence, Recalibration
from libra_cli.core.explanation import PastPrediction
from libra_cli.core.token_worth import BoundEvidence
from libra_cli.core.types import Plan, Role, Seconds, Slot, SlotId
from libra_cli.core.workload import Workload

STARVED = 0.05
"""Share of a step that training waits, from which on rollout is the longer half. Chosen."""


NO_EVIDENCE = CostEvidence()


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured optimizer step.

    ``step_s`` is all of it, ``train_s`` training, ``waited_s`` the time that training waited, and
    ``in_play_s`` the time that trajectories were in play, summed over them. ``concurrency`` is how
    many trajectories were in play, averaged over those seconds: trajectories come in bursts, and
    each is slowed down by those that it meets. ``held_s`` is the time that training waited with a
    full batch ready, for the staleness rule. ``played_tokens`` were generated meanwhile, for
    whichever step; 0 where that is not known.
    """

    step_s: Seconds
    train_s: Seconds
    waited_s: Seconds
    in_play_s: Seconds
    concurrency: float
    held_s: Seconds = 0.0
    played_tokens: float = 0.0

    @property
    def starved(self) -> bool:
        """Whether training waited for rollout."""
        return self.waited_s > STARVED * self.step_s


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a run after a step.

    ``plan`` is what the run has or is on its way to; ``slots`` are all that it knows. ``pins`` hold
    slots in a role; on nodes that are ``gone``, since they are given up, nothing works or starts.
    ``workload`` are the newest finished trajectories; ``measured`` the newest
    steps under this plan, ``lengths`` the mean generated tokens of the newest steps, oldest first.
    ``recalibration`` is the one under which today's plan was chosen; None for the first plan.
    ``rollout_idle`` is the share of the step (0 to 1) in which the staleness bound held rollout
    back; ``queue`` is waiting requests for each seat. ``steps_left`` is None when the end is open.
    ``predictions`` are those of earlier decisions of which it is known what came; ``sync_s`` is how
    long a server took to pull and load its newest version. ``staleness`` is what is known of the
    staleness bound where the planner chooses it.
    """

    step: int
    plan: Plan
    slots: tuple[Slot, ...]
    workload: Workload
    pins: tuple[tuple[SlotId, Role], ...] = ()
    measured: tuple[MeasuredStep, ...] = ()
    lengths: tuple[float, ...] = ()
    evidence: CostEvidence = NO_EVIDENCE
    recalibration: Recalibration | None = None
    rollout_idle: float = 0.0
    queue: float = 0.0
    steps_left: int | None = None
    predictions: tuple[PastPrediction, ...] = ()
    sync_s: Seconds = 0.0
    staleness: BoundEvidence | None = None
    gone: frozenset[str] = frozenset()

    def working(self, plan: Plan) -> Plan:
        """Return what works of a plan: servers and gradient workers on nodes that are not ``gone``;
        ranks of the base group wait for theirs."""
        away = {slot.id for slot in self.slots if slot.node in self.gone}
        if not away:
            return plan
        return replace(
            plan,
            servers=tuple(one for one in plan.servers if one[0] not in away),
            gradient=tuple(slot for slot in plan.gradient if slot not in away),
            models=tuple(one for one in plan.models if one[0] not in away),
        )

    @property
    def step_end_s(self) -> Seconds:
        """Expected seconds until a training step ends: one is under way in most cases, and half of
        it is left in the mean."""
        return fmean(step.train_s for step in self.measured) / 2 if self.measured else 0.0


class InPlay:
    """The number of trajectories in play, integrated over time."""

    def __init__(self) -> None:
        self._playing = 0
        self.at: Seconds = 0.0
        """When the number last changed."""
        self._in_play_s: Seconds = 0.0
        self._met_s: Seconds = 0.0

    def begin(self, *, now: Seconds) -> None:
        """Begin at ``now`` with no trajectory in play, and forget what was before."""
        self._playing = 0
        self.take(now=now)

    def change(self, by: int, *, now: Seconds) -> None:
        """Count ``by`` more trajectories in play from ``now`` on."""
        self._pass_to(now)
        self._playing += by

    def take(self, *, now: Seconds) -> tuple[Seconds, float]:
        """Return ``in_play_s`` and ``concurrency`` since the last call."""
        self._pass_to(now)
        in_play_s, met_s = self._in_play_s, self._met_s
        self._in_play_s = self._met_s = 0.0
        return in_play_s, met_s / in_play_s if in_play_s else 0.0

    def _pass_to(self, now: Seconds) -> None:
        passed = max(0.0, now - self.at)
        self._in_play_s += self._playing * passed
        self._met_s += self._playing * self._playing * passed
        self.at = max(self.at, now)


def mean_step(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """The mean of at least one step; the concurrency is weighted by the seconds in play."""
    in_play_s = sum(step.in_play_s for step in steps)
    met_s = sum(step.in_play_s * step.concurrency for step in steps)
    return MeasuredStep(
        step_s=fmean(step.step_s for step in steps),
        train_s=fmean(step.train_s for step in steps),
        waited_s=fmean(step.waited_s for step in steps),
        in_play_s=in_play_s / len(steps),
        concurrency=met_s / in_play_s if in_play_s else 0.0,
        held_s=fmean(step.held_s for step in steps),
        played_tokens=fmean(step.played_tokens for step in steps),
    )
