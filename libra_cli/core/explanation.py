"""A decision explained: what was chosen, what came second and why not, what binds, what will come.

The planner makes one ``Explanation`` with every decision. It is kept as JSON with the decision, and
``libra status``, ``report.html`` and ``libra rebalance --dry-run`` show that one object.

A step is predicted with an interval for the mean of the next few steps. The error of a prediction e
is log(observed / predicted), and its square is expected to be ::

    s^2 = (PRIOR x (p^2 + v^2 / STEPS) + sum of e^2) / (PRIOR + n)
    interval = predicted x exp(-Z s) to predicted x exp(Z s)

over the ``n`` earlier decisions of the run of the same kind (to move, or to stay) of which it is
known what came. ``p`` is the error of such predictions in the simulator, ``v`` the standard
deviation of the measured steps over their mean.

Guarantee: the interval narrows to the run's own errors as these are known. Limit: they are taken to
be alike and unbiased; a workload that changes at once is outside any such interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from json import dumps
from math import exp, inf, log
from statistics import fmean, pstdev

from libra_cli.core.bound_choice import BoundChoice
from libra_cli.core.json_form import json_form
from libra_cli.core.types import Seconds

STEPS = 5
"""Steps whose mean a prediction is compared with."""
PRIOR = 2.0
"""Decisions that the simulator's error counts as. Chosen."""
Z = 1.28
"""The number of standard deviations within which four of five
values of a normal distribution lie.
"""
PRICED_ERROR = 0.30
"""Error of a step predicted by costs alone, when nothing is measured yet: |log(observed /
predicted)|, as the mean over 17 simulated plans.
"""
MOVED_ERROR = 0.15
"""Error of a step under another plan, predicted by costs that measured steps have corrected:
simulated on three traces, steady and drifting twofold, 0.16 in the root mean square (3 moves).
"""
KEPT_ERROR = 0.08
"""Error of a step under the present plan, predicted by such costs: 0.06 where nothing drifts and
0.12 over all of these runs (18 decisions, of which 14 had the observed step in the interval).
"""


class Constraint(StrEnum):
    """What bounds a step: the limits that a ``Binding`` names."""

    TRAINER_MEMORY = "trainer memory"
    KV_CACHE = "KV cache"
    SEATS = "seats"
    PROMPTS = "prompts"
    TOKENS = "tokens and KV reads"
    LONGEST_TRAJECTORY = "longest trajectory"
    STALENESS = "staleness rule"
    NETWORK = "network"
    TRAINING = "training arithmetic"
    MODELS = "frozen models"


@dataclass(frozen=True, slots=True)
class Binding:
    """The constraint that binds a placement, and a few words on where."""

    constraint: Constraint
    words: str

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True)
class PlanOption:
    """A placement in words, with its predicted seconds a step; infinite where it does not fit."""

    layout: str
    rollout_s: Seconds
    train_s: Seconds
    step_s: Seconds


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The placement that was not chosen, and why."""

    option: PlanOption
    why_not: str


@dataclass(frozen=True, slots=True)
class PastPrediction:
    """The step time that an earlier decision predicted, the mean
    observed, and whether slots moved.
    """

    moved: bool
    predicted_s: Seconds
    observed_s: Seconds

    @property
    def error(self) -> float:
        """The logarithm of observed over predicted seconds."""
        return log(self.observed_s / self.predicted_s)


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """Seconds of a step: four times of five the mean of ``STEPS`` steps lies within the interval.

    ``source`` says where the width comes from, ``corrected`` whether measured steps have corrected
    the costs.
    """

    step_s: Seconds
    low_s: Seconds
    high_s: Seconds
    source: str
    corrected: bool = True


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision. ``today`` and ``chosen`` are the same placement where nothing moves.

    ``cost_s`` and ``payback_steps`` are of the moves that were proposed, carried out or not;
    ``horizon_steps`` are the steps that they may count on. Infinite and unknown is null in JSON.
    """

    move: bool
    why_not: str
    today: PlanOption
    chosen: PlanOption
    runner_up: RunnerUp | None
    binds_today: Binding
    binds: Binding
    predicted: PredictedStep
    cost_s: Seconds
    payback_steps: float | None
    horizon_steps: float
    bound: BoundChoice | None = None
    """The staleness bound, where the planner chooses it."""
    shapes: str = ""
    """What servers of several shapes take beside alike ones, where ``rollout.shapes`` asks for
    them."""

    def of_first_plan(self) -> Explanation:
        """The same of the plan that a run begins with: nothing moves, and nothing was before."""
        return replace(
            self,
            move=False,
            why_not="",
            today=self.chosen,
            binds_today=self.binds,
            cost_s=0.0,
            payback_steps=None,
            horizon_steps=inf,
        )

    def to_json(self) -> str:
        """The object that is kept and shown."""
        return dumps(json_form(self))


def predicted_step(
    step_s: Seconds,
    *,
    moves: bool,
    measured: Sequence[Seconds],
    past: Sequence[PastPrediction],
) -> PredictedStep:
    """A predicted step with its interval; the law is the module's.

    ``measured`` are seconds of the newest steps under today's plan.
    """
    prior = (MOVED_ERROR if moves else KEPT_ERROR) if measured else PRICED_ERROR
    scatter = pstdev(measured) / fmean(measured) if len(measured) > 1 else 0.0
    alike = [one.error for one in past if one.moved is moves]
    expected = PRIOR * (prior**2 + scatter**2 / STEPS) + sum(error**2 for error in alike)
    factor = exp(Z * (expected / (PRIOR + len(alike))) ** 0.5)
    kind = "moves" if moves else "kept plans"
    source = f"errors of {kind} in the simulator" if measured else "errors of costs alone"
    if alike:
        source = f"errors of {len(alike)} {kind} of this run"
    return PredictedStep(
        step_s=step_s,
        low_s=step_s / factor,
        high_s=step_s * factor,
        source=source,
        corrected=bool(measured),
    )


def past_prediction(told: Explanation | None, observed_s: Seconds | None) -> PastPrediction | None:
    """Return the prediction of a kept explanation beside the observed step.

    None where either is not known, or nothing was measured yet: such errors are of another kind.
    """
    if told is None or not observed_s:
        return None
    known = told.predicted.corrected and 0 < told.predicted.step_s < inf
    return PastPrediction(told.move, told.predicted.step_s, observed_s) if known else None
