"""The checks of ``libra bench``: how fast, how near to a real server and to the paper, how right.

Each gives a table to show and the object for ``--json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from libra_cli.bench.experiments import (
    DEFAULT_TRACE,
    BenchError,
    Progress,
    chosen,
    profile_of,
    trace_path,
)
from libra_cli.bench.report.terminal import Sheet, amount
from libra_cli.bench.results import FORMAT, SpeedRow, interval
from libra_cli.sim.traces import load_trace

if TYPE_CHECKING:
    from libra_cli.bench.fidelity.server import Fidelity, RecordedRun
    from libra_cli.bench.placement import PlacementRow
    from libra_cli.bench.publication import PublicationRow
    from libra_cli.sim.engine import StepTimes

REQUESTS, META = "requests.jsonl", "meta.json"
WANTED_ERROR, WANTED_CORRELATION = 0.1, 0.98
SPEED_PROFILE, SPEED_TURNS = "a800-qwen3-14b", 100_000
NEAREST = 8
"""Rows of the publication sweep that are shown."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check shows, and its object for ``--json``."""

    sheets: tuple[Sheet, ...]
    as_json: dict[str, Any]


def speed(progress: Progress) -> tuple[list[SpeedRow], dict[str, Any]]:
    """Decisions a second, plan times, turns a second of the simulator."""
    from libra_cli.bench.speed import speed as measured
    from libra_cli.sim.profiles import load_profile

    trace = load_trace(trace_path(DEFAULT_TRACE))
    rows = measured(trace, load_profile(SPEED_PROFILE), turns=SPEED_TURNS, progress=progress)
    told = [{**asdict(row), "reached": row.reached} for row in rows]
    return rows, {"format": FORMAT, "speed": told}


# -- a recorded run of a real server ---------------------------------------------------------------


def fidelity(
    run: Path, meta: Path | None, *, profile: str, layers: Path | None, gpu: str
) -> CheckResult:
    """The simulated engine beside a recorded run, with a profile or with per-layer measurements.

    ``meta`` left out is the file beside the run whose name ends in ``meta.json``; ``gpu`` left out
    is the beginning of the run's file name. Nothing is fitted to the run.

    Raises:
        LibraError: a file that cannot be read, or a server the profile does not have.
    """
    from libra_cli.bench.fidelity.server import fidelity as compared
    from libra_cli.bench.fidelity.server import read_run

    recorded = read_run(run, meta or _beside(run))
    if layers is None:
        cost, of = _from_profile(profile, recorded), f"profile {profile}"
    else:
        cost, of = _from_layers(layers, gpu or run.name.partition("_")[0], recorded), f"{layers}"
    found = compared(cost, recorded.requests, recorded.max_num_seqs)
    title = f"{recorded.model}, TP{recorded.tensor_parallel}, {found.requests:,} requests; {of}"
    columns = ("simulated against recorded", "", "wanted", "")
    return CheckResult(
        (Sheet(title, columns, _fidelity_rows(found)),),
        {"format": FORMAT, "fidelity": {**asdict(found), "within": found.within()}},
    )


def _beside(run: Path) -> Path:
    meta = run.with_name(run.name.removesuffix(REQUESTS) + META)
    if not run.is_file():
        raise BenchError(f"{run}: there is no such file", hint=f"ls {run.parent}")
    if not (run.name.endswith(REQUESTS) and meta.is_file()):
        raise BenchError(f"{run}: what server it is of is not beside it", hint="--meta META.json")
    return meta


def _from_profile(name: str, recorded: RecordedRun) -> StepTimes:
    profile = profile_of(name)
    model = recorded.model.rpartition("/")[2]
    if profile.model.rpartition("/")[2].lower() != model.lower():
        raise BenchError(
            f"profile {name} is of {profile.model}, and the run of {model}",
            hint="give a profile of that model, or --layers DIRECTORY",
        )
    cost = profile.servers.get(recorded.tensor_parallel)
    if cost is None:
        raise BenchError(
            f"profile {name} has no server of {recorded.tensor_parallel} GPUs",
            hint=f"it has TP {', '.join(map(str, profile.servers))}; give another, or --layers",
        )
    return cost


def _from_layers(folder: Path, gpu: str, recorded: RecordedRun) -> StepTimes:
    from libra_cli.sim.layer_times import layer_times

    return layer_times(
        folder,
        gpu,
        recorded.model,
        recorded.tensor_parallel,
        chunk_tokens=recorded.chunk_tokens,
    )


def _fidelity_rows(found: Fidelity) -> list[Sequence[str]]:
    def error(name: str, value: float) -> Sequence[str]:
        mark = "✓" if abs(value) <= WANTED_ERROR else "✗"
        return name, f"{value:+.1%}", f"within {WANTED_ERROR:.0%}", mark

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


