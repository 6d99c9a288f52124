"""What ``libra rebalance --dry-run`` tells: the object of ``--json``.

Seconds are of one step unless a name says otherwise; a number nobody knows is null. The columns of
``times``:

    measured    what the run's steps took: each half busy, and from step to step
    priced      predicted for the plan now with the prices as they are
    now         the same with the prices corrected by measured over priced (``corrections``)
    proposed    predicted for the plan proposed, with the corrected prices; what the verdict is from
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from libra_cli.core.bound_choice import PricedBound
from libra_cli.core.explanation import Explanation
from libra_cli.core.records import PlannedServer

FORMAT = 1


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds a step of either half, and of both as they overlap."""

    rollout_s: float | None
    train_s: float | None
    step_s: float | None


@dataclass(frozen=True, slots=True)
class TimesPart:
    """The four columns of ``times``, as this module's docstring explains them."""

    measured: StageTimes
    priced: StageTimes
    now: StageTimes
    proposed: StageTimes


@dataclass(frozen=True, slots=True)
class StageIdle:
    """Shares of a step in which either half waits."""

    rollout: float | None
    training: float | None


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Which slots serve and which train, and the GPUs of each half."""

    servers: list[PlannedServer]
    train: list[str]
    gradient: list[str]
    rollout_gpus: int
    training_gpus: int


@dataclass(frozen=True, slots=True)
class SlotMoveTold:
    """A slot that would move, and the seconds for which it would be idle."""

    SHOWN: ClassVar[Mapping[str, str]] = {"from": "from_role", "to": "to_role"}
    slot: str
    from_role: str
    to_role: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """The trajectories that were planned for: lengths in tokens, tool time in seconds."""

    source: str
    trajectories: int
    seen: int
    mean_generated: float
    mean_context: float
    longest_context: int
    tool_s: float
    overlap: float


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """The prices that were planned with, and where they come from."""

    name: str
    gpu: str
    model: str
    source: str
    provenance: dict[str, str]
    servers: list[dict[str, float]]
    training: dict[str, float]


@dataclass(frozen=True, slots=True)
class Corrections:
    """Measured over priced seconds, by which each half's prices are multiplied."""

    rollout: float
    training: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to move, why not, and what moving gains and costs."""

    move: bool
    why_not: str
    gain_s: float | None
    cost_s: float
    payback_steps: float | None
    horizon_steps: float | None


@dataclass(frozen=True, slots=True)
class RebalanceResult:
    """The object of ``libra rebalance --dry-run --json``; ``libra help planner`` has its keys."""

    format: int
    of: str
    name: str
    state: str
    step: int | None
    target_steps: int
    profile: ProfileResult
    workload: WorkloadResult
    idle: StageIdle
    plan: PlanResult
    proposed: PlanResult
    times: TimesPart
    corrections: Corrections
    moves: list[SlotMoveTold]
    verdict: Verdict
    explanation: Explanation | None
    bounds: list[PricedBound]
    reasons: list[str]
    notes: list[str]
