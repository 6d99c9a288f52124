"""What a run asks of frozen models at this moment, which is in none of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from libra_cli.core.model_use import ModelUse
from libra_cli.core.rollout.active import ActiveTrajectory, Stage
from libra_cli.core.run.assembly import RunParts
from libra_cli.core.workload import TrajectorySample

Member: TypeAlias = tuple[int, int, int]
"""The group, member and attempt numbers of a trajectory."""


@dataclass(frozen=True, slots=True)
class AskedNow:
    """The ``uses`` of frozen models since the newest step, and in ``all_uses`` since the controller
    began.

    ``asking`` are the trajectories that their environment has now, or who judges their tokens: as
    far as they have come, those that are there for longest first.
    """

    uses: tuple[ModelUse, ...] = ()
    all_uses: tuple[ModelUse, ...] = ()
    asking: Mapping[Member, TrajectorySample] = field(default_factory=dict)


def asked_now(parts: RunParts) -> AskedNow:
    """Read it from the parts of a run."""
    models = parts.ledger.models
    asking = [
        active
        for active in parts.rollout.active.values()
        if active.stage in (Stage.ADVANCING, Stage.TAUGHT)
    ]
    asking.sort(key=lambda active: active.asked_at)
    return AskedNow(
        models.since_step, models.since_begin, {one.trajectory.id: _so_far(one) for one in asking}
    )


def _so_far(active: ActiveTrajectory) -> TrajectorySample:
    trajectory = active.trajectory
    generated, context = max(1, trajectory.generated), len(trajectory.token_ids)
    prompt = min(active.prompt, max(0, context - generated))
    observed = max(0, context - generated - prompt)
    return TrajectorySample(prompt, generated, observed, max(1, trajectory.turns))
