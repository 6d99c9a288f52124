"""From one layout to another: what a planner is told, what it answers, what moving costs.

A move costs GPU time: the seconds in which each of its GPUs does nothing, as a share of all GPUs,
so that it compares with seconds of the whole job. To that come what trajectories on the stopped
servers must be prefilled again, and ``resize_s`` where the trainer's core must restart.

Guarantee: ``moves_between`` stops no server of a shape that both layouts have. Limit: it counts
GPUs and servers; which slot a server is on is for ``slot_plan`` to say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from libra_cli.core.costs.profile import Profile, TrainingShape
from libra_cli.core.costs.workload import Workload
from libra_cli.core.planning.recalibration import MeasuredStep
from libra_cli.core.planning.search import Layout, Times
from libra_cli.core.types import Seconds


@dataclass(frozen=True, slots=True)
class Observation:
    """What a planner may know after a step.

    ``rollout_idle`` is the share of the step (0 to 1) in which rollout waited for training;
    ``queue`` is waiting requests per seat. ``steps_left`` is None when the end is open.
    """

    step: int
    layout: Layout
    recent: Workload
    measured: MeasuredStep
    rollout_idle: float
    queue: float
    gpus: int
    steps_left: int | None = None

    @property
    def rollout_s(self) -> Seconds:
        """Of the step, without rollout's waiting for training."""
        return self.measured.step_s * (1 - self.rollout_idle)

    @property
    def train_s(self) -> Seconds:
        """Of the step, without training's waiting for rollout."""
        return self.measured.train_s


@dataclass(frozen=True, slots=True)
class Decision:
    """To move to ``layout``, or to stay (None) and ``why_not``.

    ``before`` and ``after`` are predicted; ``cost_s`` is the moves', in seconds of the whole job.
    """

    layout: Layout | None
    reasons: tuple[str, ...]
    before: Times | None = None
    after: Times | None = None
    cost_s: Seconds = 0.0
    payback_steps: float | None = None
    why_not: str = ""


class Replanner(Protocol):
    """Asked once a step. Deterministic, without a clock; keeps what it needs to remember."""

    @property
    def name(self) -> str:
        """As ``--planners`` takes it."""

    def begin(self, workload: Workload) -> Layout:
        """The layout to start with. Raises NothingFits."""

    def consider(self, now: Observation) -> Decision:
        """The layout to have from here on, or to stay."""


@dataclass(frozen=True, slots=True)
class Moves:
    """GPUs that change sides, and servers by tensor-parallel degree that stop and start."""

    to_training: int
    to_rollout: int
    stopped: dict[int, int]
    started: dict[int, int]

    @property
    def gpus(self) -> int:
        """That do nothing for a while."""
        stopped = sum(degree * number for degree, number in self.stopped.items())
        started = sum(degree * number for degree, number in self.started.items())
        return max(stopped, started, self.to_training, self.to_rollout)

    @property
    def number(self) -> int:
        """Servers stopped and started."""
        return sum(self.stopped.values()) + sum(self.started.values())


def moves_between(today: Layout, then: Layout) -> Moves:
    """The fewest: a server of a shape that both have stays."""
    before, after = today.servers, then.servers
    degrees = sorted({*before, *after})
    return Moves(
        to_training=max(0, then.training_gpus - today.training_gpus),
        to_rollout=max(0, then.rollout_gpus - today.rollout_gpus),
        stopped=_positive({d: before.get(d, 0) - after.get(d, 0) for d in degrees}),
        started=_positive({d: after.get(d, 0) - before.get(d, 0) for d in degrees}),
    )


def moves_cost_s(profile: Profile, workload: Workload, today: Layout, then: Layout) -> Seconds:
    """Seconds of the whole job that the moves take; the formula is the module's.

    GPUs join training as gradient workers, so only another tensor or pipeline degree restarts it.
    """
    moves, prices = moves_between(today, then), profile.moves
    starting = sum(prices.start(d) * d * number for d, number in moves.started.items())
    started = sum(degree * number for degree, number in moves.started.items())
    arriving = min(moves.to_rollout, started)
    busy = moves.to_training * prices.to_training_s + moves.to_rollout * prices.to_rollout_s
    busy += starting * (1 - arriving / started) if started else 0.0
    cost = busy / max(1, today.rollout_gpus + today.training_gpus)
    cost += _prefill_again_s(profile, workload, today, then, moves)
    return cost + (prices.resize_s if _restarts(today.training, then.training) else 0.0)


def _positive(counts: dict[int, int]) -> dict[int, int]:
    return {degree: number for degree, number in counts.items() if number > 0}


def _restarts(today: TrainingShape, then: TrainingShape) -> bool:
    return replace(today, data_parallel=1) != replace(then, data_parallel=1)


def _prefill_again_s(
    profile: Profile, workload: Workload, today: Layout, then: Layout, moves: Moves
) -> Seconds:
    """Half-grown trajectories of the stopped servers, computed again on those of then."""
    stopped = sum(degree * number for degree, number in moves.stopped.items())
    if not stopped or not then.buckets:
        return 0.0
    in_flight = workload.trajectories * stopped / max(1, today.rollout_gpus)
    tokens = in_flight * workload.mean_context / 2
    rates = [
        bucket.servers / max(profile.servers[bucket.tensor_parallel].prefill_token_s, 1e-12)
        for bucket in then.buckets
        if bucket.tensor_parallel in profile.servers
    ]
    return tokens / sum(rates)
