"""The two consoles of the command line, and how an expected error is told on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from libra_cli.config.errors import LibraError
from libra_cli.config.text import printable


class PrintingConsole(Console):
    """A console that only prints: what a terminal would obey in a text is shown as its escape.

    Names, logs, errors and observations come from other machines, environments and models.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render to segments, as rich does; those that rich itself
        controls the terminal with stay.
        """
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


out = PrintingConsole()
err = PrintingConsole(stderr=True)


@contextmanager
def errors_told() -> Iterator[None]:
    """Expected errors as a message and the next thing to type; unexpected ones as they are."""
    try:
        yield
    except LibraError as error:
        err.print(str(error), style="red", markup=False, soft_wrap=True, highlight=False)
        if error.hint:
            err.print(f"next: {error.hint}", markup=False, soft_wrap=True, highlight=False)
        raise typer.Exit(error.exit_code) from None
