"""``report.html``: one run in one file that opens without a network.

Everything is inside: drawings as SVG, a few lines of CSS, no script. It follows the reader's light
or dark setting. It is made from the database alone, so it can be made again at any time.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra_cli import __version__
from libra_cli.core.records import SampleRecord, StepRecord, SyncRecord
from libra_cli.edge.console import duration, number
from libra_cli.edge.monitors import Summary, smooth, summary, sync_times
from libra_cli.edge.reader import Reader, SlotState
from libra_cli.errors import StateError

if TYPE_CHECKING:
    from libra_cli.edge.charts import Row

REPORT = "report.html"
_TEMPLATE = "report.html.j2"
_BINS = 200
_SILENT_S = 10.0
_MAX_ROWS = 200
"""Rows of the step table; a longer run shows evenly spread ones."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing with the words around it. ``keys`` are (colour variable, shape, meaning)."""

    title: str
    unit: str
    svg: str
    keys: Sequence[tuple[str, str, str]] = ()
    wide: bool = False


def write_report(run_dir: Path, *, now: float, tolerance: float = 1e-3) -> Path:
    """Write ``report.html`` into the run directory. ``tolerance`` is ``weight_sync.tolerance``.

    Raises:
        StateError: there is no run to read, or no room to write.
    """
    import jinja2  # here, not above: a command that writes no report need not wait for it

    with Reader(run_dir) as reader:
        told = summary(reader, now=now)
        steps = reader.steps()
        context: dict[str, Any] = {
            "told": told,
            "charts": _charts(reader, told, steps, tolerance),
            "tiles": _tiles(told, tolerance),
            "steps": _spread(steps),
            "tools": reader.tool_outcomes(),
            "when": lambda at: (
                datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
            ),
            "duration": duration,
            "number": number,
            "version": __version__,
        }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_template_dirs()),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template(_TEMPLATE).render(context)
    path, unfinished = run_dir / REPORT, run_dir / f".{REPORT}.tmp"
    try:
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise StateError(f"cannot write {path}: {error}") from error
    return path


def _template_dirs() -> list[str]:
    """In an installed package beside the code, in a checkout beside the package."""
    here = Path(__file__).resolve()
    return [str(here.parents[1] / "templates"), str(here.parents[2] / "templates")]


def _tiles(told: Summary, tolerance: float) -> list[tuple[str, str, str]]:
    """(name, value, what it says) of the row of numbers on top."""
    reward, staleness, sync = told["reward"], told["staleness"], told["sync"]
    idle, gap = told["idle"], told["logprob_gap"]
    verdict = f"{sync['failed']} not verified" if sync["failed"] else "every one verified"
    return [
        (
            "reward",
            f"{number(reward['first'], '.2f')} → {number(reward['last'], '.2f')}",
            "first and last 10 steps",
        ),
        (
            "speed",
            number(told["tokens_per_s"], ",.0f"),
            f"tokens/s, {number(told['step_s'], '.2g')} s a step",
        ),
        (
            "staleness",
            number(staleness["mean"], ".2f"),
            f"versions behind, at most {number(staleness['max'])}",
        ),
        (
            "log-probability gap",
            number(gap, ".1e"),
            f"rollout to trainer, tolerance {tolerance:g}",
        ),
        (
            "weight sync",
            number(sync["mean_s"], ".2f", " s"),
            f"{sync['versions']} versions, {verdict}",
        ),
        (
            "idle",
            f"{number(idle['rollout'], '.0%')} · {number(idle['training'], '.0%')}",
            "of rollout · of training",
        ),
    ]


def _charts(
    reader: Reader, told: Summary, steps: Sequence[StepRecord], tolerance: float
) -> list[Chart]:
    charts = [*_step_charts(steps, tolerance), *_sync_chart(reader.syncs())] if steps else []
    rows = _rows(reader, told, steps)
    if rows:
        from libra_cli.edge.charts import timeline

        seconds = told["run"]["elapsed_s"]
        keys = (
            ("a", "box", "seats taken"),
            ("b", "box", "training"),
            ("warn", "box", "starting, joining, stopping"),
            ("bad", "box", "failed or unreachable"),
        )
        svg = timeline("slots", rows, seconds=seconds)
        charts.append(Chart("Slots", "minutes:seconds since the start", svg, keys, wide=True))
    return charts


