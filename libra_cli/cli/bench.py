"""``libra bench``: experiments in virtual time, on recorded trajectories.

Options may stand before or after the experiment's name; one it does not know is refused.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from libra_cli.cli.reports import Json, ProfileName, only_json, show_report, working, write_json
from libra_cli.cli.terminal import err, errors_told, out

if TYPE_CHECKING:
    from libra_cli.bench.config import ExperimentConfig, Progress
    from libra_cli.bench.results import ExperimentResult

bench = typer.Typer(
    help="Measure policies and planners in a simulator, on real traces.",
    invoke_without_command=True,
)

Traces = Annotated[
    list[str] | None,
    typer.Option("--trace", help="A file, or a shipped trace by the beginning of its name."),
]
Gpus = Annotated[int, typer.Option(min=1, help="The budget.")]
Policies = Annotated[str, typer.Option(help="Only these, separated by commas.")]
Planners = Annotated[str, typer.Option(help="Only these, separated by commas.")]
PolicyName = Annotated[str, typer.Option("--policy", help="Under which planners are compared.")]
Drift = Annotated[
    str,
    typer.Option(
        help="What changes over the run: 1,4 (lengths), tools:1,20, turns:1,3, task:TRACE, none; "
        "several, with spaces between, are compared one by one."
    ),
]
Bound = Annotated[int, typer.Option("--bound", min=0, help="training.max_staleness of the runs.")]
Rule = Annotated[
    str, typer.Option("--rule", help="training.staleness of the runs, instead of its default.")
]
Network = Annotated[
    float, typer.Option("--network", min=0.1, help="Gigabits a second between two hosts.")
]
Stream = Annotated[
    bool, typer.Option("--stream", help="training.stream: steps begin on what is ready.")
]
MaxLen = Annotated[
    int,
    typer.Option(
        "--max-len", min=2, help="model.max_len: trajectories are cut there, or where memory ends."
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Workloads; every contender gets the same ones.")]
Random = Annotated[
    int,
    typer.Option(
        "--random", min=0, help="Instead: libra in so many circumstances, drawn at random."
    ),
]
First = Annotated[int, typer.Option("--first", min=0, help="The number of the first of them.")]
Out = Annotated[
    Path | None, typer.Option("--out", help="Where bench.html goes, instead of under runs/.")
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="RECIPE",
        help="Start its servers and trainer, measure them, write a profile to --out.",
    ),
]

GPUS, PROFILE, SEEDS, POLICY, DRIFT = 48, "a800-qwen3-14b", 3, "libra", "1,4"
BOUND, RULE, NETWORK, MAX_LEN = 1, "", 200.0, 131_072
REGRET_GPUS, REGRET_DRIFTS = 24, "1,4 4,1 tools:1,20 task:mint"
REGRET_TRACES = ["tau2bench", "moatless"]
QUICK = "least-loaded,sticky-least-loaded,libra,known-lengths"
"""The policies of a bare ``libra bench`` and of ``sensitivities``, unless others are named."""


@bench.callback()
def _default(
    context: typer.Context,
    trace: Traces = None,
    gpus: Gpus = GPUS,
    profile: ProfileName = PROFILE,
    policies: Policies = "",
    planners: Planners = "",
    policy: PolicyName = POLICY,
    drift: Drift = DRIFT,
    bound: Bound = BOUND,
    rule: Rule = RULE,
    network: Network = NETWORK,
    stream: Stream = False,
    max_len: MaxLen = MAX_LEN,
    seeds: Seeds = SEEDS,
    out_dir: Out = None,
    json_file: Json = None,
    calibrate: Calibrate = None,
) -> None:
    """Measure policies and planners in a simulator, on real traces.

    Without an experiment: some policies, or what --policies and --planners name.
    """
    if context.invoked_subcommand is not None:
        _hand_down(context, context.invoked_subcommand)
        return
    given = _given(context)
    if calibrate is not None:
        _calibrate(calibrate, out_dir, json_file, given - {"calibrate", "out_dir", "json_file"})
        return
    from libra_cli.bench import experiments

    chosen: list[Callable[[ExperimentConfig, Progress], ExperimentResult]] = []
    planning = bool(given & {"planners", "policy", "drift"})
    if "policies" in given or not planning:
        chosen.append(experiments.schedule)
    if planning:
        chosen.append(experiments.plan)
    _run(chosen, {**context.params, "policies": policies or QUICK})


@bench.command()
def schedule(
    context: typer.Context,
    trace: Traces = None,
    gpus: Gpus = GPUS,
    profile: ProfileName = PROFILE,
    policies: Policies = "",
    bound: Bound = BOUND,
    rule: Rule = RULE,
    network: Network = NETWORK,
    stream: Stream = False,
    max_len: MaxLen = MAX_LEN,
    seeds: Seeds = SEEDS,
    out_dir: Out = None,
    json_file: Json = None,
) -> None:
    """Policies on fixed plans: who places trajectories best."""
    from libra_cli.bench import experiments

    _run([experiments.schedule], context.params)


@bench.command()
def plan(
    context: typer.Context,
    trace: Traces = None,
    gpus: Gpus = GPUS,
    profile: ProfileName = PROFILE,
    planners: Planners = "",
    policy: PolicyName = POLICY,
    drift: Drift = DRIFT,
    bound: Bound = BOUND,
    rule: Rule = RULE,
    network: Network = NETWORK,
    stream: Stream = False,
    max_len: MaxLen = MAX_LEN,
    seeds: Seeds = SEEDS,
    random: Random = 0,
    first: First = 0,
    out_dir: Out = None,
    json_file: Json = None,
) -> None:
    """Planners on a fixed policy, while the workload drifts; or libra where --random takes it."""
    from libra_cli.bench import experiments

    if random:
        _tournament(context, random, first)
        return
    _run([experiments.plan], context.params)


@bench.command()
def regret(
    context: typer.Context,
    trace: Traces = None,
    gpus: Gpus = REGRET_GPUS,
    profile: ProfileName = PROFILE,
    policy: PolicyName = POLICY,
    drift: Drift = REGRET_DRIFTS,
    bound: Bound = BOUND,
    rule: Rule = RULE,
    network: Network = NETWORK,
    stream: Stream = False,
    max_len: MaxLen = MAX_LEN,
    seeds: Seeds = SEEDS,
    out_dir: Out = None,
    json_file: Json = None,
) -> None:
    """libra's plans beside the best ones in hindsight: what is lost by not having known."""
    from libra_cli.bench.regret import regret as compare

    _run([compare], {**context.params, "trace": trace or REGRET_TRACES})


