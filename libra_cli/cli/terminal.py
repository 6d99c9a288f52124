"""The two consoles of the command line, and how an expected error is told on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from libra_cli.config.errors import LibraError

out = Console()
err = Console(stderr=True)


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
