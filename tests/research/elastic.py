"""What the elastic pool earns: a recipe that moves slots, beside the same one that never does.

    python -m tests.research.elastic --seeds 0,1,2 --out elastic

Of each seed three runs, one after the other on this machine's CPU; who goes first changes from seed
to seed:

    moves     the recipe as it is
    stays     planner.kind: fixed, so with the plan that it begins with
    reversed  the same with its hybrid slots in the trainer, which is the other plan

Nothing else should work meanwhile. A run that is in ``--out`` and has finished is not done again,
so the command may be interrupted and given again; ``--table`` runs nothing. At the end it prints
what came and writes ``elastic.svg``: the rewards of the first seed over time, and below them what
every slot did.

Of every move: seconds a step in the last steps before it was asked for and in the first ones after
it had arrived, and what the steps with the same numbers took in the run that kept the plan which
the move left: they train on the same tasks, so nothing else has changed. ± is 95 % over seeds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from typing import Any

from libra_cli.api import LoadedRun, load_run
from libra_cli.bench.results import interval
from libra_cli.core.records import MoveRecord
from libra_cli.report.html import scales
from libra_cli.report.html.charts import timeline
from libra_cli.report.html.drawing import BOTTOM, RIGHT, TOP, Drawing, label_width
from libra_cli.report.html.scales import Scale
from libra_cli.report.html.slot_rows import SHADES, slot_rows
from libra_cli.report.status.steps import smooth
from libra_cli.runtime.recipes.yaml_lines import read_yaml
from libra_cli.runtime.store.reader import Reader
from tests.gallery.svg import stacked

RECIPE = Path(__file__).parents[2] / "recipes" / "elastic.yaml"
ARMS = {"moves": "a", "stays": "b", "reversed": "muted"}
"""What is run, with the colour of its curve."""
KEPT = {"gradient": "stays", "rollout": "reversed"}
"""The run that keeps the plan which a move leaves, by the role that the slot moves to."""
BEFORE, AFTER, LAST = 3, 8, 10
"""Steps before a move and after it, at most; and at the end, whose mean reward is told."""
RUN_S = 2400.0
"""Seconds that a run may take at most, with the small model built and on a busy machine."""
WIDTH, HEIGHT = 1080, 170
"""Pixels of the picture: its width, and the curves' height."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move that was carried out; mean seconds a step, None where no step can tell."""

    to: str
    before_s: float | None
    after_s: float | None
    kept_s: float | None
    """Of the steps with the numbers of those after it, in the run that kept the plan before."""


def recipe_of(recipe: Path, arm: str, seed: int) -> dict[str, Any]:
    """The recipe of an arm."""
    data: dict[str, Any] = read_yaml(recipe.read_text(encoding="utf-8")).value
    data["run"] |= {"name": arm, "seed": seed, "directory": "runs"}
    if arm != "moves":
        data["planner"] |= {"kind": "fixed"}
    if arm == "reversed":
        for node in data["nodes"]:
            node["pool"] = ["train" if pool == "hybrid" else pool for pool in node["pool"]]
    return data


def finished(place: Path) -> LoadedRun | None:
    """The run in a folder that has ended as it should; None if there is none."""
    runs = [load_run(path.parent) for path in sorted(place.glob("runs/*/libra.db"))]
    return next((run for run in runs if run.state == "finished"), None)


def play(recipe: Path, arm: str, seed: int, place: Path) -> None:
    """Run an arm, unless it is done; say so if it does not end well."""
    if finished(place):
        return
    rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "recipe.json").write_text(json.dumps(recipe_of(recipe, arm, seed)), encoding="utf-8")
    sys.stdout.write(f"{place.name} ...\n")
    sys.stdout.flush()
    command = [str(Path(sys.executable).with_name("libra")), "run", "recipe.json"]
    with (place / "console.log").open("w", encoding="utf-8") as log:
        started = subprocess.Popen(command, cwd=place, stdout=log, stderr=log)
        try:
            status = started.wait(RUN_S)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            if started.poll() is None:
                started.terminate()  # it stops what it has started, and ends
                started.wait()
    if status:
        sys.stdout.write(f"{place.name} ended with {status}: {place / 'console.log'}\n")


def seconds_of(run: LoadedRun) -> dict[int, float]:
    """Seconds from the end of the step before to the end of each, by its number."""
    ends = {step.step: step.ended_at for step in run.steps}
    return {step: end - ends[step - 1] for step, end in ends.items() if step - 1 in ends}


def moves_of(runs: Mapping[str, LoadedRun]) -> Iterator[Move]:
    """Yield the first move to each side, of the arms of a seed."""
    run = runs["moves"]
    done = [move for move in run.moves if move.state == "done" and move.ended_at is not None]
    for role, arm in KEPT.items():
        move = next((one for one in done if one.to_role == role), None)
        if move is not None:
            kept = seconds_of(runs[arm]) if arm in runs else {}
            yield _move(run, move, kept)


def _move(run: LoadedRun, move: MoveRecord, kept: Mapping[int, float]) -> Move:
    took = seconds_of(run)
    before = [step.step for step in run.steps if step.ended_at <= move.started_at][-BEFORE:]
    begins = [one.started_at for one in run.moves if one.started_at > move.started_at]
    until, since = min(begins, default=float("inf")), move.ended_at or float("inf")
    # A step under way when the slot arrived is no step of either plan.
    whole = [step.step for step in run.steps if since < step.ended_at <= until]
    after = whole[1 : 1 + AFTER]
    return Move(move.to_role, _mean(took, before), _mean(took, after), _mean(kept, after))


