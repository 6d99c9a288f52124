"""The tables of runs that are done: means over seeds, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

from libra_cli.bench.results import interval

Runs: TypeAlias = Sequence[Mapping[str, Any]]

NUMBERS = ("final", "area", "last", "solved", "solved_area")
WHAT = ("recipe", "steps", "loss", "label", "staleness")
"""What tells the rows of a table from one another."""


def table(runs: Runs) -> str:
    """A row for each loss, settings and staleness, in Markdown."""
    names = (*WHAT, "seeds", *NUMBERS, "trained", "played", "s a step")
    rows = []
    for key, found in sorted(_by_row(runs).items(), key=str):
        numbers = [_told([run[name] for run in found.values()]) for name in NUMBERS]
        steps = fmean(run["trained"] for run in found.values())
        played = fmean(run["played"] for run in found.values())
        seconds = fmean(run["cpu_s"] for run in found.values()) / steps
        rows.append([*key, len(found), *numbers, f"{steps:.0f}", f"{played:.0f}", f"{seconds:.2f}"])
    return _markdown(names, rows)


def differences(runs: Runs, baseline: str) -> str:
    """A row for each that has a baseline: the differences from it, paired by seed.

    Raises:
        ValueError: the baseline names nothing that tells rows apart.
    """
    name, _, value = baseline.partition("=")
    if name not in WHAT:
        raise ValueError(f"--baseline {baseline}: rows differ in {', '.join(WHAT)}, not in {name}")
    place = WHAT.index(name)
    by_row = _by_row(runs)
    rows = []
    for key, found in sorted(by_row.items(), key=str):
        other = by_row.get((*key[:place], value, *key[place + 1 :]), {})
        seeds = sorted(found.keys() & other.keys())
        if not seeds or other is found:
            continue
        pairs = [(found[seed], other[seed]) for seed in seeds]
        numbers = [_told([one[of] - two[of] for one, two in pairs], sign="+") for of in NUMBERS]
        rows.append([*key, len(seeds), *numbers])
    return _markdown((*WHAT, "seeds", *(f"{of} - {baseline}" for of in NUMBERS)), rows)


def _by_row(runs: Runs) -> dict[tuple[str, ...], dict[int, Mapping[str, Any]]]:
    """The runs of each row, by seed."""
    found: dict[tuple[str, ...], dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        settings = " ".join(f"{key}={value}" for key, value in run["settings"])
        key = tuple(str(run[name]) for name in WHAT[:3])
        row = (*key, run["label"] or settings, str(run["staleness"]))
        found.setdefault(row, {})[run["seed"]] = run
    return found


def _markdown(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(str(cell) or '-' for cell in line)} |\n" for line in lines)


def _told(values: Sequence[float], sign: str = "") -> str:
    middle, span = fmean(values), interval(values)
    half = f" ± {span[1] - middle:.3f}" if span else ""
    return f"{middle:{sign}.3f}{half}"