@bench.command()
def ablation(
    context: typer.Context,
    trace: Traces = None,
    gpus: Gpus = GPUS,
    profile: ProfileName = PROFILE,
    drift: Drift = DRIFT,
    bound: Bound = BOUND,
    rule: Rule = RULE,
    network: Network = NETWORK,
    stream: Stream = False,
    max_len: MaxLen = MAX_LEN,
    seeds: Seeds = SEEDS,
    out_dir: Out = None,
    json_file: Json = None,
) -> None:
    """libra built up part by part, and its scheduler with each part removed."""
    from libra_cli.bench import experiments

    _run([experiments.ablation], context.params)


@bench.command()
def sensitivities(
    context: typer.Context,
    trace: Traces = None,
    gpus: Gpus = GPUS,
    profile: ProfileName = PROFILE,
    policies: Policies = "",
    bound: Bound = BOUND,
    rule: Rule = RULE,
    network: Network = NETWORK,
    stream: Stream = False,
    max_len: MaxLen = MAX_LEN,
    seeds: Seeds = SEEDS,
    out_dir: Out = None,
    json_file: Json = None,
) -> None:
    """Policies where a step costs more, and where costs are estimated wrongly."""
    from libra_cli.bench import experiments

    _run([experiments.sensitivities], {**context.params, "policies": policies or QUICK})


@bench.command()
def staleness(
    trace: Traces = None,
    gpus: Gpus = GPUS,
    profile: ProfileName = PROFILE,
    rules: Annotated[str, typer.Option(help="Only these, separated by commas.")] = "",
    bounds: Annotated[
        str, typer.Option(help="Values of training.max_staleness, separated by commas.")
    ] = "1,2,4",
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of a run.")] = 12,
    drift: Drift = DRIFT,
    seeds: Seeds = SEEDS,
    json_file: Json = None,
) -> None:
    """Rules that make a batch: throughput, age of tokens, and which lengths are trained."""
    from libra_cli.bench.report.staleness import staleness_report
    from libra_cli.bench.staleness import staleness as compare
    from libra_cli.sim.traces import DEFAULT_TRACE

    with errors_told():
        _warn_of_traces(trace or ())
        with working() as progress:
            rows = compare(
                trace or (DEFAULT_TRACE,),
                rules,
                bounds,
                seeds=seeds,
                steps=steps,
                gpus=gpus,
                profile=profile,
                drift=drift,
                progress=progress,
            )
        show_report(staleness_report(rows), json_file)


