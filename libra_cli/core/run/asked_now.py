"""What a run asks of frozen models at this moment, which is in none of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from libra_cli.core.model_use import ModelUse
from libra_cli.core.observed.under_way import Member
from libra_cli.core.rollout.active import ActiveTrajectory, Stage
from libra_cli.core.run.assembly import RunParts
from libra_cli.core.types import Seconds
from libra_cli.core.workload import TrajectorySample


@dataclass(frozen=True, slots=True)
class Asking:
    """A trajectory that waits for its environment or its judge: the tokens and turns that it has,
    without its seconds in tools, and when its last turn was asked for."""

    so_far: TrajectorySample
    queued_at: Seconds


@dataclass(frozen=True, slots=True)
class AskedNow:
    """The ``uses`` of frozen models since the newest step, in ``all_uses`` since the controller
    began, and the trajectories that wait for their environment or for who judges their tokens:
    those first that have played all their turns, then those that have waited longest."""

    uses: tuple[ModelUse, ...] = ()
    all_uses: tuple[ModelUse, ...] = ()
    asking: Mapping[Member, Asking] = field(default_factory=dict)


def asked_now(parts: RunParts) -> AskedNow:
    """Return what the run asks of frozen models now."""
    models = parts.ledger.models
    asking = [
        active
        for active in parts.rollout.active.values()
        if active.stage in (Stage.ADVANCING, Stage.TAUGHT)
    ]
    asking.sort(key=lambda active: (active.stage is not Stage.TAUGHT, active.asked_at))
    return AskedNow(
        models.since_step, models.since_begin, {one.trajectory.id: _asking(one) for one in asking}
    )


def _asking(active: ActiveTrajectory) -> Asking:
    trajectory = active.trajectory
    generated, context = max(1, trajectory.generated), len(trajectory.token_ids)
    prompt = min(active.prompt, max(0, context - generated))
    observed = max(0, context - generated - prompt)
    so_far = TrajectorySample(prompt, generated, observed, max(1, trajectory.turns))
    return Asking(so_far, active.queued_at)
