"""The options of ``libra bench``: each declared once, and taken by the experiments that know it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from libra_cli.bench.conditions import (
    DRIFT,
    GPUS,
    MAX_LEN,
    NETWORK,
    POLICY,
    PROFILE,
    SEEDS,
    STALENESS,
    Conditions,
)
from libra_cli.cli.reports import Json, ProfileName

ON = ("traces", "gpus", "profile")
UNDER = ("bound", "rule", "network", "stream", "max_len", "shapes", "seeds")
TO = ("out_dir", "json_file")

Only = Annotated[str, typer.Option(help="Only these, separated by commas.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of all experiments as typed, of which each takes some."""

    traces: Annotated[
        list[str],
        typer.Option("--trace", help="A file, or a shipped trace by the beginning of its name."),
    ] = field(default_factory=list)
    gpus: Annotated[int, typer.Option(min=1, help="The budget.")] = GPUS
    profile: ProfileName = PROFILE
    policies: Only = ""
    planners: Only = ""
    policy: Annotated[str, typer.Option(help="Under which planners are compared.")] = POLICY
    drift: Annotated[
        str,
        typer.Option(
            help="What changes over the run: 1,4 (lengths), tools:1,20, turns:1,3, contexts:1,4, "
            "filtered:0,0.5, task:TRACE, none; 1/4: at once. Several, with spaces between, are "
            "compared one by one."
        ),
    ] = DRIFT
    bound: Annotated[int, typer.Option(min=0, help="training.max_staleness of the runs.")] = (
        STALENESS
    )
    rule: Annotated[
        str, typer.Option(help="training.staleness of the runs, instead of its default.")
    ] = ""
    network: Annotated[
        float, typer.Option(min=0.1, help="Gigabits a second of a host: gradients and versions.")
    ] = NETWORK
    stream: Annotated[
        bool, typer.Option("--stream", help="training.stream: steps begin on what is ready.")
    ] = False
    max_len: Annotated[
        int,
        typer.Option(
            min=2, help="model.max_len: trajectories are cut there, or where memory ends."
        ),
    ] = MAX_LEN
    shapes: Annotated[
        str, typer.Option(help="rollout.shapes of the plans: alike, mixed or auto.")
    ] = "alike"
    seeds: Annotated[
        int, typer.Option(min=1, help="Workloads; every contender gets the same ones.")
    ] = SEEDS
    random: Annotated[
        int,
        typer.Option(min=0, help="Instead: libra in so many circumstances, drawn at random."),
    ] = 0
    first: Annotated[int, typer.Option(min=0, help="The number of the first of them.")] = 0
    rules: Only = ""
    bounds: Annotated[
        str, typer.Option(help="Values of training.max_staleness, separated by commas.")
    ] = "1,2,4"
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of a run.")] = 12
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute, to see the page; its numbers mean nothing.")
    ] = False
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="RECIPE",
            help="Start its servers and trainer, measure them, write a profile to --out.",
        ),
    ] = None
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The directory of bench.html, instead of one under runs/; the file of a profile.",
        ),
    ] = None
    json_file: Json = None

    @property
    def conditions(self) -> Conditions:
        """The options as the conditions of an experiment."""
        said = asdict(self) | {"traces": tuple(self.traces)}
        return Conditions(**{one.name: said[one.name] for one in fields(Conditions)})


Command = Callable[[typer.Context, BenchOptions], None]


def taking(*names: str, **defaults: Any) -> Callable[[Command], Callable[..., None]]:
    """Make a command take these options, some of them with defaults of its own."""
    hints = get_type_hints(BenchOptions, include_extras=True)
    usual = {
        one.name: one.default if one.default_factory is MISSING else one.default_factory()
        for one in fields(BenchOptions)
    }
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("context", kind, annotation=typer.Context)] + [
        inspect.Parameter(
            name, kind, annotation=hints[name], default=defaults.get(name, usual[name])
        )
        for name in names
    ]

    def with_options(command: Command) -> Callable[..., None]:
        @wraps(command)
        def spelled_out(context: typer.Context, **typed: Any) -> None:
            command(context, BenchOptions(**typed))

        vars(spelled_out).update(
            __signature__=inspect.Signature(parameters),
            __annotations__={one.name: one.annotation for one in parameters},
        )
        return spelled_out

    return with_options


# -- which were given, and where -------------------------------------------------------------------


def given(context: typer.Context) -> set[str]:
    """The options that the user gave, by name; those before an experiment's name are its map."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    typed = ("COMMANDLINE", "DEFAULT_MAP")
    return {name for name, source in sources.items() if source and source.name in typed}


def flag_of(context: typer.Context, name: str) -> str:
    """Return how an option of that name is typed."""
    return next(one.opts[0] for one in context.command.params if one.name == name)


def hand_down(context: typer.Context, experiment: str) -> None:
    """Make the options before an experiment's name its defaults; refuse what it does not know."""
    assert isinstance(context.command, TyperGroup)
    known = {parameter.name for parameter in context.command.commands[experiment].params}
    for name in sorted(given(context) - known):
        raise typer.BadParameter(f"libra bench {experiment} has no {flag_of(context, name)}")
    context.default_map = {experiment: {name: context.params[name] for name in given(context)}}
