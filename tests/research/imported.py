"""What libra import makes of configurations of TRL, verl and prime-rl that others wrote.

    python -m tests.research.imported FOLDER...

reads every .yaml, .yml, .json, .toml, .sh and .py in the folders, and prints a row for each that
gives settings to a trainer: whether it was accepted, how many of its keys were translated and left
out, and whether the recipe loads; and the reason of each that was refused. The folders are clones
of their repositories, which are not part of this one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_cli.app.importing.command import ImportOrder, import_recipe
from libra_cli.config.errors import LibraError
from libra_cli.config.other_names.rule import Why

SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".sh", ".py")


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one file."""

    path: Path
    trainer: str = ""
    translated: int = 0
    left_out: int = 0
    unknown: tuple[str, ...] = ()
    """Keys that no table has."""
    problems: str = ""
    """What the recipe lacks to load."""
    refused: str = ""


def row_of(path: Path, root: Path) -> Row:
    """Import one file."""
    place = path.relative_to(root)
    try:
        made = import_recipe(ImportOrder((path,)))
    except LibraError as error:
        return Row(place, refused=str(error).replace(str(path), path.name))
    unknown = [one.key for one in made.left_out if one.reason == "libra knows no such key"]
    left = sum(one.why is not Why.NOT_NEEDED for one in made.left_out)
    return Row(place, made.trainer, len(made.translated), left, tuple(unknown), made.problems)


def files(folder: Path) -> Iterator[Path]:
    """The files of a folder that libra import reads, in order."""
    found = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    yield from (path for path in found if path.suffix in SUFFIXES and path.is_file())


def main() -> None:
    """Print the table of some folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--refused", action="store_true", help="also list files without settings")
    arguments = parser.parse_args()
    rows = [row_of(path, folder) for folder in arguments.folders for path in files(folder)]
    sys.stdout.write("\n".join(lines(rows, every=arguments.refused)) + "\n")


def lines(rows: Sequence[Row], *, every: bool) -> Iterator[str]:
    """Yield the table, what it comes to, unknown keys and reasons of refusals."""
    yield "| file | of | translated | left out | loads |"
    yield "| --- | --- | --- | --- | --- |"
    accepted = [row for row in rows if not row.refused]
    for row in accepted:
        loads = row.problems.replace("\n", "; ") or "yes"
        yield f"| {row.path} | {row.trainer} | {row.translated} | {row.left_out} | {loads} |"
    loaded = sum(not row.problems for row in accepted)
    yield f"\n{len(accepted)} of {len(rows)} files accepted, {loaded} recipes load as they are"
    for key, count in Counter(key for row in rows for key in row.unknown).most_common():
        yield f"unknown {count:3} {key}"
    for row in rows:
        if row.refused and (every or "gives no settings" not in row.refused):
            yield f"refused {row.path}: {row.refused}"


if __name__ == "__main__":
    main()
