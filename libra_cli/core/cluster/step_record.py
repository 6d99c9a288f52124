"""Makes the row of a step that is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json import dumps
from statistics import fmean
from typing import Any

from libra_cli.core.actions import TrainSample
from libra_cli.core.events import StepDone
from libra_cli.core.records import StepRecord, to_metrics_json
from libra_cli.core.rollout.environment_metrics import environment_metrics
from libra_cli.core.rollout.groups import Group
from libra_cli.core.types import Seconds, TrajectoryId

_WITH_A_PLACE = frozenset(
    {"logprob_gap", "logprob_gap_tokens", "generated_tokens", "trainer_s", "own_tokens", "own_s"}
)
"""Metrics of the trainer that have a column of their own, or serve only to learn speeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeriod:
    """When a step's batch, or the first part of it, was claimed and the step done; for how long
    which half waited.
    """

    began: Seconds
    ended: Seconds
    waited_s: Seconds
    """Seconds that the trainer waited for a batch, or for parts of it."""
    between_s: Seconds
    """Seconds of ``waited_s`` after ``began``, between the parts of a streamed step."""
    held_s: Seconds
    """Seconds of ``waited_s`` in which a full batch waited for groups at their last call."""


def step_record(
    event: StepDone,
    samples: Sequence[TrainSample],
    times: StepPeriod,
    batch_metrics: dict[str, Any],
    groups: Sequence[Any],
) -> StepRecord:
    """Return the row of a step that was trained on these samples."""
    oldest: dict[TrajectoryId, int] = {}
    for sample in samples:
        who = sample.trajectory.id
        oldest[who] = max(oldest.get(who, 0), sample.staleness)
    staleness = list(oldest.values())
    members = [sample.trajectory for sample in samples if sample.branch is None]
    lengths = sorted(member.generated for member in members)
    metrics = event.metrics
    period_s = times.ended - times.began + times.waited_s - times.between_s
    return StepRecord(
        step=event.step,
        started_at=times.began,
        ended_at=times.ended,
        waited_s=times.waited_s,
        held_s=times.held_s,
        between_parts_s=times.between_s,
        reward=fmean(member.reward or 0.0 for member in members),
        logprob_gap=metrics.get("logprob_gap"),
        logprob_gap_tokens=int(metrics.get("logprob_gap_tokens") or 0),
        generated_tokens=sum(lengths),
        context_tokens=sum(len(sample.tokens.token_ids) for sample in samples),
        mean_length=fmean(lengths),
        p99_length=float(lengths[int(0.99 * (len(lengths) - 1))]),
        staleness_mean=fmean(staleness),
        staleness_max=max(staleness),
        tokens_per_s=sum(lengths) / max(period_s, 1e-9),
        trainer_s=metrics.get("trainer_s") or 0.0,
        checkpoint="",
        metrics_json=to_metrics_json(
            {name: value for name, value in metrics.items() if name not in _WITH_A_PLACE}
            | environment_metrics(members)
        ),
        batch_json=to_metrics_json(batch_metrics),
        groups_json=dumps(groups),
    )


def mean_reward(groups: Iterable[Group]) -> float:
    """Return the mean reward of all trajectories of these groups."""
    return fmean(member.reward or 0.0 for group in groups for member in group.members)
