"""``libra init``: a first recipe for the hosts that there are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from libra_cli.cli import completion
from libra_cli.cli.terminal import err, errors_told, out


def init(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HOST",
            help="Hosts as ssh takes them, or gpu-[01-06]; this machine if left out.",
            autocompletion=completion.hosts,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A Hugging Face directory on the hosts; a small model if left out."),
    ] = None,
    recipe: Annotated[Path, typer.Option("-o", "--output", help="Where to write it.")] = Path(
        "recipe.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace a recipe that is there.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Write the JSON Schema beside it, for editors.")
    ] = False,
) -> None:
    """Write a commented recipe for some hosts, by what they have. Asks nothing."""
    from libra_cli.app.init.command import InitOrder, init

    with errors_told():
        with err.status("asking the hosts"):
            made = init(InitOrder(tuple(hosts or ()), model, recipe, force, schema))
        for line in made.found:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        for problem, hint in made.problems:
            err.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
            if hint:
                err.print(f"next: {hint}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"wrote {recipe}", markup=False, highlight=False, soft_wrap=True)
    for command in made.next:
        out.print(f"next: {command}", markup=False, highlight=False, soft_wrap=True)