def _step_charts(steps: Sequence[StepRecord], tolerance: float) -> list[Chart]:
    from libra_cli.edge.charts import Series, over_steps

    xs = [float(step.step) for step in steps]

    def both(values: Sequence[float], colour: str = "a") -> list[Series]:
        return [Series(xs, values, colour, "points"), Series(xs, smooth(values), colour)]

    rewards = [step.reward for step in steps]
    means, p99s = [step.mean_length for step in steps], [step.p99_length for step in steps]
    speeds = [step.tokens_per_s for step in steps]
    stale = [step.staleness_mean for step in steps]
    oldest = [float(step.staleness_max) for step in steps]
    waits, works = [s.waited_s for s in steps], [s.ended_at - s.started_at for s in steps]
    pair = (("a", "dot", "one step"), ("a", "line", "smoothed"))
    charts = [
        Chart(
            "Reward",
            "mean over the trajectories of a step",
            over_steps("reward", both(rewards), width=1080, height=270),
            pair,
            wide=True,
        ),
        Chart(
            "Trajectory length",
            "generated tokens",
            over_steps("length", [*both(means), Series(xs, smooth(p99s), "b")], floor=1.0),
            (("a", "line", "mean"), ("b", "line", "99th percentile")),
        ),
        Chart(
            "Speed",
            "generated tokens per second",
            over_steps("speed", both(speeds), floor=1.0),
            pair,
        ),
        Chart(
            "Staleness",
            "versions behind the trainer",
            over_steps("staleness", [*both(stale), Series(xs, oldest, "b", "dashes")], floor=1.2),
            (("a", "line", "mean"), ("b", "dash", "largest")),
        ),
        Chart(
            "Time of a step",
            "seconds",
            over_steps("time", [*both(works), *both(waits, "b")], floor=0.1),
            (("a", "line", "the trainer works"), ("b", "line", "the trainer waits")),
        ),
    ]
    gaps = [(s.step, s.logprob_gap) for s in steps if s.logprob_gap]
    if gaps:
        gap_xs, gap_ys = [float(step) for step, _ in gaps], [gap for _, gap in gaps]
        series = [Series(gap_xs, gap_ys, "a", "points"), Series(gap_xs, smooth(gap_ys), "a")]
        svg = over_steps("gap", series, log=True, limit=tolerance)
        keys = (*pair, ("bad", "dash", f"tolerance {tolerance:g}"))
        charts.append(Chart("Log-probability gap", "mean |rollout - trainer|", svg, keys))
    return charts


def _sync_chart(syncs: Sequence[SyncRecord]) -> list[Chart]:
    from libra_cli.edge.charts import Series, over_steps

    times = sync_times(syncs)
    if not times:
        return []
    xs, ys = [float(version) for version in times], list(times.values())
    series = [Series(xs, ys, "a", "points"), Series(xs, smooth(ys), "a")]
    unit = "seconds until the last server has it"
    keys = (("a", "dot", "one version"), ("a", "line", "smoothed"))
    return [Chart("Weight sync", unit, over_steps("sync", series, floor=0.1), keys)]


def _rows(reader: Reader, told: Summary, steps: Sequence[StepRecord]) -> list[Row]:
    from libra_cli.edge.charts import Row

    began, seconds = told["run"]["started_at"], told["run"]["elapsed_s"]
    if seconds <= 0:
        return []
    edges = [seconds * index / _BINS for index in range(_BINS)]
    samples: dict[str, list[SampleRecord]] = {}
    for sample in reader.samples():
        samples.setdefault(sample.slot, []).append(sample)
    history: dict[str, list[SlotState]] = {}
    for state in reader.slot_history():
        history.setdefault(state.slot, []).append(state)
    rows = []
    for slot, states in history.items():
        spans = _spans(states, began, seconds)
        if any(state.role == "train" for state in states):
            busy, colour = _training_bins(steps, began, seconds), "b"
        else:
            busy, colour = _running_bins(samples.get(slot, []), began, seconds), "a"
        rows.append(Row(slot, spans, edges, busy, colour))
    return rows


def _spans(
    states: Sequence[SlotState], began: float, seconds: float
) -> list[tuple[float, float, str]]:
    """What each bin is shaded for: the worst state in it, so that none is too short to be seen."""
    worst = [""] * _BINS
    ends = [state.since for state in states[1:]] + [began + seconds]
    for state, end in zip(states, ends, strict=True):
        first = int((state.since - began) / seconds * _BINS)
        last = math.ceil((end - began) / seconds * _BINS)
        for at in range(max(0, first), min(_BINS, max(last, first + 1))):
            worst[at] = max(worst[at], state.state, key=_badness)
    width = seconds / _BINS
    spans: list[tuple[float, float, str]] = []
    for at, name in enumerate(worst):
        if spans and spans[-1][2] == name:
            spans[-1] = (spans[-1][0], (at + 1) * width, name)
        else:
            spans.append((at * width, (at + 1) * width, name))
    return spans


def _badness(state: str) -> int:
    if state in ("failed", "unreachable"):
        return 3
    return 2 if state in ("starting", "joining", "stopping") else bool(state)


def _running_bins(samples: Sequence[SampleRecord], began: float, seconds: float) -> list[float]:
    """The mean share of a server's seats that were taken in each bin.

    A bin without a sample repeats the one before, unless the server was silent for long.
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
    """The share of each bin that the trainer spent in a step."""
    width = seconds / _BINS
    edges = [began + width * index for index in range(_BINS + 1)]
    shares = [0.0] * _BINS
    for step in steps:
        first = max(0, bisect.bisect_right(edges, step.started_at) - 1)
        for at in range(first, _BINS):
            inside = min(step.ended_at, edges[at + 1]) - max(step.started_at, edges[at])
            if inside <= 0:
                break
            shares[at] = min(1.0, shares[at] + inside / width)
    return shares


def _spread(steps: Sequence[StepRecord]) -> list[StepRecord]:
    every = max(1, math.ceil(len(steps) / _MAX_ROWS))
    return [step for index, step in enumerate(steps) if index % every == 0 or step is steps[-1]]
