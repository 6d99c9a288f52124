"""``libra explain``: a key in words, and the schema of recipes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from libra_cli.cli import completion
from libra_cli.cli.terminal import errors_told, out

if TYPE_CHECKING:
    from libra_cli.app.explain import KeyMeaning


def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="As training.max_staleness, staleness or nodes[].gpus.",
            autocompletion=completion.keys,
        ),
    ] = "recipe",
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of recipes, for editors.")
    ] = False,
) -> None:
    """Say what a key of a recipe or of status --json means: its type, default and use."""
    from libra_cli.app import explain as commands
    from libra_cli.app.pages import pages

    if schema:
        typer.echo(json.dumps(commands.recipe_schema(), indent=2))
        return
    with errors_told():
        for told in commands.explain(key, pages()):
            _print(told)


def _print(told: KeyMeaning) -> None:
    given = f", {told.default} if left out" if told.default and not told.keys else ""
    words = escape(f" ({told.of}): {told.type}{given}")
    out.print(f"[bold]{escape(told.key)}[/]{words}", highlight=False)
    if told.meaning:
        out.print(f"  {_words(told.meaning)}", markup=False, highlight=False)
    if told.only_with:
        out.print(f"  {told.only_with}", markup=False, highlight=False)
    if told.on_resume and not told.keys:
        out.print(
            f"  when a run goes on (--resume): {told.on_resume}", markup=False, highlight=False
        )
    for name, meaning in told.keys:
        out.print(f"  {name}: {_words(meaning)}", markup=False, highlight=False)
    for topic, sentence in told.pages:
        out.print(f"  libra help {topic}: {sentence}", markup=False, highlight=False)


def _words(docstring: str) -> str:
    """A docstring on one line, with the quotes that the pages have."""
    return " ".join(docstring.replace("``", "`").split())
