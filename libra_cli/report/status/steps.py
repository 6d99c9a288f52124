"""What the steps of a run say: reward, lengths, speed, staleness, idle time, checkpoint.

A number nobody knows yet is None, and so is the mean of nothing. Times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from libra_cli.core.records import SampleRecord, SlotRecord, StepRecord
from libra_cli.report.status.metrics import FirstLast
from libra_cli.runtime.store.joined_rows import TrajectoryCounts
from libra_cli.runtime.store.reader import Reader

IMITATES = "token_accuracy"
"""A metric that steps on demonstrations have, and no others."""
RECENT = 10
"""The last so many steps are what is called recent."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Generated tokens a trajectory, over the last ``RECENT`` steps."""

    mean: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Staleness:
    """Versions between a token's and the trainer's; ``histogram`` counts trajectories by it."""

    mean: float | None
    max: int | None
    histogram: dict[str, int]


@dataclass(frozen=True, slots=True)
class IdlePart:
    """Shares of time: of the servers without a request, of the trainer without a batch."""

    rollout: float | None
    training: float | None
    recent_rollout: float | None
    recent_training: float | None


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """The newest checkpoint; ``path`` is on the host of the trainer's rank 0."""

    step: int
    path: str


def mean(values: Iterable[float]) -> float | None:
    """The mean of the values that are finite; None if there is none."""
    known = [value for value in values if math.isfinite(value)]
    return fmean(known) if known else None


def largest(values: Iterable[float]) -> float | None:
    """The largest of the values that are finite; None if there is none."""
    return max((value for value in values if math.isfinite(value)), default=None)


def _weighted(
    steps: Sequence[StepRecord],
    value: Callable[[StepRecord], float],
    weight: Callable[[StepRecord], float],
) -> float | None:
    known = [(value(step), weight(step)) for step in steps if math.isfinite(value(step))]
    total = sum(weight_ for _, weight_ in known)
    return sum(value_ * weight_ for value_, weight_ in known) / total if total else None


def reward(steps: Sequence[StepRecord]) -> FirstLast:
    """Return the mean reward of the first and of the last ``RECENT`` steps."""
    return FirstLast(
        mean(step.reward for step in steps[:RECENT]),
        mean(step.reward for step in steps[-RECENT:]),
    )


class Yardstick(NamedTuple):
    """What a run is judged by, one value a step."""

    name: str
    """``reward``, or on demonstrations, of which all have the same, ``loss``."""
    values: list[float]
    unit: str

    @property
    def change(self) -> FirstLast:
        """Means over the first and over the last ``RECENT`` steps."""
        return FirstLast(mean(self.values[:RECENT]), mean(self.values[-RECENT:]))


def yardstick(steps: Sequence[StepRecord]) -> Yardstick:
    """What the steps of a run are judged by."""
    metrics = steps[-1].metrics if steps else {}
    if IMITATES not in metrics:
        return Yardstick("reward", [step.reward for step in steps], "")
    losses = [step.metrics.get("loss") for step in steps]
    return Yardstick("loss", [math.nan if one is None else one for one in losses], "nats a token")


def logprob_gap(steps: Sequence[StepRecord]) -> float | None:
    """Mean over the steps that measured one, weighted by the tokens compared."""
    return _weighted(_measured(steps), _gap, lambda step: step.logprob_gap_tokens)


def logprob_gap_max(steps: Sequence[StepRecord]) -> float | None:
    """Return the largest gap of a step in nats; None if no step measured one."""
    return largest(_gap(step) for step in _measured(steps))


def _measured(steps: Sequence[StepRecord]) -> list[StepRecord]:
    return [step for step in steps if step.logprob_gap is not None]


def _gap(step: StepRecord) -> float:
    return math.nan if step.logprob_gap is None else step.logprob_gap


def step_s(steps: Sequence[StepRecord]) -> float | None:
    """Mean seconds from step to step, over the last ``RECENT``."""
    return mean(step.period_s for step in steps[-RECENT:])


