"""``libra help``: prints the pages of documentation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from libra_cli.cli import completion
from libra_cli.cli.terminal import errors_told, out

WIDEST = 100
"""Columns of a page in a terminal: longer lines are hard to read."""


def show_help(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC",
            help="A page; all topics if left out.",
            autocompletion=completion.topics,
        ),
    ] = None,
) -> None:
    """Show a page of the documentation, or the list of pages."""
    from libra_cli.app.pages import page_of, pages, title_of
    from libra_cli.cli.page_view import PageView

    with errors_told():
        if topic is not None:
            page = page_of(topic)
            if out.is_terminal:
                out.print(PageView(page), width=min(out.width, WIDEST))
            else:
                typer.echo(page)
            return
        known = pages()
    width = max(map(len, known))
    for name, page in known.items():
        out.print(f"{name:<{width}}  {title_of(page)}", markup=False, highlight=False)
    out.print(
        "\nlibra help start is the first to read; libra explain KEY shows a key of a recipe",
        highlight=False,
    )
