"""``libra show``: prints trajectories to read."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from libra_cli.cli.terminal import errors_told, out


class TokenColor(StrEnum):
    """The quantity by which ``libra show`` colours tokens."""

    ADVANTAGE = "advantage"
    RATIO = "ratio"
    VERSION = "version"
    LOGPROB = "logprob"


def show(
    run_dir: Annotated[
        str | None,
        typer.Argument(metavar="RUN_DIR", help="The newest run under runs/ if left out."),
    ] = None,
    trajectory: Annotated[
        str | None,
        typer.Argument(metavar="TRAJECTORY", help="Such as 17.3; a step's are listed without."),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The one with the highest reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The one with the lowest reward.")] = False,
    longest: Annotated[
        bool, typer.Option("--longest", help="The one with the most generated tokens.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="Those that this step trained; the newest if left out.")
    ] = None,
    color: Annotated[
        TokenColor | None,
        typer.Option(help="Colour tokens by it; without colours its values stand in the text."),
    ] = None,
) -> None:
    """Show a trajectory as a conversation, or list those that a step was trained on."""
    from libra_cli.app import show as command
    from libra_cli.report.terminal.trajectory import conversation_view, table_view

    with errors_told():
        asked = {"best": best, "worst": worst, "longest": longest}
        rankings = [name for name, wanted in asked.items() if wanted]
        if len(rankings) > 1:
            raise typer.BadParameter(f"--{rankings[0]} and --{rankings[1]} are two trajectories")
        run, name = _names(run_dir, trajectory)
        if name and (rankings or step is not None):
            raise typer.BadParameter(f"trajectory {name} is named: --step and the rest choose one")
        ranking = rankings[0] if rankings else ""
        order = command.ShowOrder(run, name, ranking, step, str(color or ""))
        told = command.show(order)
        if isinstance(told, command.StepTable):
            out.print(table_view(told.run_dir, told.step, told.played))
        else:
            out.print(conversation_view(told, order.color))


def _names(first: str | None, second: str | None) -> tuple[Path | None, str]:
    """The run and the trajectory: ``libra show 17.3`` is of the newest run."""
    if first and not second and re.fullmatch(r"\d+(\.\d+){1,2}", first):
        return None, first
    return Path(first) if first else None, second or ""