def _mean(seconds: Mapping[int, float], steps: Sequence[int]) -> float | None:
    values = [seconds[step] for step in steps if step in seconds]
    return fmean(values) if values else None


def told(values: Sequence[float | None], digits: str = ".1f") -> str:
    """A mean with its interval over seeds."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    span = interval(known)
    half = f" ± {span[1] - fmean(known):{digits}}" if span else ""
    return f"{fmean(known):{digits}}{half}"


def table(seeds: Mapping[int, Mapping[str, LoadedRun]]) -> Iterator[str]:
    """Lines of Markdown: the runs of every arm, and every move with what it earned."""
    yield f"| run | seeds | s in all | s a step | reward, last {LAST} | reward, all | moves |"
    yield "|" + 7 * " --- |"
    for arm in ARMS:
        runs = [found[arm] for found in seeds.values() if arm in found]
        if runs:
            yield f"| {arm} | {len(runs)} | {' | '.join(_columns(runs))} |"
    moved = {seed: list(moves_of(found)) for seed, found in seeds.items() if "moves" in found}
    yield ""
    yield "| move to | seeds | s a step before | after | had it stayed | % of that earned |"
    yield "|" + 6 * " --- |"
    for role in KEPT:
        moves = [move for found in moved.values() for move in found if move.to == role]
        gains = [1 - m.after_s / m.kept_s for m in moves if m.after_s and m.kept_s]
        columns = (
            told([move.before_s for move in moves]),
            told([move.after_s for move in moves]),
            told([move.kept_s for move in moves]),
            told([100 * gain for gain in gains], ".0f"),
        )
        yield f"| {role} | {len(moves)} | {' | '.join(columns)} |"


def _columns(runs: Sequence[LoadedRun]) -> Iterator[str]:
    rewards = [[step.metrics["reward/mean"] for step in run.steps] for run in runs]
    yield told([_whole_s(run) for run in runs], ".0f")
    yield told([fmean(seconds_of(run).values()) for run in runs], ".2f")
    yield told([fmean(one[-LAST:]) for one in rewards], ".3f")
    yield told([fmean(one) for one in rewards], ".3f")
    yield told([float(sum(move.state == "done" for move in run.moves)) for run in runs])


def picture(runs: Mapping[str, LoadedRun]) -> str:
    """Return an SVG of the arms of a seed: rewards over time, then the slots of each."""
    seconds = max(map(_whole_s, runs.values()))
    names = " ".join(f'<tspan fill="var(--{ARMS[arm]})">{arm}</tspan>' for arm in runs)
    parts = [(f"success, smoothed, over minutes: {names}", _rewards(runs, seconds))]
    seen: set[str] = set()
    for arm, run in runs.items():
        with Reader(run.directory) as reader:
            began = run.steps[0].started_at
            rows = slot_rows(reader, reader.steps(), began=began, seconds=seconds)
        seen |= {shade for row in rows for *_, shade in row.states}
        colours = {name: name for name in SHADES}
        drawn = timeline(rows, seconds=seconds, colours=colours, opacity=1.0, band=0.36)
        parts.append((f"{arm}: {len(run.steps)} steps in {_whole_s(run):.0f} s", drawn))
    parts.append((_legend(seen), ""))
    return stacked(parts, width=WIDTH)


def _whole_s(run: LoadedRun) -> float:
    return run.steps[-1].ended_at - run.steps[0].started_at


def _legend(shades: Collection[str]) -> str:
    known = {name: words for name, words in SHADES.items() if name in shades}
    squares = (f'<tspan fill="var(--{name})">■</tspan> {words}' for name, words in known.items())
    return " &#160; ".join(squares) + " &#160; above a row: how busy the slot was"


def _rewards(runs: Mapping[str, LoadedRun], seconds: float) -> str:
    names = [row.slot for run in runs.values() for row in run.moves] or ["local/0"]
    left = max(46, label_width(names))
    drawing = Drawing(
        Scale(0, seconds, left, WIDTH - RIGHT),
        Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP),
        width=WIDTH,
        height=HEIGHT,
    )
    ticks = scales.enclosing(0.0, 1.0)
    for tick in ticks:
        drawing.level(tick, "grid")
    drawing.y_axis(ticks, scales.decimal_words(ticks))
    times = scales.clock_times(seconds)
    drawing.x_axis(times, [scales.clock(time) for time in times])
    for arm, run in runs.items():
        began = run.steps[0].started_at
        rewards = smooth([step.metrics["reward/mean"] for step in run.steps])
        drawing.line([step.ended_at - began for step in run.steps], rewards, ARMS[arm])
    return drawing.svg()


def main() -> None:
    """Do the runs that are not done, print the table, and draw the first seed."""
    parser = ArgumentParser(prog="python -m tests.research.elastic")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--out", type=Path, default=Path("elastic"))
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--table", action="store_true")
    typed = parser.parse_args()
    seeds: dict[int, dict[str, LoadedRun]] = {}
    for number, seed in enumerate(map(int, typed.seeds.split(","))):
        order = [*ARMS][number % len(ARMS) :] + [*ARMS][: number % len(ARMS)]
        for arm in order:
            if not typed.table:
                play(typed.recipe, arm, seed, typed.out / f"{arm}-{seed}")
        found = {arm: finished(typed.out / f"{arm}-{seed}") for arm in ARMS}
        seeds[seed] = {arm: run for arm, run in found.items() if run is not None}
    sys.stdout.write("\n".join(table(seeds)) + "\n")
    drawn = next((runs for runs in seeds.values() if "moves" in runs), None)
    if drawn is not None:
        (typed.out / "elastic.svg").write_text(picture(drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
