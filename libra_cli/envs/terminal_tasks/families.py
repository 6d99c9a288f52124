"""All families of tasks that are made, and how a data set of them is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.terminal_tasks import code, files, repositories, scripts, tables, text
from libra_cli.envs.terminal_tasks.made_task import MadeTask, write_task

FAMILIES: Mapping[str, Callable[[Random, int], MadeTask]] = {
    "rename": files.rename,
    "duplicates": files.duplicates,
    "permissions": files.permissions,
    "links": files.links,
    "archives": files.archives,
    "checksums": files.checksums,
    "log-counts": text.log_counts,
    "patterns": text.patterns,
    "encodings": text.encodings,
    "dates": text.dates,
    "settings": text.settings,
    "sales": tables.sales,
    "joins": tables.joins,
    "layers": tables.layers,
    "database": tables.database,
    "git": repositories.history,
    "script": scripts.script,
    "mend": code.mend,
    "write": code.write,
}
"""Makers of tasks by name; the number of a task within its family says which kind it is."""


def make_tasks(directory: Path, count: int, seed: int) -> list[str]:
    """Write ``count`` tasks into a directory, the families in turn, and return their names.

    Raises:
        EnvironmentBroken: one of them is there already, or cannot be written.
    """
    names = []
    for index in range(count):
        number, which = divmod(index, len(FAMILIES))
        family, make = list(FAMILIES.items())[which]
        name = f"{family}-{number:03}"
        task = make(Random(f"{seed} {name}"), number)
        try:
            write_task(directory / name, task)
        except OSError as error:
            raise EnvironmentBroken(
                f"{directory / name} cannot be made: {error.strerror}", hint="name a new directory"
            ) from error
        names.append(name)
    return names
