"""Writes ``report.html``, which shows one run in one file that opens without a network.

It holds drawings as SVG, a few lines of CSS and no script (``libra serve`` adds one; what the page
itself may load is nothing at all), and follows the reader's light or dark setting. The trajectories
in it are chosen among by CSS. What models and tools wrote is hostile: it is escaped, and nothing in
it changes the order of writing. The report is made from the run directory alone, so it can be made
again at any time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from libra_cli import __version__
from libra_cli.config.errors import StateError
from libra_cli.core.records import (
    DecisionRecord,
    EvaluationRecord,
    PlanRecord,
    StepRecord,
    SyncRecord,
)
from libra_cli.report.html.charts import Band, Series, over_steps, timeline
from libra_cli.report.html.slot_rows import SHADES, slot_rows
from libra_cli.report.html.templates import template
from libra_cli.report.status.evaluations import finished
from libra_cli.report.status.metrics import of_servers, of_steps
from libra_cli.report.status.migration_impact import migration_impacts
from libra_cli.report.status.plans import PHASES, MovePart, changes, phase_seconds
from libra_cli.report.status.steps import RECENT, smooth, yardstick
from libra_cli.report.status.summary import RunSummary, judged_by, summary
from libra_cli.report.status.syncs import sync_times
from libra_cli.report.terminal.console import duration, number, shorter, took
from libra_cli.report.trajectories.sample import by_turn_count, filters_of, sample, shortened
from libra_cli.runtime.store.reader import Reader

REPORT = "report.html"
_TEMPLATE = "report.html.j2"
_MAX_ROWS = 200
"""The most rows of the step table; a longer run shows evenly spread ones."""
_NEWEST = 40
"""The most rows of the tables of decisions, plans and moves, which show the newest ones."""
_OFF_THE_CHART = 5
"""Times as long as all others that the first wait is, from which on it is told in words."""
SMOOTHED = (("a", "dot", "one step"), ("a", "line", "smoothed"))
"""The key of a chart with a point for every step and a smoothed line."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing with its title and its key, as (colour variable, shape, meaning).

    ``narrow`` is drawn in place of ``svg`` on a narrow screen, where one is given.
    """

    title: str
    unit: str
    svg: str
    keys: Sequence[tuple[str, str, str]] = ()
    wide: bool = False
    narrow: str = ""


def write_report(run_dir: Path, *, now: float, tolerance: float | None = None) -> Path:
    """Write ``report.html`` into the run directory and return its path; see ``report_page``.

    Raises:
        StateError: there is no run to read, or the file cannot be written.
    """
    page = report_page(run_dir, now=now, tolerance=tolerance)
    path, unfinished = run_dir / REPORT, run_dir / f".{REPORT}.tmp"
    try:
        unfinished.touch(mode=0o600)
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise StateError(f"cannot write {path}: {error}") from error
    return path


def report_page(
    run_dir: Path, *, now: float, tolerance: float | None = None, script: str = ""
) -> str:
    """Return the report as HTML.

    ``now`` is in seconds since the epoch, ``tolerance`` is ``weight_sync.tolerance`` in nats,
    None where none was set, ``script`` the address of a script that draws it again, or empty.

    Raises:
        StateError: there is no run to read.
    """
    import jinja2  # here, so that commands that write no report start faster

    with Reader(run_dir) as reader:
        status = summary(reader, now=now)
        steps, sampled = reader.steps(), sample(reader)
        context: dict[str, Any] = {
            "status": status,
            "charts": _charts(reader, status, steps, tolerance),
            "tiles": _tiles(status, tolerance),
            "steps": _spread(steps),
            "metric_names": list(status.metrics),
            "decisions": status.decisions[-_NEWEST:],
            "plans": _plan_rows(status.plans)[-_NEWEST:],
            "moves": status.moves[-_NEWEST:],
            "phases": _phases(status.moves[-_NEWEST:]),
            "others": migration_impacts(reader, status.moves[-_NEWEST:]),
            "phase_seconds": phase_seconds,
            "shorter": shorter,
            "took": took,
            "tools": reader.tool_outcomes(),
            "sampled": sampled,
            "filters": filters_of(sampled),
            "turn_counts": by_turn_count(reader, steps[-RECENT:]),
            "shortened": shortened,
            "when": lambda at: (
                datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
            ),
            "duration": duration,
            "number": number,
            "version": __version__,
            "script": script,
        }
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(template(_TEMPLATE)).render(context)


def _tiles(status: RunSummary, tolerance: float | None) -> list[tuple[str, str, str]]:
    """The row of numbers on top, as (name, value, explanation)."""
    (judged, change), staleness, sync = judged_by(status), status.staleness, status.sync
    idle, gap, over = status.idle, status.logprob_gap, status.batches.share_over_bound
    ages = f"versions behind, at most {number(staleness.max)}"
    if over:
        ages += f"; {over:.1%} of tokens over the bound"
    verdict = f"{sync.failed} not verified" if sync.failed else "every one verified"
    return [
        (
            judged,
            f"{number(change.first, '.2f')} → {number(change.last, '.2f')}",
            "first and last 10 steps",
        ),
        (
            "speed",
            number(status.tokens_per_s, ",.0f"),
            f"tokens/s, {number(status.step_s, '.2g')} s a step",
        ),
        (
            "staleness",
            number(staleness.mean, ".2f"),
            ages,
        ),
        (
            "log-probability gap",
            number(gap, ".1e"),
            "rollout to trainer" + (f", tolerance {tolerance:g}" if tolerance else ""),
        ),
        (
            "weight sync",
            number(sync.mean_s, ".2f", " s"),
            f"{sync.versions} versions, {verdict}",
        ),
        (
            "idle",
            f"{number(idle.rollout, '.0%')} · {number(idle.training, '.0%')}",
            "of rollout · of training",
        ),
    ]


def _charts(
    reader: Reader, status: RunSummary, steps: Sequence[StepRecord], tolerance: float | None
) -> list[Chart]:
    if not steps:
        return _slot_chart(reader, status, steps)
    return [
        *_step_charts(steps, tolerance),
        *_evaluation_charts(steps, reader.evaluations()),
        *_decision_chart(steps, status.decisions),
        *_sync_chart(reader.syncs()),
        *_metric_charts("of a step", steps, of_steps(steps)),
        *_metric_charts("mean of the servers", steps, of_servers(reader.samples(), steps)),
        *_slot_chart(reader, status, steps),
    ]


def _evaluation_charts(
    steps: Sequence[StepRecord], rows: Sequence[EvaluationRecord]
) -> list[Chart]:
    """Draw for each name a chart of pass@1 and of the largest k, beside the training reward."""
    names = dict.fromkeys(row.name for row in finished(rows))
    rewards = Series([float(step.step) for step in steps], smooth([s.reward for s in steps]), "b")
    charts = []
    for name in names:
        done = [row for row in finished(rows) if row.name == name]
        xs = [float(row.step) for row in done]

        def of(metric: str, done: Sequence[EvaluationRecord] = done) -> list[float]:
            return [math.nan if (v := row.metrics.get(metric)) is None else v for row in done]

        ends = [Series(xs, of(f"pass@1/{end}"), "a", "dashes") for end in ("low", "high")]
        values = of("pass@1")
        series = [rewards, *ends, Series(xs, values, "a"), Series(xs, values, "a", "points")]
        keys = (
            ("a", "line", "pass@1, with its 95 % interval"),
            ("b", "line", "training reward, smoothed"),
        )
        unit = f"{done[-1].tasks} tasks, {done[-1].samples} samples each"
        charts.append(_wide(f"Evaluation {name}", unit, series, keys))
    return charts


def _wide(
    title: str,
    unit: str,
    series: Sequence[Series],
    keys: Sequence[tuple[str, str, str]],
    *,
    height: int = 270,
    bands: Sequence[Band] = (),
    floor: float | None = None,
) -> Chart:
    """Draw curves over the whole width of the page, and once more for narrow screens."""
    svg = over_steps(series, bands=bands, floor=floor, width=1080, height=height)
    narrow = over_steps(series, bands=bands, floor=floor)
    return Chart(title, unit, svg, keys, wide=True, narrow=narrow)


def _slot_chart(reader: Reader, status: RunSummary, steps: Sequence[StepRecord]) -> list[Chart]:
    began, seconds = status.run.started_at, status.run.elapsed_s
    rows = slot_rows(reader, steps, began=began, seconds=seconds)
    if not rows:
        return []
    seen = {state for row in rows for _, _, state in row.states}
    keys = [(name, "box", meaning) for name, meaning in SHADES.items() if name in seen]
    marks = [(plan.at - began, str(plan.plan)) for plan in status.plans[1:]]
    svg = timeline(
        rows,
        seconds=seconds,
        colours={name: name for name in SHADES},
        marks=marks,
        opacity=1.0,
        band=0.36,
    )
    unit = "minutes:seconds since the start; above a band: seats taken, time in a step"
    if marks:
        unit += "; a dashed line: another plan, with its number"
    return [Chart("Slots", unit, svg, keys, wide=True)]


def _plan_rows(plans: Sequence[PlanRecord]) -> list[tuple[PlanRecord, list[str]]]:
    """Return each plan with its changes from the plan before."""
    before = [None, *plans]
    return [(plan, changes(old, plan)) for old, plan in zip(before, plans, strict=False)]


def _phases(moves: Sequence[MovePart]) -> list[str]:
    """Return the phases that any of the moves went through, in their order."""
    seen = dict.fromkeys(phase.phase for move in moves for phase in move.phases)
    return [*(name for name in PHASES if name in seen), *(n for n in seen if n not in PHASES)]


def _step_charts(steps: Sequence[StepRecord], tolerance: float | None) -> list[Chart]:
    xs = [float(step.step) for step in steps]

    def both(values: Sequence[float], colour: str = "a") -> list[Series]:
        return [Series(xs, values, colour, "points"), Series(xs, smooth(values), colour)]

    judged = yardstick(steps)
    means, p99s = [step.mean_length for step in steps], [step.p99_length for step in steps]
    speeds = [step.tokens_per_s for step in steps]
    stale = [step.staleness_mean for step in steps]
    oldest = [float(step.staleness_max) for step in steps]
    works = [step.train_s for step in steps]
    waits, beside = _waits(steps, works)
    charts = [
        _wide(
            judged.name.capitalize(),
            judged.unit or "mean over the trajectories of a step",
            both(judged.values),
            SMOOTHED,
        ),
        Chart(
            "Trajectory length",
            "generated tokens",
            over_steps([*both(means), Series(xs, smooth(p99s), "b")], floor=1.0),
            (("a", "line", "mean"), ("b", "line", "99th percentile")),
        ),
        Chart(
            "Speed",
            "generated tokens per second",
            over_steps(both(speeds), floor=1.0),
            SMOOTHED,
        ),
        Chart(
            "Staleness",
            "versions behind the trainer",
            over_steps([*both(stale), Series(xs, oldest, "b", "dashes")], floor=1.2),
            (("a", "line", "mean"), ("b", "dash", "largest")),
        ),
        Chart(
            "Time of a step",
            f"seconds{beside}",
            over_steps([*both(works), *both(waits, "b")], floor=0.1),
            (("a", "line", "the trainer works"), ("b", "line", "the trainer waits")),
        ),
    ]
    return charts + _batch_charts(steps) + _gap_chart(steps, tolerance)


def _waits(steps: Sequence[StepRecord], works: Sequence[float]) -> tuple[list[float], str]:
    """Return the seconds that the trainer waited before each step, and words on what is left out.

    The first wait, for servers that start, is left out where it would be all that a chart shows
    beside the ``works``, the seconds of the steps.
    """
    first, *others = (step.waited_s for step in steps)
    if not others or first <= _OFF_THE_CHART * max(*others, *works):
        return [first, *others], ""
    return [math.nan, *others], f"; {first:.0f} s before the first are not drawn"


def _batch_charts(steps: Sequence[StepRecord]) -> list[Chart]:
    """What the rule that makes batches did, where it did anything."""
    known = [(float(step.step), step.mean_length, step.batch) for step in steps if step.batch]
    over = [100 * (batch["share_over_bound"] or 0.0) for _, _, batch in known]
    charts = []
    if any(over):
        xs = [step for step, _, _ in known]
        series = [Series(xs, over, "a", "points"), Series(xs, smooth(over), "a")]
        svg = over_steps(series, floor=1.0)
        charts.append(Chart("Over the staleness bound", "% of generated tokens", svg, SMOOTHED))
    if any(batch["groups_closed"] for _, _, batch in known):
        both = [(x, mean, batch["played_length"]) for x, mean, batch in known]
        ends = [(x, mean, played) for x, mean, played in both if played is not None]
        xs, trained = [x for x, _, _ in ends], smooth([mean for _, mean, _ in ends])
        series = [
            Series(xs, smooth([played for _, _, played in ends]), "b"),
            Series(xs, trained, "a"),
        ]
        svg = over_steps(series, floor=1.0)
        keys = (("a", "line", "trained"), ("b", "line", "played"))
        charts.append(Chart("Length played and trained", "generated tokens", svg, keys))
    return charts


def _decision_chart(
    steps: Sequence[StepRecord], decisions: Sequence[DecisionRecord]
) -> list[Chart]:
    """What each decision predicted of the steps after it, and these steps."""
    bands = list(_bands(steps, decisions))
    if not bands:
        return []
    xs, periods = [float(step.step) for step in steps], [step.period_s for step in steps]
    series = [Series(xs, periods, "a", "points"), Series(xs, smooth(periods), "a")]
    keys = (*SMOOTHED, ("b", "line", "predicted"), ("b", "box", "four means of five"))
    title = "Predicted and observed steps"
    return [_wide(title, "seconds", series, keys, height=230, bands=bands, floor=0.1)]


def _bands(steps: Sequence[StepRecord], decisions: Sequence[DecisionRecord]) -> Iterator[Band]:
    """Yield the predicted seconds of a step for each decision, until the step of the next one."""
    ends = [*(decision.step for decision in decisions[1:]), steps[-1].step]
    for decision, end in zip(decisions, ends, strict=False):
        told = decision.explanation
        step = told.predicted if told else None
        if step and all(0 < each < math.inf for each in (step.low_s, step.step_s, step.high_s)):
            begin = decision.step + 0.5
            yield Band(begin, max(begin, end) + 0.5, step.low_s, step.step_s, step.high_s)


def _gap_chart(steps: Sequence[StepRecord], tolerance: float | None) -> list[Chart]:
    gaps = [(float(step.step), step.logprob_gap) for step in steps if step.logprob_gap]
    if not gaps:
        return []
    xs, ys = [step for step, _ in gaps], [gap for _, gap in gaps]
    series = [Series(xs, ys, "a", "points"), Series(xs, smooth(ys), "a")]
    svg = over_steps(series, log=True, limit=tolerance)
    keys = (*SMOOTHED, ("bad", "dash", f"tolerance {tolerance:g}")) if tolerance else SMOOTHED
    return [Chart("Log-probability gap", "mean |rollout - trainer|", svg, keys)]


def _sync_chart(syncs: Sequence[SyncRecord]) -> list[Chart]:
    times = sync_times(syncs)
    if not times:
        return []
    xs, ys = [float(version) for version in times], list(times.values())
    series = [Series(xs, ys, "a", "points"), Series(xs, smooth(ys), "a")]
    unit = "seconds until the last server has it"
    keys = (("a", "dot", "one version"), ("a", "line", "smoothed"))
    return [Chart("Weight sync", unit, over_steps(series, floor=0.1), keys)]


def _metric_charts(
    unit: str, steps: Sequence[StepRecord], metrics: Mapping[str, Sequence[float]]
) -> list[Chart]:
    """Draw one chart for each metric that is finite in some step."""
    xs = [float(step.step) for step in steps]
    charts = []
    for name, values in metrics.items():
        if any(map(math.isfinite, values)):
            series = [Series(xs, values, "a", "points"), Series(xs, smooth(values), "a")]
            charts.append(Chart(name, unit, over_steps(series), SMOOTHED))
    return charts


def _spread(steps: Sequence[StepRecord]) -> list[StepRecord]:
    every = max(1, math.ceil(len(steps) / _MAX_ROWS))
    return [step for index, step in enumerate(steps) if index % every == 0 or step is steps[-1]]
