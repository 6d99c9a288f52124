"""Makes the page of the gallery from the facts of its runs, and nothing else."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from libra_cli.config.text import printable
from libra_cli.report.status.steps import smooth
from libra_cli.report.terminal.plots import sparkline
from tests.gallery.entries import ENTRIES, RECIPES, Entry
from tests.gallery.facts import FOLDER, Curve, Examination, Facts, Machine, Timeline, Trajectory
from tests.gallery.picture import NAMES, picture

ENDS = 5
"""Steps at the beginning and at the end whose mean is told."""
BLOCKS = 24
"""The most characters that a curve is told with in a line."""
COLUMNS = 76
MOST_LINES = 24
"""Columns and lines of a trajectory; of a longer one the middle is left out."""
INTRODUCTION = """\
# Gallery: recipes that ran, with what they took and what came

`make gallery` makes this page from runs of the recipes that need no GPU. Every number and picture
is of a run of a recipe as it stands in `recipes/` (of several, where seeds are named), whose facts
lie beside it (`gallery/NAME.json`). The trajectories that are shown are typical ones: of the median
reward of their step and, of those, the median length. `libra eval` examines the models, before and
after, with the recipe's evaluation or, where it has none, on 64 tasks of another seed; in brackets
are 95 % intervals over tasks.
"""
NOT_HERE = """\
## What is not here