# -- estimates -------------------------------------------------------------------------------------

_PLACEMENT = (
    ("right\n%", "right_share", 100.0),
    ("recall\n%", "mean_recall", 100.0),
    ("wrong, %\nof moves", "wrong_share", 100.0),
    ("wrong\n/ 100", "wrong_per_100", 1.0),
    ("moves\n/ 100", "moves_per_100", 1.0),
    ("calibr.\nerror %", "calibration_error", 100.0),
)
"""Columns of the placement table: heading, attribute of a row, factor."""


def placement(
    traces: Sequence[str], estimators: str, seeds: int, *, apart: bool, progress: Progress
) -> CheckResult:
    """Who puts a trajectory where it belongs, by folds over tasks; a table a trace.

    ``apart``: siblings play one after the other, so that the first ones teach something.

    Raises:
        LibraError: a trace that cannot be read, or an unknown estimator.
    """
    from libra_cli.bench import placement as quality

    names = chosen("estimator", estimators, tuple(quality.CONTENDERS))
    rows = []
    for trace in [load_trace(trace_path(name)) for name in traces or (DEFAULT_TRACE,)]:
        for name in names:
            for seed in range(seeds):
                progress(f"{trace.name}: {name}, seed {seed}")
                rows += quality.placement(trace, (seed,), (name,), together=not apart)
    sheets = [
        _placement_sheet(name, [row for row in rows if row.trace == name])
        for name in dict.fromkeys(row.trace for row in rows)
    ]
    return CheckResult(
        tuple(sheets), {"format": FORMAT, "placement": [asdict(row) for row in rows]}
    )


def _placement_sheet(trace: str, rows: Sequence[PlacementRow]) -> Sheet:
    by_name: dict[str, list[PlacementRow]] = {}
    for row in rows:
        by_name.setdefault(row.estimator, []).append(row)
    table = [
        (name, *(_placement_cell(mine, column, scale) for _, column, scale in _PLACEMENT))
        for name, mine in by_name.items()
    ]
    seeds, placements = len(next(iter(by_name.values()))), rows[0].placements
    notes = (
        f"{placements:,} placements, by folds over tasks"
        + (f"; ± 95 % interval over {seeds} seeds" if seeds > 1 else ""),
        "right: in the true bucket of three; recall: mean over the buckets",
        "wrong: a move that ends further from the true bucket than it began",
    )
    return Sheet(trace, ("", *(title for title, _, _ in _PLACEMENT)), table, notes)


def _placement_cell(rows: Sequence[PlacementRow], column: str, scale: float) -> str:
    values = [scale * value for row in rows if (value := getattr(row, column)) is not None]
    if not values:
        return "–"
    spread = interval(values)
    if spread is None:
        return f"{fmean(values):.1f}"
    half = (spread[1] - spread[0]) / 2
    return f"{fmean(values):.1f}±{half:.{0 if half >= 9.95 else 1}f}"


# -- the paper -------------------------------------------------------------------------------------


def publication(name: str) -> CheckResult:
    """With which constants the cost model says what was published, and what the shipped ones say.

    Raises:
        LibraError: there is no such profile.
    """
    from libra_cli.bench import publication as published

    profile = profile_of(name)
    shipped = published.shipped_row(profile)
    rows = published.publication_table(profile)
    ratios = (published.SHORT_RATIO, published.LONG_RATIO, published.ROLLOUT_GROWTH)
    table = [
        ("published", "", "", "", "", *_ratios(*ratios)),
        _publication_row("as shipped", shipped),
        *(_publication_row("" if at else "nearest", row) for at, row in enumerate(rows[:NEAREST])),
    ]
    grown, needed = published.training_growth(profile)
    notes = [
        "short: tokens/s of 8 servers of one GPU over one of 8, at 0 to 2K tokens",
        "long: the reverse, at 16K to 32K; growth: rollout time from 1K to 32K",
        "8 GPUs, a batch of 512 trajectories",
        f"training grows {grown:.1f} times from 1K to 32K, published {published.TRAINING_GROWTH}",
        f"that would take {amount(needed)} s a step, whatever is in it",
    ]
    columns = ("", "step\nms", "sequence\nus", "seats", "KV\nshare", "short", "long", "growth")
    return CheckResult(
        (Sheet(f"the published ratios, {name}", columns, table, notes),),
        {
            "format": FORMAT,
            "published": dict(zip(("short", "long", "growth"), ratios, strict=True)),
            "shipped": asdict(shipped),
            "nearest": [asdict(row) for row in rows[:NEAREST]],
            "training_growth": grown,
        },
    )


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
