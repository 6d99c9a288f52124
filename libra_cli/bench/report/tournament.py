"""The terminal tables and the JSON of ``libra bench plan --random``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from libra_cli.bench.report.sheets import Report, half_interval, percents
from libra_cli.bench.report.terminal import Sheet
from libra_cli.bench.tournament import BEHIND, STEPS, Bout, Standing, standings

SHOWN = 8
"""Circumstances that are shown one by one: those in which libra came out worst."""


def tournament_report(bouts: Sequence[Bout]) -> Report:
    """The means by kind of circumstance, and those in which libra came out worst."""
    found = list(standings(bouts))
    body = {
        "circumstances": [_told(bout) for bout in bouts],
        "standings": [asdict(one) for one in found],
    }
    return Report((_means(found), _worst(bouts)), {"tournament": body})


def _means(found: Sequence[Standing]) -> Sheet:
    columns = ("", "number", "over uniform", "worst", "behind", "over kept", "half over\nuniform")
    rows = [
        (
            one.of,
            str(one.number),
            f"{percents(one.over_uniform)}{half_interval(one.over_uniform_ci95)} %",
            f"{percents(one.worst)} %",
            str(one.behind),
            f"{percents(one.over_kept)}{half_interval(one.over_kept_ci95)} %",
            f"{percents(one.half_over_uniform)} %",
        )
        for one in found
    ]
    notes = (
        f"throughput of {STEPS} steps, from libra's own first plan; ± 95 % over circumstances",
        "over uniform: beside half of the GPUs a side that stays",
        "over kept: beside its own first plan that stays, which is what planning again earned",
        f"behind: in how many it had {BEHIND:.0%} less than uniform, or lost more",
        "half: libra's planner where it begins with half a side",
    )
    return Sheet("libra in random circumstances", columns, rows, notes)


def _worst(bouts: Sequence[Bout]) -> Sheet:
    columns = ("circumstance", "over\nuniform", "over\nkept", "moves")
    rows = [
        (
            f"{one.circumstance.number}: {one.circumstance}",
            f"{percents(one.over_uniform)} %",
            f"{percents(one.over_kept)} %",
            str(one.moves),
        )
        for one in sorted(bouts, key=lambda one: one.over_uniform)[:SHOWN]
    ]
    note = "one again: libra bench plan --random 1 --first NUMBER"
    return Sheet("where it came out worst", columns, rows, (note,))


def _told(bout: Bout) -> dict[str, Any]:
    job, drawn = bout.circumstance.job, bout.circumstance
    return {
        "number": drawn.number,
        "trace": job.trace.name,
        "profile": job.profile.name,
        "gpus": job.gpus,
        "max_staleness": job.bound,
        "rule": drawn.rule or None,
        "max_len": job.max_len,
        "oversample": job.oversample,
        "drift": job.variant,
        "throughput_tok_s": {
            name: getattr(bout, name) for name in ("libra", "half", "kept", "uniform")
        },
        "over_uniform": bout.over_uniform,
        "over_kept": bout.over_kept,
        "half_over_uniform": bout.half_over_uniform,
        "moves": bout.moves,
    }
