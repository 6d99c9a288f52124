"""What a person and a program see of the checks of ``libra bench``: tables of words, and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from libra_cli.bench.fidelity.publication import (
    LONG_RATIO,
    ROLLOUT_GROWTH,
    SHORT_RATIO,
    TRAINING_GROWTH,
    PublicationResult,
    PublicationRow,
)
from libra_cli.bench.fidelity.run import WANTED_ERROR as WANTED_STEP_ERROR
from libra_cli.bench.fidelity.run import LiveFidelity
from libra_cli.bench.fidelity.server import (
    WANTED_CORRELATION,
    WANTED_ERROR,
    Fidelity,
    ServerComparison,
)
from libra_cli.bench.peers import (
    SMOOTHED,
    SUCCESS,
    WARM_STEPS,
    PeerDifference,
    PeerRow,
    differences,
)
from libra_cli.bench.report.terminal import Sheet, amount, share
from libra_cli.bench.results import LEAST_GAIN, Interval, Regret
from libra_cli.core.costs.profile import Profile

NEAREST = 8
"""Rows of the publication sweep that are shown."""


@dataclass(frozen=True, slots=True)
class Report:
    """The tables of a check, and its part of the object for ``--json``."""

    sheets: tuple[Sheet, ...]
    body: dict[str, Any]


# -- a server's requests ---------------------------------------------------------------------------


def server_report(compared: ServerComparison) -> Report:
    """A simulated server beside a recorded one."""
    recorded, found = compared.recorded, compared.fidelity
    shape = f"{recorded.model}, TP{recorded.tensor_parallel}"
    title = f"{shape}, {found.requests:,} requests; {compared.prices}"
    sheet = Sheet(title, ("simulated against recorded", "", "wanted", ""), _server_rows(found))
    return Report((sheet,), {"fidelity": {**asdict(found), "within": found.within}})


def _server_rows(found: Fidelity) -> list[Sequence[str]]:
    def error(name: str, value: float) -> Sequence[str]:
        return name, f"{value:+.1%}", f"within {WANTED_ERROR:.0%}", _mark(value, WANTED_ERROR)

    near = "✓" if found.correlation >= WANTED_CORRELATION else "✗"
    return [
        error("mean latency", found.mean_error),
        error("P99 latency", found.p99_error),
        error("makespan", found.makespan_error),
        (
            "correlation of latencies, request by request",
            f"{found.correlation:.4f}",
            f"≥ {WANTED_CORRELATION}",
            near,
        ),
        ("time from the first token to the last", f"{found.token_error:+.1%}", "", ""),
        ("time to the first token", f"{found.wait_error_s * 1e3:+.0f} ms", "", ""),
    ]


def _mark(error: float, wanted: float) -> str:
    return "✓" if abs(error) <= wanted else "✗"


# -- whole runs ------------------------------------------------------------------------------------


def runs_report(found: Sequence[LiveFidelity], profile: Profile) -> Report:
    """Finished runs beside their simulations."""
    error = fmean(abs(one.step_error) for one in found)
    mean, wanted = f"{error:.1%} {_mark(error, WANTED_STEP_ERROR)}", f"{WANTED_STEP_ERROR:.0%}"
    rows = [*map(_run_row, found), ("mean size of the errors", "", "", mean, "", "")]
    notes = [
        f"wanted: a mean error of the step time of at most {wanted}; + is simulated too slow",
        f"profile {profile.name}: {profile.provenance.get('measured', 'not measured here')}",
    ]
    columns = ("run", "step\nmeasured", "step\nsimulated", "error", "each\nstep", "tokens/s")
    sheet = Sheet("a finished run, and the same trajectories simulated", columns, rows, notes)
    body = {
        "profile": profile.name,
        "mean_error": error,
        "wanted": WANTED_STEP_ERROR,
        "runs": [_run_json(one) for one in found],
    }
    return Report((sheet,), {"live_fidelity": body})


def _run_row(one: LiveFidelity) -> tuple[str, ...]:
    return (
        one.name,
        f"{one.recorded.step_s:.2f} s",
        f"{one.simulated.step_s:.2f} s",
        f"{one.step_error:+.1%}",
        f"{one.each_error:.0%}",
        f"{one.recorded.tokens_per_s:,.0f} / {one.simulated.tokens_per_s:,.0f}",
    )


def _run_json(one: LiveFidelity) -> dict[str, object]:
    return {
        "run": one.name,
        "steps": len(one.recorded.steps_s),
        "measured_step_s": one.recorded.step_s,
        "simulated_step_s": one.simulated.step_s,
        "step_error": one.step_error,
        "each_step_error": one.each_error,
        "train_error": one.train_error,
        "measured_tok_s": one.recorded.tokens_per_s,
        "simulated_tok_s": one.simulated.tokens_per_s,
    }


# -- regret ----------------------------------------------------------------------------------------


def regret_sheet(found: Sequence[Regret]) -> Sheet:
    """What libra lost, a row for each trace, drift and start, and what the columns mean."""
    columns = ("", "start", "regret", "steady", "of the\ngain", "over\nuniform", "moves")
    rows = [
        (
            f"{one.trace.partition('_')[0]}, {one.variant}",
            one.start,
            f"{percents(one.regret)}{half_interval(one.ci95)} %",
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
        "steady: the same without the filling of the pipeline at the start of the run",
        f"of the gain: libra's part of the clairvoyant's over it; {nothing}",
    )
    seeds = max(one.seeds for one in found)
    about = f"; ± 95 % interval over {seeds} seeds" if seeds > 1 else ""
    return Sheet(f"regret{about}", columns, rows, notes)


def percents(part: float) -> str:
    """A share with its sign: +1.2."""
    return f"{part * 100:+.1f}"


def half_interval(spread: Interval | None) -> str:
    """Half the width of an interval of shares, after its mean; empty if there is none."""
    return "" if spread is None else f" ± {(spread[1] - spread[0]) * 50:.1f}"


# -- the paper -------------------------------------------------------------------------------------


def peers_report(rows: Sequence[PeerRow]) -> Report:
    """What libra and its peers took, run by run."""
    table = [
        (
            row.contender,
            f"{row.latency_s:g}",
            str(row.seed),
            *("" if value is None else amount(value) for value in (row.step_s, row.first_s)),
            "never" if row.success_s is None else amount(row.success_s),
            f"{row.reward:.3f}",
            f"{row.area:.3f}",
        )
        for row in rows
    ]
    found = differences(rows)
    notes = [
        f"step: median, without the first {WARM_STEPS}; first: from launch to the end of step 1",
        f"learned: from launch until the mean reward of {SMOOTHED} steps was {SUCCESS}",
        f"reward: mean of the last {SMOOTHED} steps; area: of all steps",
        *map(_peer_difference, found),
    ]
    columns = ("", "tool\ns", "seed", "step\ns", "first\ns", "learned\ns", "reward", "area")
    sheet = Sheet("libra and its peers, on this machine", columns, table, notes)
    body = {
        "peers": [asdict(row) for row in rows],
        "differences": [asdict(one) for one in found],
    }
    return Report((sheet,), body)


def _peer_difference(one: PeerDifference) -> str:
    half = "" if one.ci95 is None else f" ± {one.ci95[1] - one.mean:.3f}"
    where = f"tools of {one.latency_s:g} s, {one.seeds} seeds"
    return f"libra less trl, {where}: {one.number} {one.mean:+.3f}{half}"


def publication_report(found: PublicationResult) -> Report:
    """The published ratios beside those of the shipped constants and of the nearest ones."""
    ratios = (SHORT_RATIO, LONG_RATIO, ROLLOUT_GROWTH)
    nearest, published = found.rows[:NEAREST], TRAINING_GROWTH
    table = [
        ("published", "", "", "", "", *_ratios(*ratios)),
        _publication_row("as shipped", found.shipped),
        *(_publication_row("" if at else "nearest", row) for at, row in enumerate(nearest)),
    ]
    notes = [
        "short: tokens/s of 8 servers of one GPU over one of 8, at 0 to 2K tokens",
        "long: the reverse, at 16K to 32K; growth: rollout time from 1K to 32K",
        "8 GPUs, a batch of 512 trajectories",
        f"training grows {found.training_growth:.1f} times from 1K to 32K, published {published}",
        f"that would take {amount(found.needed_step_s)} s a step, whatever is in it",
    ]
    columns = ("", "step\nms", "sequence\nus", "seats", "KV\nshare", "short", "long", "growth")
    sheet = Sheet(f"the published ratios, {found.profile}", columns, table, notes)
    body = {
        "published": dict(zip(("short", "long", "growth"), ratios, strict=True)),
        "shipped": asdict(found.shipped),
        "nearest": [asdict(row) for row in nearest],
        "training_growth": found.training_growth,
    }
    return Report((sheet,), body)


def _publication_row(title: str, row: PublicationRow) -> Sequence[str]:
    given = row.constants
    constants = (
        f"{given.step_s * 1e3:g}",
        f"{given.sequence_s * 1e6:g}",
        str(given.max_num_seqs),
        f"{given.kv_share:g}",
    )
    return title, *constants, *_ratios(row.short_ratio, row.long_ratio, row.growth)


def _ratios(short: float, long: float, growth: float) -> Iterable[str]:
    return f"{short:.2f}", f"{long:.2f}", f"{growth:.0f}"


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
