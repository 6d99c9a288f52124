"""Computes the rows of the report's timeline: the states of every slot, and how busy it was.

A slot's states come from the table ``slot_states``; how busy it was from the samples of its server,
or for the trainer's slots from the steps. Of a streamed step only the sum of its waits is recorded:
they are spread evenly over it. The run is cut into bins, so that a long one gives a drawing of the
same size. A bin shows the most important of its states, so that a short failure or move is not too
thin to be seen.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from libra_cli.core.records import SampleRecord, SlotStateRecord, StepRecord
from libra_cli.report.html.charts import TimelineRow
from libra_cli.runtime.store.reader import Reader

SHADES = {
    "serving": "serving",
    "training": "training (core)",
    "gradient": "training (gradient worker)",
    "draining": "draining",
    "stopping": "stopping",
    "starting": "starting",
    "syncing": "syncing",
    "idle": "idle",
    "failed": "failed, unreachable",
}
"""The shades of a row, by their page variable, with the words of the legend."""
_SHADE_OF = {
    "joining": "syncing",
    "unreachable": "failed",
    "falling asleep": "stopping",
    "asleep": "idle",
    "waking": "starting",
}
"""The shades of states that are not called after one."""
_SHORT = ("draining", "stopping", "starting", "syncing")
_STATE_BINS = 400
_BINS = 200
_SILENT_S = 10.0


def slot_rows(
    reader: Reader, steps: Sequence[StepRecord], *, began: float, seconds: float
) -> list[TimelineRow]:
    """Return a row for each slot, over ``seconds`` from ``began`` (seconds since the epoch).

    Its states are keys of ``SHADES``.
    """
    if seconds <= 0:
        return []
    edges = [seconds * index / _BINS for index in range(_BINS + 1)]
    samples: dict[str, list[SampleRecord]] = {}
    for sample in reader.samples():
        samples.setdefault(sample.slot, []).append(sample)
    history: dict[str, list[SlotStateRecord]] = {}
    for state in reader.slot_history():
        history.setdefault(state.slot, []).append(state)
    rows = []
    for slot, states in history.items():
        spans = _spans(states, began, seconds)
        if any(state.role == "train" for state in states):
            busy, colour = _training_bins(steps, began, seconds), "training"
        else:
            busy, colour = _running_bins(samples.get(slot, []), began, seconds), "serving"
        rows.append(TimelineRow(slot, spans, edges, busy, colour))
    return rows


def _spans(
    states: Sequence[SlotStateRecord], began: float, seconds: float
) -> list[tuple[float, float, str]]:
    """Return the shade of each bin as (start, end, shade), with equal neighbours joined."""
    shades = [""] * _STATE_BINS
    ends = [state.since for state in states[1:]] + [began + seconds]
    for state, end in zip(states, ends, strict=True):
        first = int((state.since - began) / seconds * _STATE_BINS)
        last = math.ceil((end - began) / seconds * _STATE_BINS)
        for at in range(max(0, first), min(_STATE_BINS, max(last, first + 1))):
            shades[at] = max(shades[at], _shade(state), key=_weight)
    width = seconds / _STATE_BINS
    spans: list[tuple[float, float, str]] = []
    for at, name in enumerate(shades):
        if spans and spans[-1][2] == name:
            spans[-1] = (spans[-1][0], (at + 1) * width, name)
        else:
            spans.append((at * width, (at + 1) * width, name))
    return spans


def _shade(state: SlotStateRecord) -> str:
    if state.state == "training":
        return "gradient" if state.role == "gradient" else "training"
    return _SHADE_OF.get(state.state, state.state)


def _weight(shade: str) -> int:
    """Rank a shade: of several in one bin the one with the largest weight is drawn."""
    if shade == "failed":
        return 4
    if shade in _SHORT:
        return 3
    return 1 if shade == "idle" else 2 * bool(shade)


def _running_bins(samples: Sequence[SampleRecord], began: float, seconds: float) -> list[float]:
    """Return for each bin the mean share of a server's ``max_num_seqs`` that was running.

    A bin without a sample repeats the one before, for up to ``_SILENT_S``.
    """
    sums, counts = [0.0] * _BINS, [0] * _BINS
    for sample in samples:
        at = int((sample.at - began) / seconds * _BINS)
        if 0 <= at < _BINS:
            sums[at] += sample.occupancy
            counts[at] += 1
    shares, silent_for = [0.0] * _BINS, 0.0
    for at in range(_BINS):
        silent_for = 0.0 if counts[at] else silent_for + seconds / _BINS
        if counts[at]:
            shares[at] = sums[at] / counts[at]
        elif at and silent_for < _SILENT_S:
            shares[at] = shares[at - 1]
    return shares


def _training_bins(steps: Sequence[StepRecord], began: float, seconds: float) -> list[float]:
    """Return for each bin the share in which the trainer worked on a step."""
    width = seconds / _BINS
    edges = [began + width * index for index in range(_BINS + 1)]
    shares = [0.0] * _BINS
    for step in steps:
        first = max(0, bisect.bisect_right(edges, step.started_at) - 1)
        for at in range(first, _BINS):
            inside = min(step.ended_at, edges[at + 1]) - max(step.started_at, edges[at])
            if inside <= 0:
                break
            shares[at] = min(1.0, shares[at] + step.train_share * inside / width)
    return shares
