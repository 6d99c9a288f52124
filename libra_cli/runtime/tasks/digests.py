"""Keeps what the tasks of a run were, so that a run that goes on has the same ones.

A checkpoint counts groups, and a group's number says which row it plays
(``runtime.tasks.mixture``). With other rows the groups that are left would stand for other prompts.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from libra_cli.config.environment import TaskSourceSpec
from libra_cli.config.errors import StateError
from libra_cli.config.recipe import Recipe
from libra_cli.runtime.store.run_directory import write_private
from libra_cli.runtime.tasks.files import files_of

TASKS = "tasks.json"
"""File in the run directory with, for each environment, or for the demonstrations, the digest of
the files of each source."""


def keep_tasks(recipe: Recipe, run_dir: Path) -> None:
    """Write the digests of the recipe's tasks to the run directory, for ``changed_tasks``."""
    write_private(run_dir / TASKS, json.dumps(_digests(recipe), indent=2))


def changed_tasks(recipe: Recipe, run_dir: Path) -> list[str]:
    """Return in words which sources of tasks are others than those of the run.

    An older libra kept nothing of them.

    Raises:
        StateError: what was kept cannot be read.
        EnvironmentBroken: a source cannot be.
    """
    path = run_dir / TASKS
    if not path.exists():
        return []
    try:
        before = json.loads(path.read_bytes())
        pairs = zip(before, _digests(recipe), strict=True)
        changed = [
            (number, place)
            for number, (then, now) in enumerate(pairs)
            for place, (one, other) in enumerate(zip(then, now, strict=True))
            if one != other
        ]
    except (ValueError, TypeError) as error:
        raise StateError(f"{path} cannot be read: {error}", hint=f"rm {path}") from error
    keys = _sources_of(recipe)
    return [
        f"{keys[number][0]}[{place}]: the rows of {keys[number][1][place].path} are others than "
        "when the run began: the groups that are left would stand for other prompts"
        for number, place in changed
    ]


def _digests(recipe: Recipe) -> list[list[str]]:
    return [[_digest(files_of(source)) for source in sources] for _, sources in _sources_of(recipe)]


def _sources_of(recipe: Recipe) -> list[tuple[str, tuple[TaskSourceSpec, ...]]]:
    """Return lists of the recipe's sources, each with the key that holds the list."""
    if recipe.demonstrations:
        return [("demonstrations", recipe.demonstrations)]
    return [
        (f"environment[{number}].tasks", environment.tasks)
        for number, environment in enumerate(recipe.environment)
    ]


def _digest(files: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
