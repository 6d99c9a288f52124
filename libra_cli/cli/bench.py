"""``libra bench``: experiments in virtual time, on recorded trajectories.

Options may stand before or after the experiment's name; one it does not know is refused.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from libra_cli.cli.bench_options import (
    ON,
    TO,
    UNDER,
    BenchOptions,
    flag_of,
    given,
    hand_down,
    taking,
)
from libra_cli.cli.reports import (
    Experiment,
    Json,
    one_by_one,
    only_json,
    reporting,
    run_experiments,
    show_report,
    tell_report,
    warn,
    working,
    write_json,
)
from libra_cli.cli.terminal import err, out

bench = typer.Typer(
    help="Measure policies and planners in a simulator, on real traces.",
    invoke_without_command=True,
)

REGRET_GPUS, REGRET_DRIFTS = 24, "1,4 4,1 tools:1,20 task:mint"
REGRET_TRACES = ["tau2bench", "moatless"]
QUICK = "least-loaded,sticky-least-loaded,libra,known-lengths"
"""The policies of a bare ``libra bench``, unless others are named."""
ROUTING_SEEDS = 10
DRAWN = {"gpus", "profile", "planners", "drift", *UNDER} - {"network"}
"""The options that ``--random`` draws, and that are refused beside it."""


@bench.callback()
@taking(*ON, "policies", "planners", "policy", "drift", *UNDER, *TO, "calibrate")
def _default(context: typer.Context, asked: BenchOptions) -> None:
    """Measure policies and planners in a simulator, on real traces.

    Without an experiment: some policies, or what --policies and --planners name.
    """
    if context.invoked_subcommand is not None:
        hand_down(context, context.invoked_subcommand)
        return
    named = given(context)
    if asked.calibrate is not None:
        _calibrate(asked, named)
        return
    from libra_cli.bench import experiments

    chosen: list[Experiment] = []
    planning = bool(named & {"planners", "policy", "drift"})
    if "policies" in named or not planning:
        chosen.append(experiments.schedule)
    if planning:
        chosen.append(experiments.plan)
    _run(chosen, replace(asked, policies=asked.policies or QUICK))


@bench.command()
@taking(*ON, "policies", *UNDER, *TO)
def schedule(context: typer.Context, asked: BenchOptions) -> None:
    """Policies on fixed plans: who places trajectories best."""
    from libra_cli.bench import experiments

    _run([experiments.schedule], asked)


@bench.command()
@taking(*ON, "planners", "policy", "drift", *UNDER, "random", "first", *TO)
def plan(context: typer.Context, asked: BenchOptions) -> None:
    """Planners on a fixed policy, while the workload drifts; or libra where --random takes it."""
    from libra_cli.bench import experiments

    if asked.random:
        _tournament(context, asked)
    else:
        _run([experiments.plan], asked)


@bench.command()
@taking(*ON, "policy", "drift", *UNDER, *TO, gpus=REGRET_GPUS, drift=REGRET_DRIFTS)
def regret(context: typer.Context, asked: BenchOptions) -> None:
    """libra's plans beside the best ones in hindsight: what is lost by not having known."""
    from libra_cli.bench.regret import regret as compare

    _run([compare], replace(asked, traces=asked.traces or REGRET_TRACES))


@bench.command()
def run(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run, ended or not.")],
    gpus: Annotated[
        int | None,
        typer.Option(min=2, help="On so many GPUs, or slots of a host without, as planned."),
    ] = None,
    bound: Annotated[int | None, typer.Option(min=0, help="training.max_staleness.")] = None,
    gpu: Annotated[str, typer.Option(help="On another GPU that libra has prices of: h100.")] = "",
    rule: Annotated[str, typer.Option(help="training.staleness.")] = "",
    planner: Annotated[str, typer.Option(help="planner.kind: fixed or libra.")] = "",
    json_file: Json = None,
) -> None:
    """A run of yours played again: as it was, and as it would have been."""
    from libra_cli.app.what_if.command import Changes, what_if
    from libra_cli.bench.config import RULES, parse_names
    from libra_cli.core.json_form import json_form
    from libra_cli.report.terminal.what_if import what_if_view

    with reporting(json_file):
        staleness = RULES[parse_names("rule", rule, tuple(RULES))[0]] if rule else ""
        kind = parse_names("planner", planner, ("fixed", "libra"))[0] if planner else ""
        with working() as progress:
            told = what_if(run_dir, Changes(gpus, bound, gpu, rule, staleness, kind), progress)
        write_json(json_file, json_form(told))
        if not only_json(json_file):
            out.print(what_if_view(told))