_DRAWN = {
    *("gpus", "profile", "planners", "drift", "bound", "rule", "stream", "max_len"),
    *("seeds", "out_dir"),
}
"""Options that mean nothing beside ``--random``, which draws them."""


def _tournament(context: typer.Context, number: int, first: int) -> None:
    from libra_cli.bench.config import traces_of
    from libra_cli.bench.report.tournament import tournament_report
    from libra_cli.bench.tournament import tournament

    if foreign := sorted(_given(context) & _DRAWN):
        flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
        raise typer.BadParameter(f"--random draws what {flags[foreign[0]]} says: leave it out")
    params = context.params
    with errors_told():
        traces = traces_of(params["trace"] or ())
        with working() as progress:
            bouts = tournament(
                traces,
                number,
                progress,
                first=first,
                network=params["network"],
                policy=params["policy"],
            )
        show_report(tournament_report(bouts), params["json_file"])


def _calibrate(
    recipe: Path, profile: Path | None, json_file: Path | None, foreign: set[str]
) -> None:
    from libra_cli.bench.calibration.profile import calibrate
    from libra_cli.bench.report.sheets import calibration_report

    if foreign:
        raise typer.BadParameter("--calibrate goes with --out and --json only")
    with errors_told():
        with working() as progress:
            # It takes minutes: where no line can be drawn over, lines are written.
            note = progress if err.is_terminal else err.print
            found, path = calibrate(recipe, profile, progress=note)
        show_report(calibration_report(found, path), json_file)


# -- running and printing --------------------------------------------------------------------------


def _run(
    experiments: Sequence[Callable[[ExperimentConfig, Progress], ExperimentResult]],
    params: dict[str, Any],
) -> None:
    from libra_cli.bench.config import ExperimentConfig
    from libra_cli.bench.report import files
    from libra_cli.bench.results import to_json

    began, json_file = time.monotonic(), params["json_file"]
    quiet = only_json(json_file)
    with errors_told():
        config = ExperimentConfig.parse(**_arguments(params))
        _warn(config.warnings)
        with working() as progress:
            results = [experiment(config, progress) for experiment in experiments]
        # First what took long to find out, then the report, which could fail.
        write_json(json_file, to_json(results))
        if not quiet:
            _print(results)
        with working() as progress:
            progress("drawing the report")
            command = f"libra {shlex.join(sys.argv[1:])}"
            report = files.write_report(params["out_dir"], results, config, command)
    if not quiet:
        took = f"{time.monotonic() - began:.0f} s"
        out.print(f"report: {report}  ({took})", markup=False, soft_wrap=True, highlight=False)


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        err.print(line, style="yellow", markup=False, soft_wrap=True, highlight=False)


def _warn_of_traces(names: Sequence[str]) -> None:
    """What was left out of the traces, where no ``ExperimentConfig`` reads them."""
    from libra_cli.sim.traces import load_trace

    _warn([note for name in names for note in load_trace(name).notes])


def _arguments(params: dict[str, Any]) -> dict[str, Any]:
    """What ``ExperimentConfig.parse`` takes; for what the experiment has no option, its default."""
    defaults: dict[str, Any] = {"policies": "", "planners": "", "policy": POLICY, "drift": DRIFT}
    defaults |= {
        "bound": BOUND,
        "rule": RULE,
        "network": NETWORK,
        "stream": False,
        "max_len": MAX_LEN,
    }
    named = {name: params.get(name, default) for name, default in defaults.items()}
    same = {name: params[name] for name in ("gpus", "profile", "seeds")}
    return {"traces": params["trace"] or (), **same, **named}


def _print(results: Sequence[ExperimentResult]) -> None:
    from libra_cli.bench.report.sheets import regret_sheet
    from libra_cli.bench.report.terminal import comparison_view, notes_view, sheets_view

    for result in results:
        if result.regrets:
            out.print(sheets_view([regret_sheet(result.regrets)]))
            out.print()
        for comparison in result.comparisons:
            out.print(comparison_view(result.title, comparison))
            out.print()
        if result.notes:
            out.print(notes_view(result.notes))
            out.print()


# -- options before the experiment's name ----------------------------------------------------------


def _given(context: typer.Context) -> set[str]:
    """The parameters the user gave, by name."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _hand_down(context: typer.Context, experiment: str) -> None:
    """Make the options before an experiment's name its defaults; refuse what it does not know."""
    assert isinstance(context.command, TyperGroup)
    known = {parameter.name for parameter in context.command.commands[experiment].params}
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = _given(context)
    for name in sorted(given - known):
        raise typer.BadParameter(f"libra bench {experiment} has no {flags[name]}")
    context.default_map = {experiment: {name: context.params[name] for name in given}}