def lengths(steps: Sequence[StepRecord]) -> Lengths:
    """Return generated tokens a trajectory, over the last ``RECENT`` steps that trained any: the
    mean, and the largest p99 of a step. Both are None if there is no such step.
    """
    recent = [step for step in steps[-RECENT:] if step.mean_length > 0]
    trajectories = sum(step.generated_tokens / step.mean_length for step in recent)
    return Lengths(
        mean=sum(s.generated_tokens for s in recent) / trajectories if trajectories else None,
        p99=largest(step.p99_length for step in recent),
    )


def tokens_per_s(steps: Sequence[StepRecord], samples: Iterable[SampleRecord]) -> float | None:
    """Generated tokens a second, of the last steps, or of the servers before the first step."""
    recent = [step for step in steps[-RECENT:] if step.tokens_per_s > 0]
    if recent:
        seconds = sum(step.generated_tokens / step.tokens_per_s for step in recent)
        return sum(step.generated_tokens for step in recent) / seconds if seconds else None
    speeds = [sample.tokens_per_s for sample in samples]
    return sum(speeds) if speeds else None


def staleness(reader: Reader, steps: Sequence[StepRecord]) -> Staleness:
    """Means weighted by generated tokens, and the count of trained trajectories."""
    histogram = reader.staleness_histogram()
    return Staleness(
        mean=_weighted(steps, lambda step: step.staleness_mean, lambda step: step.generated_tokens),
        max=max((step.staleness_max for step in steps), default=None),
        histogram={str(staleness): count for staleness, count in histogram.items()},
    )


def trajectories(reader: Reader, *, live: bool) -> TrajectoryCounts:
    """``live``: the run has not ended, so what runs may still finish."""
    counts = reader.trajectory_counts()
    # What was playing when the run ended was never finished, and nobody will.
    over = replace(counts, in_flight=0, dropped=counts.dropped + counts.in_flight)
    return counts if live else over


def recent_samples(reader: Reader, steps: Sequence[StepRecord]) -> list[SampleRecord]:
    """The samples of the last steps; none before the first."""
    recent = steps[-RECENT:]
    return reader.samples(recent[0].free_at) if recent else []


def idle(
    samples: Sequence[SampleRecord], steps: Sequence[StepRecord], slots: Sequence[SlotRecord]
) -> IdlePart:
    """The idle shares of the whole run and of the last ``RECENT`` steps, which ``samples`` are
    of.
    """
    servers = [slot for slot in slots if not slot.is_frozen]
    serving = sum(slot.serving_s for slot in servers)
    busy = sum(slot.busy_s for slot in servers)
    return IdlePart(
        rollout=max(0.0, 1 - busy / serving) if serving else None,
        training=_waited_share(steps),
        recent_rollout=mean(float(sample.running == 0) for sample in samples),
        recent_training=_waited_share(steps[-RECENT:]),
    )


def _waited_share(steps: Sequence[StepRecord]) -> float | None:
    total = sum(step.period_s for step in steps)
    return sum(step.waited_s for step in steps) / total if total else None


def checkpoint(steps: Sequence[StepRecord]) -> CheckpointPart | None:
    """Return the newest checkpoint; None if no step wrote one."""
    for step in reversed(steps):
        if step.checkpoint:
            return CheckpointPart(step.step, step.checkpoint)
    return None


def smooth(values: Sequence[float]) -> list[float]:
    """A centred moving mean over about an eighth of the run; the nearer weighs more, and what is
    not finite is left out."""
    half = max(2, len(values) // 14)
    weights = [1 - (distance / (half + 1)) ** 2 for distance in range(half + 1)]
    return [_around(values, at, weights) for at in range(len(values))]


def _around(values: Sequence[float], at: int, weights: Sequence[float]) -> float:
    half = len(weights) - 1
    near = range(max(0, at - half), min(len(values), at + half + 1))
    known = [(values[i], weights[abs(i - at)]) for i in near if math.isfinite(values[i])]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else math.nan
