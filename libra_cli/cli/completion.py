"""What the shell may complete arguments with, and those that several commands take.

Nothing here asks a host.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer


def run_directories(incomplete: str) -> Iterator[str]:
    """Yield the runs under the directory that has been typed, or under ``runs``."""
    from libra_cli.runtime.store.schema import DATABASE

    place, slash, _ = incomplete.rpartition("/")
    for database in sorted(Path(place if slash else "runs").glob(f"*/{DATABASE}")):
        if str(database.parent).startswith(incomplete):
            yield str(database.parent)


RunDir = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN_DIR",
        help="A run directory; the newest under runs/ if left out.",
        autocompletion=run_directories,
    ),
]
"""The argument of commands that take the newest run where none is named."""


def topics(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the pages of ``libra help`` with their titles."""
    from libra_cli.app.pages import pages, title_of

    yield from (
        (name, title_of(page)) for name, page in pages().items() if name.startswith(incomplete)
    )


def keys(incomplete: str) -> Iterator[str]:
    """Yield the keys of a recipe, and of status."""
    from libra_cli.app.explain import recipe_keys, status_keys
    from libra_cli.app.pages import page_of

    known = {one.key for one in {**recipe_keys(), **status_keys(page_of("status"))}.values()}
    yield from sorted(key for key in known if key.startswith(incomplete))


def hosts(incomplete: str) -> Iterator[str]:
    """Yield the aliases of ``~/.ssh/config`` that stand for one host."""
    from libra_cli.runtime.hosts.ssh_target import known_aliases

    yield from (name for name in known_aliases() if name.startswith(incomplete))
