"""Draws the curve of a run from its facts, and what every slot did beside it."""

from __future__ import annotations

from libra_cli.report.html import scales
from libra_cli.report.html.charts import Band, Series, TimelineRow, over_steps, timeline
from libra_cli.report.html.drawing import BOTTOM, RIGHT, TOP, Drawing, label_width
from libra_cli.report.html.scales import Scale
from libra_cli.report.status.steps import smooth
from tests.gallery.facts import Curve, Facts, ServerKill, SlotMove, Timeline
from tests.gallery.svg import stacked

WIDTH, HEIGHT = 400, 190
"""Pixels: on a phone the picture is as large as it was drawn."""
NAMES = {"reward/mean": "reward", "train/token_accuracy": "token accuracy"}
"""What metrics are called in words."""


WIDE, SHOWN, CURVE, LANE = 640, 1080, 170, 26
"""Pixels: the width of slots over time as it is drawn and as it is shown, which makes words larger,
and the heights of the curve and of a slot's lane."""
SHADES = {
    "serving": ("serving", "serves"),
    "training": ("training", "trains"),
    "gradient": ("gradient", "trains (gradient worker)"),
    "starting": ("starting", "starts or changes sides"),
    "failed": ("failed", "is gone"),
    "idle": ("idle", "sleeps"),
}
"""What a lane shows: the colour, and the words of the legend."""
PHASES = {"draining": "starting", "stopping": "starting", "syncing": "starting"}
"""The states of a slot that are shown as another one."""


def picture(facts: Facts) -> str:
    """Return an SVG of a run: its slots over time where they are known, else its curve."""
    return _curve(facts) if facts.timeline is None else slots(facts.curve, facts.timeline)


def _curve(facts: Facts) -> str:
    """Return an SVG: the metric of each step, smoothed, and the evaluations with intervals."""
    values = facts.curve.values
    steps = list(range(1, len(values) + 1))
    series = [Series(steps, values, "a", "points"), Series(steps, smooth(values), "a")]
    series += [
        Series(list(range(1, len(one.values) + 1)), smooth(one.values), "a", "dashes")
        for one in facts.further.values()
    ]
    half = max(0.5, len(values) / 80)
    bands = [
        Band((one.step or 0) - half, (one.step or 0) + half, one.low, one.pass_at_1, one.high)
        for one in facts.evaluations
    ]
    words = f'<tspan fill="var(--a)">{NAMES[facts.curve.metric]}</tspan> by step'
    if facts.further:
        seeds = ", ".join(map(str, facts.further))
        words += f" (dashed: seeds {seeds})"
    if bands:
        words += ', <tspan fill="var(--b)">pass@1</tspan> (95 %)'
        # The axis reaches from the evaluation before the first step to the one after the last.
        ends = [0, len(values)]
        series.append(Series(ends, [float("nan")] * 2, "b", "points"))
    drawn = over_steps(series, bands=bands, width=WIDTH, height=HEIGHT, floor=1.0)
    return stacked([(words, drawn)], width=WIDTH, shown=WIDTH)


def slots(curve: Curve, known: Timeline) -> str:
    """Return an SVG: the reward over time, and below it a lane for each slot."""
    seconds = curve.ended_at[-1]
    rows = [
        TimelineRow(
            lane.slot, [(start, end, PHASES.get(name, name)) for start, end, name in lane.states]
        )
        for lane in known.lanes
    ]
    colours = {name: colour for name, (colour, _) in SHADES.items()}
    lanes = timeline(
        rows,
        seconds=seconds,
        colours=colours,
        width=WIDE,
        row_height=LANE,
        opacity=1.0,
        marks=[*map(_move_mark, known.moves)],
    )
    seen = {name for row in rows for *_, name in row.states}
    squares = (
        f'<tspan fill="var(--{colour})">■</tspan> {words}'
        for name, (colour, words) in SHADES.items()
        if name in seen
    )
    heading = f"{NAMES[curve.metric]}, smoothed, over minutes"
    parts = [(heading, _over_time(curve, known)), (" &#160; ".join(squares), lanes)]
    return stacked(parts, width=WIDE, shown=SHOWN)


def _move_mark(move: SlotMove) -> tuple[float, str]:
    return move.started_at, f"{move.slot} to {move.to}"


def _over_time(curve: Curve, known: Timeline) -> str:
    """Draw the reward at the end of each step, and when a server was killed and served again."""
    seconds = curve.ended_at[-1]
    left = max(46, label_width(lane.slot for lane in known.lanes))
    drawing = Drawing(
        Scale(0, seconds, left, WIDE - RIGHT),
        Scale(0.0, 1.0, CURVE - BOTTOM, TOP + 14),
        width=WIDE,
        height=CURVE,
    )
    ticks = scales.enclosing(0.0, 1.0)
    for tick in ticks:
        drawing.level(tick, "grid")
    drawing.y_axis(ticks, scales.decimal_words(ticks))
    times = scales.clock_times(seconds)
    drawing.x_axis(times, [scales.clock(time) for time in times])
    drawing.dots(curve.ended_at, curve.values, "a")
    drawing.line(curve.ended_at, smooth(curve.values), "a")
    if known.kill is not None:
        _mark_kill(drawing, known.kill)
    return drawing.svg()


def _mark_kill(drawing: Drawing, kill: ServerKill) -> None:
    """Draw where a server was killed and where it served again, and how long that took."""
    drawing.boxes([(kill.at, 0.0, kill.serves_again_at, 1.0)], "bad", opacity=0.12)
    drawing.upright(kill.at, "bad", width=1.6)
    drawing.upright(kill.serves_again_at, "good", width=1.6)
    away = kill.serves_again_at - kill.at
    words = f"server of {kill.slot} {kill.how}; it serves again after {away:.0f} s"
    drawing.word(kill.at, words, colour="bad")
