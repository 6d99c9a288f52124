"""Metrics without a column: those the trainer and its loss name, and those a rollout backend does.

Whatever a step or a reading of a server has in its ``metrics_json`` is shown, so a new metric needs
no edit here or in what draws it. Of a batch's numbers a few are shown beside them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from libra_cli.core.records import SampleRecord, StepRecord

OF_BATCHES = (
    "reverse_kl",
    "share_without_signal",
    "share_truncated",
    "share_repeated",
    "share_unreadable",
    "reward_length_correlation",
)
"""Numbers of a batch that say whether it teaches anything."""


@dataclass(frozen=True, slots=True)
class FirstLast:
    """Means over the first and over the last steps; null where none has a finite value."""

    first: float | None
    last: float | None


def of_steps(steps: Sequence[StepRecord]) -> dict[str, list[float]]:
    """Name -> one value a step, NaN where the step does not have it."""
    return _columns([_named(step) for step in steps])


def _named(step: StepRecord) -> dict[str, float | None]:
    batch = step.batch
    return step.metrics | {name: batch[name] for name in OF_BATCHES if name in batch}


def of_servers(
    samples: Iterable[SampleRecord], steps: Sequence[StepRecord]
) -> dict[str, list[float]]:
    """Name -> one value a step: the mean over the readings of all servers that were taken since the
    step before ended; NaN where there is none."""
    ends = [step.ended_at for step in steps]
    readings: list[list[SampleRecord]] = [[] for _ in steps]
    for sample in samples:
        at = bisect_left(ends, sample.at)
        if at < len(ends):
            readings[at].append(sample)
    return _columns([mean_of_servers(each) for each in readings])


def mean_of_servers(samples: Iterable[SampleRecord]) -> dict[str, float | None]:
    """Return for each metric its mean over these readings; None if none of them is finite."""
    return mean_by_name(sample.metrics for sample in samples)


def mean_by_name(rows: Iterable[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Name -> the mean over the rows that have a number there; null if none has."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).extend(() if value is None else (value,))
    return {name: _mean(found) for name, found in values.items()}


def first_last(steps: Sequence[StepRecord], recent: int) -> dict[str, FirstLast]:
    """Name -> its means over the first and over the last ``recent`` steps."""
    return {
        name: FirstLast(_mean(values[:recent]), _mean(values[-recent:]))
        for name, values in of_steps(steps).items()
    }


def told(metrics: Mapping[str, float | None]) -> str:
    """``loss 0.0113   grad_norm 0.852``: all of them in one line."""
    shown = ((name, "–" if value is None else f"{value:.3g}") for name, value in metrics.items())
    return "   ".join(f"{name} {value}" for name, value in shown)


def _columns(rows: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_number(row.get(name)) for row in rows] for name in names}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None