@bench.command()
@taking(*ON, "rules", "bounds", "steps", "drift", "seeds", "json_file")
def staleness(context: typer.Context, asked: BenchOptions) -> None:
    """Rules that make a batch: throughput, age of tokens, and which lengths are trained."""
    from libra_cli.bench.report.staleness import staleness_report
    from libra_cli.bench.staleness import staleness as compare
    from libra_cli.sim.traces import load_trace

    with reporting(asked.json_file):
        # Nothing here makes an ExperimentConfig, which has them among its warnings.
        warn([note for name in asked.traces for note in load_trace(name).notes])
        with working() as progress:
            rows = compare(
                asked.conditions, asked.rules, asked.bounds, steps=asked.steps, progress=progress
            )
        show_report(staleness_report(rows), asked.json_file)


@bench.command()
@taking("traces", "seeds", "json_file", seeds=ROUTING_SEEDS)
def routing(context: typer.Context, asked: BenchOptions) -> None:
    """Rules that say how much work is left: how often they are right, and what they move."""
    from libra_cli.bench.config import traces_of
    from libra_cli.bench.report.routing import routing_report
    from libra_cli.bench.routing import routing as compare

    with reporting(asked.json_file):
        traces = traces_of(asked.traces)
        warn([note for trace in traces for note in trace.notes])
        with working() as progress:
            rows = compare(traces, asked.seeds, progress)
        show_report(routing_report(rows), asked.json_file)


@bench.command()
@taking("quick", *TO)
def paper(context: typer.Context, asked: BenchOptions) -> None:
    """What is published of Libra and StreamRL, beside what the simulator says."""
    from libra_cli.bench.paper.experiment import paper as tables_of
    from libra_cli.bench.paper.tables import QUICK as SMALL
    from libra_cli.bench.paper.tables import WHOLE
    from libra_cli.bench.report.paper import paper_page, paper_report, paper_sheet
    from libra_cli.bench.report.terminal import sheets_view
    from libra_cli.bench.results import FORMAT

    began, quiet = time.monotonic(), only_json(asked.json_file)
    with reporting(asked.json_file, asked.out_dir):
        tables = []
        for table in one_by_one(partial(tables_of, SMALL if asked.quick else WHOLE)):
            tables.append(table)
            if not quiet:
                out.print(sheets_view([paper_sheet(table)]))
        report = paper_report(tables)
        write_json(asked.json_file, {"format": FORMAT, **report.body})
        page = paper_page(report.sheets, asked.out_dir, f"libra {shlex.join(sys.argv[1:])}")
    if not quiet:
        out.print(sheets_view(report.sheets[len(tables) :]))
        tell_report(page, began)


def _run(experiments: Sequence[Experiment], asked: BenchOptions) -> None:
    run_experiments(experiments, asked.conditions, asked.out_dir, asked.json_file)


def _tournament(context: typer.Context, asked: BenchOptions) -> None:
    from libra_cli.bench.config import traces_of
    from libra_cli.bench.report.tournament import tournament_report
    from libra_cli.bench.tournament import tournament

    if foreign := sorted(given(context) & {*DRAWN, "out_dir"}):
        flag = flag_of(context, foreign[0])
        raise typer.BadParameter(f"--random draws what {flag} says: leave it out")
    with reporting(asked.json_file):
        traces = traces_of(asked.traces)
        with working() as progress:
            bouts = tournament(
                traces,
                asked.random,
                progress,
                first=asked.first,
                network=asked.network,
                policy=asked.policy,
            )
        show_report(tournament_report(bouts), asked.json_file)


def _calibrate(asked: BenchOptions, named: set[str]) -> None:
    from libra_cli.bench.calibration.profile import calibrate
    from libra_cli.bench.report.sheets import calibration_report

    assert asked.calibrate is not None
    if named - {"calibrate", "out_dir", "json_file"}:
        raise typer.BadParameter("--calibrate goes with --out and --json only")
    with reporting(asked.json_file):
        with working() as progress:
            # It takes minutes: where no line can be drawn over, lines are written.
            note = progress if err.is_terminal else err.print
            found, path = calibrate(asked.calibrate, asked.out_dir, progress=note)
        show_report(calibration_report(found, path), asked.json_file)
