"""A run's directory on the controller, ``<run.directory>/<name>-<time>``, and what lies in it.

recipe.json   the recipe, resolved, secrets masked  libra.db      the journal
model/        the tokenizer's files                 report.html   made at the end
orders/       what ``libra rebalance`` asks for     libra.lock    held by the one writer
secrets.json  the run's token                       console.log   what no terminal could show
tokens.bin    the tokens of all trajectories that have ended
images/       what trajectories were shown, each image once, and where it stood
events.log    what happened, for the controller after this one; gone when the run has ended

Only this user can enter the directory and read what is in it, unless the user opens it to others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path

from libra_cli.config.errors import StateError, WrongRun
from libra_cli.config.recipe import Recipe, RunSpec
from libra_cli.runtime.store.controller_process import controller_alive
from libra_cli.runtime.store.nearby_runs import RUNS
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.schema import DATABASE

RECIPE = "recipe.json"
CONSOLE_LOG = "console.log"
"""What a run says that has no terminal, or none that takes it."""


@contextmanager
def new_run_dir(run: RunSpec) -> Iterator[Path]:
    """Make a run directory that no other run has; it goes again if nothing was put into it.

    Raises:
        StateError: it cannot be made.
    """
    directory = Path(run.directory)
    with _can_be_made(directory):
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        run_dir = _reserved(directory, f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        yield run_dir
    finally:
        with suppress(OSError):  # something is in it
            for path in (run_dir, *missing):
                path.rmdir()


def _reserved(directory: Path, name: str) -> Path:
    """Make and return a directory of this name, or with the first number after it that is free."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for one in names if _is_made(path := directory / one))


def _is_made(path: Path) -> bool:
    """Make the directory, and return whether it was not there."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def make_run_dir(run_dir: Path) -> None:
    """Make the directory for this user alone, if it is not there yet; one that is there stays open
    to whom its owner has opened it.

    Raises:
        StateError: it cannot be made.
    """
    with _can_be_made(run_dir):
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_private(run_dir: Path) -> None:
    """Make the directory, or close one that is there, with its database, to all but this user.

    Raises:
        StateError: it cannot be made, or belongs to somebody else.
    """
    make_run_dir(run_dir)
    with _can_be_made(run_dir):
        for path, mode in ((run_dir, 0o700), (run_dir / DATABASE, 0o600)):
            if path.exists() and path.stat().st_mode & 0o077:  # an older libra let everybody in
                path.chmod(mode)


@contextmanager
def _can_be_made(directory: Path) -> Iterator[None]:
    """Raise StateError where the directory cannot be made."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{directory} cannot be made for this user alone: {error}",
            hint="name another run.directory in the recipe",
        ) from error


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read; it appears whole, once it is on disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def append_whole(path: Path, text: str) -> None:
    """Write text at the end of a file: all of it, or nothing where a disk takes only a part.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        end, rest = file.seek(0, os.SEEK_END), memoryview(text.encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
            raise


def newest_run(directory: Path = RUNS) -> Path:
    """The run under ``directory`` that started last.

    Raises:
        WrongRun: there is no run that can be read.
    """
    found = _newest_first(directory)
    if not found:
        raise WrongRun(
            f"there is no run under {directory}",
            hint="libra quickstart makes one; or name a run directory",
        )
    return found[0]


def running_runs(directory: Path = RUNS) -> list[Path]:
    """Return the runs under ``directory`` whose controllers live, the newest first."""
    return [run_dir for run_dir in _newest_first(directory) if _is_alive(run_dir)]


def _newest_first(directory: Path) -> list[Path]:
    started: dict[Path, float] = {}
    for database in directory.glob(f"*/{DATABASE}"):
        try:
            with Reader(database.parent) as reader:
                started[database.parent] = reader.run().started_at
        except StateError:
            continue  # of a newer libra, or just being made: not what was asked for
    return sorted(started, key=lambda run_dir: (started[run_dir], run_dir.name), reverse=True)


def _is_alive(run_dir: Path) -> bool:
    with Reader(run_dir) as reader:
        return controller_alive(reader)


def keep_recipe(recipe: Recipe, run_dir: Path) -> None:
    """Write the recipe, its secrets masked, where only this user can read it."""
    write_private(run_dir / RECIPE, recipe.model_dump_json(indent=2))


def recipe_of(run_dir: Path) -> Recipe:
    """The recipe a run was made from, without its secrets.

    Raises:
        WrongRun: the run directory has none that can be read.
    """
    try:
        # A key that went since the run was made says nothing any more.
        text = (run_dir / RECIPE).read_text(encoding="utf-8")
        return Recipe.model_validate_json(text, extra="ignore")
    except (OSError, ValueError) as error:
        raise WrongRun(
            f"{run_dir} has no usable {RECIPE}: {error}", hint=f"ls {run_dir}"
        ) from error
