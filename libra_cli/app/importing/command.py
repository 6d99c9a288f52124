"""``libra import``: reads files of another trainer and writes the recipe that says the same."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.app.importing.reading import Source, read
from libra_cli.app.importing.recognition import table_of, trainer_of
from libra_cli.app.importing.shell import COMPUTED
from libra_cli.app.importing.translation import translate
from libra_cli.app.importing.writing import recipe_text
from libra_cli.config.errors import InputError, RecipeError
from libra_cli.config.other_names.rule import Given, LeftOut, Table, Why
from libra_cli.runtime.recipes.loader import load_recipe


@dataclass(frozen=True, slots=True)
class ImportOrder:
    """What the user asks of ``libra import`` on the command line."""

    files: tuple[Path, ...]
    trainer: str | None = None
    """trl, verl or prime-rl; None: by what the files hold."""
    processes: int | None = None
    """The processes that TRL trains with, where no file says so."""
    output: Path | None = None
    """The recipe to write; None: none, its text is returned."""
    force: bool = False


@dataclass(frozen=True, slots=True)
class Imported:
    """The recipe that was made, and what became of the keys of the files."""

    trainer: str
    text: str
    translated: tuple[str, ...]
    """Keys of the files that the recipe follows."""
    left_out: tuple[LeftOut, ...]
    problems: str = ""
    """What the recipe still lacks, a line each, as the loader says it; empty: it loads."""


def import_recipe(order: ImportOrder) -> Imported:
    """Make a recipe of files of TRL, verl or prime-rl, and write it where that is asked.

    Raises:
        InputError: a file cannot be read, is of no trainer or algorithm that is known, or there is
            a recipe already.
    """
    if order.output is not None and order.output.exists() and not order.force:
        raise InputError(
            f"{order.output} is there already",
            hint=f"libra import --force -o {order.output} ..., which replaces it",
        )
    sources = [read(path) for path in order.files]
    trainer = order.trainer or trainer_of(sources[0])
    table, values = table_of(trainer, sources)
    said = values.get("num_processes")
    if order.processes is not None and (said is None or _is_computed(said)):
        values["num_processes"] = order.processes
    known = {key: value for key, value in values.items() if not _is_computed(value)}
    made = translate(table, Given(table.trainer, known, table.defaults))
    if not made.translated:
        raise InputError(
            f"{order.files[0]}: has no value that libra can read for a key that it knows",
            hint="libra help migration says which files libra import reads",
        )
    left_out = (*made.left_out, *_computed(table, values), *_unread(sources))
    names = ", ".join(path.name for path in order.files)
    title = f"Made by libra import of {names} ({table.trainer}); see libra help migration."
    text = recipe_text(title, made.settings, left_out)
    if order.output is not None:
        _write(order.output, text)
    return Imported(table.trainer, text, made.translated, left_out, _problems(text, order.output))


def _is_computed(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_computed(one) for one in value)
    return isinstance(value, str) and COMPUTED in value


def _computed(table: Table, values: Mapping[str, Any]) -> Iterator[LeftOut]:
    """The keys whose values only running the script would tell, with the key to set in place."""
    for key, value in values.items():
        rule = table.rule_of(key)
        if not _is_computed(value) or (rule is not None and rule.why is not None):
            continue
        ours = f"set {' and '.join(rule.ours)}" if rule and rule.ours else "libra has no such key"
        yield LeftOut(key, Why.COMPUTED, ours)


def _unread(sources: Sequence[Source]) -> Iterator[LeftOut]:
    """The variables whose values an ``if`` or a loop of a script may change."""
    reason = "may be another: branches of if, loops and functions are not read"
    for source in sources:
        yield from (LeftOut(f"${name}", Why.COMPUTED, reason) for name in source.unread)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}", hint=f"mkdir -p {path.parent}"
        ) from error


def _problems(text: str, output: Path | None) -> str:
    """What the loader says of a recipe, as if it lay where it is written."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            load_recipe(path)
        except RecipeError as error:
            return str(error).replace(str(path), str(output or "recipe")).replace(f"{place}/", "")
    return ""
