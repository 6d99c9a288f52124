"""``libra import``: a recipe from a configuration of TRL, verl or prime-rl."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from libra_cli.cli.terminal import err, errors_told

if TYPE_CHECKING:
    from libra_cli.app.importing.command import Imported


class Origin(StrEnum):
    """The trainers whose configurations are read."""

    TRL = "trl"
    VERL = "verl"
    PRIME_RL = "prime-rl"


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="TOML, YAML, JSON, a shell or a Python script; of one run. Nothing is executed.",
            exists=True,
            dir_okay=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write it; else to the terminal.")
    ] = None,
    trainer: Annotated[
        Origin | None, typer.Option("--from", help="Whose they are, if they do not tell.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that TRL trains with, if no file says so."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a recipe that is there.")] = False,
) -> None:
    """Write the recipe that says what a configuration of TRL, verl or prime-rl says."""
    from libra_cli.app.importing.command import ImportOrder, import_recipe

    with errors_told():
        named = None if trainer is None else trainer.value
        made = import_recipe(ImportOrder(tuple(files), named, processes, output, force))
        if output is None:
            typer.echo(made.text, nl=False)
        _tell(made, output)


def _tell(made: Imported, output: Path | None) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from libra_cli.app.importing.translation import grouped

    for why, told in grouped(made.left_out):
        err.print(f"\n{why}", style="bold", markup=False, highlight=False)
        for keys, reason in told:
            err.print(Padding(Text(keys, style="yellow"), (0, 0, 0, 2), expand=False))
            err.print(Padding(Text(reason), (0, 0, 0, 4), expand=False))
    counted = f"{len(made.translated)} keys of {made.trainer}'s translated"
    err.print(f"\n{counted}, {len(made.left_out)} left out", markup=False, highlight=False)
    if made.problems:
        err.print(made.problems, style="red", markup=False, highlight=False, soft_wrap=True)
    place = output or "recipe.yaml"
    then = f"libra run --dry-run {place}" if output else f"libra import -o {place} ..."
    err.print(f"next: {then}", markup=False, highlight=False, soft_wrap=True)