These recipes need hosts with GPUs, and so have no run on this page ([gpus](gpus.md)):
"""


def files(facts: Sequence[Facts]) -> dict[Path, str]:
    """Return the text of the page and of the pictures by their paths."""
    pictures = {FOLDER / f"{one.name}.svg": picture(one) for one in facts}
    return {FOLDER.with_suffix(".md"): page(facts), **pictures}


def page(facts: Sequence[Facts]) -> str:
    """Return the Markdown of the page, in the order in which entries are run."""
    known = {one.name: one for one in facts}
    shown = [(ENTRIES[name], known[name]) for name in ENTRIES if name in known]
    sections = [INTRODUCTION, "\n".join(_table(shown)) + "\n"]
    sections += ["\n".join(_section(entry, one)) for entry, one in shown]
    sections.append("\n".join(_absent(known)))
    return "\n".join(sections) + "\n"


def _table(shown: Sequence[tuple[Entry, Facts]]) -> Iterator[str]:
    yield f"| recipe | seconds | first → last {ENDS} steps | model before | exported model |"
    yield "| --- | --- | --- | --- | --- |"
    for entry, facts in shown:
        before = _before(facts)
        cells = (
            f"[{entry.name}](../../recipes/{entry.recipe.name})",
            f"{facts.seconds.whole:.0f}",
            "{} {:.2f} → {:.2f}".format(NAMES[facts.curve.metric], *ends(facts)),
            "-" if before is None else f"{before.pass_at_1:.2f}",
            f"{facts.exported.pass_at_1:.2f}",
        )
        yield f"| {' | '.join(cells)} |"


def _before(facts: Facts) -> Examination | None:
    """Return the examination of the model that the run began with, if it was examined."""
    first = facts.evaluations[0] if facts.evaluations else None
    return first if first is not None and first.step == 0 else facts.before


def ends(facts: Facts) -> tuple[float, float]:
    """The means of the curve over its first and over its last ``ENDS`` steps."""
    return _ends(facts.curve)


def _ends(curve: Curve) -> tuple[float, float]:
    return fmean(curve.values[:ENDS]), fmean(curve.values[-ENDS:])


def _section(entry: Entry, facts: Facts) -> Iterator[str]:
    yield f"## {entry.name}: {entry.shows}\n"
    name = NAMES[facts.curve.metric]
    drawn = f"{name} by step" if facts.timeline is None else f"{name} and slots over time"
    yield f"![{drawn.capitalize()} of {entry.name}](gallery/{entry.name}.svg)\n"
    yield "```"
    yield from facts.commands
    yield "```\n"
    yield "| measured | |"
    yield "| --- | --- |"
    for what, words in _measured(facts).items():
        yield f"| {what} | {words} |"
    yield ""
    for trajectory in facts.trajectories:
        known = trajectory.reward is not None and not facts.imitates
        reward = f", reward {trajectory.reward:.2g}" if known else ""
        what = "demonstration" if facts.imitates else "trajectory"
        yield f"A {what} of step {trajectory.step}{reward}:\n"
        yield from _messages(trajectory)


def _measured(facts: Facts) -> dict[str, str]:
    first, last = ends(facts)
    count = len(facts.curve.values)
    rows = {
        "took": _took(facts),
        "on": on_machine(facts.machine),
        "with": ", ".join(f"{name} {known}" for name, known in facts.machine.versions.items())
        + f", commit {facts.machine.commit}, {facts.day}",
        NAMES[facts.curve.metric]: f"{first:.2f} → {last:.2f}, first and last {ENDS} of"
        f" {count} steps: {_blocks(facts.curve.values)}",
    }
    for seed, curve in facts.further.items():
        began, ended = _ends(curve)
        rows[f"with seed {seed}"] = f"{began:.2f} → {ended:.2f}: {_blocks(curve.values)}"
    if facts.tokens_per_s is not None:
        what = "training" if facts.imitates else "rollout"
        kind = "imitated" if facts.imitates else "generated"
        rows[what] = f"{facts.tokens_per_s:,.0f} {kind} tokens/s, median over steps"
    if facts.timeline is not None:
        rows |= _changes(facts.timeline)
    before, exported = _before(facts), facts.exported
    asked = f"{exported.tasks} tasks, {exported.samples} samples of each"
    known = "" if before is None else f"{_estimate(before)} before, "
    rows["exported model"] = f"pass@1 {known}{_estimate(exported)} after; {asked}"
    return rows


def _blocks(values: Sequence[float]) -> str:
    """Return the smoothed values as blocks, for a terminal, which shows no picture."""
    line = smooth(values)
    count = min(BLOCKS, len(line))
    return sparkline([line[round(at * (len(line) - 1) / max(1, count - 1))] for at in range(count)])


def _changes(known: Timeline) -> dict[str, str]:
    moves = [
        f"{move.slot} to {move.to} in {move.ended_at - move.started_at:.0f} s"
        for move in known.moves
    ]
    rows = {"moves": "; ".join(moves) or "none"}
    if kill := known.kill:
        away = kill.serves_again_at - kill.at
        rows["killed"] = f"the vLLM server of {kill.slot}, which served again after {away:.0f} s"
    return rows


def _took(facts: Facts) -> str:
    seconds = facts.seconds
    made = (
        "in which the model was built or unpacked" if seconds.built_model else "the model was there"
    )
    return (
        f"{seconds.whole:.0f} s: {seconds.until_first_step:.0f} until the first step ({made}),"
        f" {seconds.steps:.0f} for {len(facts.curve.values)} steps,"
        f" {seconds.whole - seconds.until_first_step - seconds.steps:.0f} to export and end"
    )


def on_machine(machine: Machine) -> str:
    """A machine in words: cores, memory, GPUs and the load before it began."""
    gpus = ", ".join(machine.gpus) or "no GPU"
    busy = f"; measured on a machine with other work (load {machine.load})"
    quiet = f"; load {machine.load} before it began"
    return (
        f"{machine.cores} cores of {machine.cpu}, {machine.memory_gib} GiB, {gpus}"
        f"{busy if machine.is_busy else quiet}"
    )


def _estimate(one: Examination) -> str:
    return f"{one.pass_at_1:.2f} [{one.low:.2f}, {one.high:.2f}]"


def _messages(one: Trajectory) -> Iterator[str]:
    yield "```text"
    lines = [line for part in one.messages for line in _wrapped(part.role, part.text)]
    surplus = len(lines) - MOST_LINES
    if surplus > 0:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"[{surplus} lines left out]", *lines[-half:]]
    yield from lines
    yield "```\n"


def _wrapped(role: str, text: str) -> list[str]:
    """Return a message in lines, the role before the first; nothing in it ends the block."""
    said = printable(text).replace("```", "'''")
    lines = []
    for line in f"{role}: {said}".splitlines() if role else [said]:
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent="  ") or [""]
    return lines


def _absent(known: Mapping[str, Facts]) -> Iterator[str]:
    yield NOT_HERE
    yield "| recipe | needs |"
    yield "| --- | --- |"
    for name, needed in needs().items():
        if "GPU" in needed:
            yield f"| [{name}](../../recipes/{name}.yaml) | {needed} |"
    if missing := [name for name in ENTRIES if name not in known]:
        yield f"\nNot run for this page, although a CPU is enough: {', '.join(missing)}."


def needs() -> dict[str, str]:
    """What each recipe asks for, in the words of its ``Hardware:`` comment's first clause."""
    found = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        said = re.search(r"^# Hardware:\s*(.*?)[.,;]\s", text, re.MULTILINE | re.DOTALL)
        found[path.stem] = " ".join(re.sub(r"\n#\s*", " ", said[1]).split()) if said else "?"
    return found
