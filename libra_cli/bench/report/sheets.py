"""The tables of words and the JSON of the checks of ``libra bench``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from libra_cli.bench.regret_causes import CAUSES
from libra_cli.bench.report.terminal import Sheet, amount, share
from libra_cli.bench.results import LEAST_GAIN, Interval, Regret
from libra_cli.core.costs.profile import Profile


@dataclass(frozen=True, slots=True)
class Report:
    """The tables of a check, and its part of the object for ``--json``."""

    sheets: tuple[Sheet, ...]
    body: dict[str, Any]


# -- regret ----------------------------------------------------------------------------------------


def regret_sheet(found: Sequence[Regret]) -> Sheet:
    """Return the table of regrets, a row for each trace, drift
    and start, and notes on its columns.
    """
    columns = (
        "",
        "start",
        "regret",
        "of the\nstart",
        "steady",
        "of the\ngain",
        "over\nuniform",
        "moves",
    )
    rows = [
        (
            f"{one.trace.partition('_')[0]}, {one.variant}",
            one.start,
            f"{percents(one.regret)}{half_interval(one.ci95)} %",
            f"{percents(one.of_start)} %",
            f"{percents(one.steady_regret)} %",
            share(one.share_of_clairvoyant, None),
            f"{percents(one.over_uniform)} %",
            amount(round(one.moves)),
        )
        for one in found
    ]
    worst = max(found, key=lambda one: one.regret)
    mean = fmean(one.regret for one in found)
    where = f"{worst.trace}, {worst.variant}, {worst.start} start"
    nothing = f"a dash where {LEAST_GAIN:.0%} or less is to be gained"
    notes = (
        f"mean regret {percents(mean)} %, at most {percents(worst.regret)} % ({where})",
        "regret: by how much the best static plan in hindsight has the greater throughput",
        "of the start: the regret of what is told that plan at once, and goes there or stays",
        "steady: the same without the filling of the pipeline at the start of the run",
        f"of the gain: libra's part of the clairvoyant's over it; {nothing}",
    )
    seeds = max(one.seeds for one in found)
    about = f"; ± 95 % interval over {seeds} seeds" if seeds > 1 else ""
    return Sheet(f"regret{about}", columns, rows, notes)


def causes_sheet(found: Sequence[Regret]) -> Sheet:
    """Return the table of what each regret is made of, and notes on its columns."""
    rows = [
        (
            f"{one.trace.partition('_')[0]}, {one.variant}",
            one.start,
            *(f"{percents(one.causes[cause])} %" for cause in CAUSES),
            f"{percents(one.regret)} %",
        )
        for one in found
    ]
    notes = (
        "filling: the first steps, of which as many as may be in flight",
        "wrong plan: under other servers than the best plan's, not looked at with such lengths",
        "wrong price: under other servers than the best plan's, although looked at with them",
        "moving: GPUs without work while slots move; same plan: under the best plan's servers",
    )
    heads = (cause.replace(" ", "\n") for cause in CAUSES)
    return Sheet("what the regret is made of", ("", "start", *heads, "regret"), rows, notes)


def percents(part: float) -> str:
    """Return a share in percent with its sign: +1.2."""
    return f"{part * 100:+.1f}"


def half_interval(spread: Interval | None) -> str:
    """Half the width of an interval of shares, after its mean; empty if there is none."""
    return "" if spread is None else f" ± {(spread[1] - spread[0]) * 50:.1f}"


# -- a calibration ---------------------------------------------------------------------------------


def calibration_report(profile: Profile, path: Path) -> Report:
    """The prices of a profile that was measured and written to ``path``."""
    rows = [row for degree in sorted(profile.servers) for row in _server_prices(profile, degree)]
    training, contention = profile.training, profile.surroundings
    rows += [
        ("training: a step", amount(training.step_s), "s"),
        ("  a token", amount(training.token_s * 1e6), "us"),
        ("  a pair of tokens", amount(training.pair_s * 1e9), "ns"),
        ("weights: published to proved", amount(contention.sync_s), "s"),
        ("  of which the server stands still", amount(contention.stall_s), "s"),
        ("a turn outside the server", amount(contention.turn_s * 1e3), "ms"),
        ("a turn while the trainer works", f"x{contention.serving_slowdown:.2f}", ""),
        ("a step while servers work", f"x{contention.training_slowdown:.2f}", ""),
    ]
    notes = [f"{key}: {profile.provenance[key]}" for key in ("servers", "training")]
    sheet = Sheet(f"profile {profile.name}, written to {path}", ("", "", ""), rows, notes)
    body = {"profile": str(path), "provenance": dict(profile.provenance)}
    return Report((sheet,), {"calibration": body})


def _server_prices(profile: Profile, degree: int) -> list[tuple[str, str, str]]:
    cost = profile.servers[degree].linear()
    return [
        (f"TP{degree}: a step", amount(cost.step_s * 1e3), "ms"),
        ("  a sequence in it", amount(cost.sequence_s * 1e6), "us"),
        ("  a cached token of these", amount(cost.kv_token_s * 1e9), "ns"),
        ("  a request", amount(cost.request_s * 1e6), "us"),
        ("  a prompt token", amount(cost.prefill_token_s * 1e6), "us"),
        ("  a pair of tokens", amount(cost.prefill_pair_s * 1e9), "ns"),
        ("  KV cache", f"{cost.kv_tokens:,}", "tokens"),
        ("  start", amount(profile.moves.start(degree)), "s"),
    ]
