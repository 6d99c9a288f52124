"""Reads the rows of one source of tasks, in the formats that people have them in.

    .jsonl, .jsonl.gz   a JSON object a line; empty lines are skipped
    .json               a list of objects, or of each split one: {"train": [...], "test": [...]};
                        or what a .jsonl file holds
    .parquet            a row a task (see ``runtime.tasks.parquet``)
    a directory         the files of one split: train.jsonl, train-00000-of-00002.parquet, also
                        where they lie in data/ or in a folder of the split's name

**Rows are kept as JSON.** Text takes a fraction of the memory of the objects it stands for, and
whoever is given a row gets one of its own, which no other episode can change. A file is read a row
at a time, except for .json, which JSON's grammar forbids.
"""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import re
import uuid
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from libra_cli.config.environment import TaskSourceSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.config.text import encodable
from libra_cli.runtime.tasks.parquet import read_parquet

Row: TypeAlias = bytes
"""A row of a file of tasks, as the text of a JSON object."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_Splits: TypeAlias = set[str]


def read_rows(source: TaskSourceSpec) -> list[Row]:
    """Read the rows of a source in the order of its files; all, unless it takes the first ones.

    Raises:
        EnvironmentBroken: a file cannot be read, is malformed, or there is no row. The message has
            the file, and the line or row.
    """
    path = Path(source.path)
    seen: _Splits = set()
    first = None if source.shuffle else source.limit
    kept = list(islice(_rows_in(path, source.split, seen), first))
    if not kept and seen:
        raise EnvironmentBroken(
            f"{path}: there is no row of split {source.split!r}, only of {_listed(seen)}"
        )
    if not kept and source.split is not None and path.is_file():
        raise EnvironmentBroken(
            f"{path}: there is no row of split {source.split!r}",
            hint="a row says it as split or extra_info.split; without tasks.split all are taken",
        )
    if not kept:
        raise EnvironmentBroken(f"{path}: the tasks file holds no task")
    return kept


def files_of(source: TaskSourceSpec) -> list[Path]:
    """Find the files that a source is read from, in order.

    Raises:
        EnvironmentBroken: there are none.
    """
    path = Path(source.path)
    if path.is_dir():
        return _files_of(path, source.split or "train")
    if not path.is_file():
        raise EnvironmentBroken(f"{path}: there is no such file")
    return [path]


def _rows_in(path: Path, split: str | None, seen: _Splits) -> Iterator[Row]:
    if path.is_dir():
        for file in _files_of(path, split or "train"):
            yield from _rows(file)
    elif split is None:
        yield from _rows(path)
    else:
        yield from _rows_of(path, split, seen)


def _files_of(directory: Path, split: str) -> list[Path]:
    """Find the files of a split.

    Raises:
        EnvironmentBroken: there are none, or it is there in two formats.
    """
    named = re.compile(rf"{re.escape(split)}([-_]\d[\w-]*)?")
    there = _readable(directory) + _readable(directory / "data")
    files = [file for file in there if named.fullmatch(_stem(file))] or _readable(directory / split)
    formats = {_suffix(file) for file in files}
    if len(formats) > 1:
        raise EnvironmentBroken(
            f"{directory}: split {split!r} is there as {' and as '.join(sorted(formats))}",
            hint=f"name one as environment.tasks, for example {files[0]}",
        )
    if not files:
        raise EnvironmentBroken(
            f"{directory}: there is no file of split {split!r}, only {_listed(_stems(there))}",
            hint=f"a file is called {split}.jsonl, .jsonl.gz, .json or .parquet",
        )
    return files


def _readable(directory: Path) -> list[Path]:
    return sorted(file for file in directory.glob("*") if _suffix(file) and file.is_file())


def _suffix(path: Path) -> str:
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), "")


def _stem(path: Path) -> str:
    return path.name.removesuffix(_suffix(path))


def _stems(files: list[Path]) -> set[str]:
    return {_stem(file) for file in files}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing that holds tasks"


def _rows(path: Path) -> Iterator[Row]:
    match _suffix(path):
        case ".parquet":
            yield from _parquet(path)
        case ".json":
            yield from _json(path, None)
        case ".jsonl" | ".jsonl.gz":
            yield from (line for line, _ in _lines(path))
        case _:
            raise EnvironmentBroken(
                f"{path}: tasks are read from {', '.join(SUFFIXES)} or a directory of such"
            )


def _rows_of(path: Path, split: str, seen: _Splits) -> Iterator[Row]:
    """The rows that say that they are of this split; what others say goes to ``seen``."""
    if _suffix(path) == ".json":
        yield from _json(path, split)
        return
    for row in _rows(path):
        task = json.loads(row)
        extra = task.get("extra_info")
        said = task.get("split", extra.get("split") if isinstance(extra, dict) else None)
        if said == split:
            yield row
        elif isinstance(said, str):
            seen.add(said)


def _lines(path: Path) -> Iterator[tuple[Row, dict[str, Any]]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if text := line.strip():
                    yield text, _object(text, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        where = f"{path}: after line {number}" if number else f"{path}"
        raise EnvironmentBroken(f"{where}: the tasks file cannot be read: {error}") from error


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        task = json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} (column {error.colno})"
        raise EnvironmentBroken(f"{where}: not JSON: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise EnvironmentBroken(f"{where}: {_unread(error)}") from error
    if not isinstance(task, dict):
        raise EnvironmentBroken(f"{where}: a task is a JSON object")
    return task


def _unread(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"not UTF-8 text, or a number of too many digits: {error}"


def _json(path: Path, split: str | None) -> Iterator[Row]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise EnvironmentBroken(f"{path}: the tasks file cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            reason = f"{error.msg} (column {error.colno})"
            raise EnvironmentBroken(f"{path}:{error.lineno}: not JSON: {reason}") from error
        yield from (line for line, task in _lines(path) if split in (None, task.get("split")))
        return
    except (ValueError, RecursionError) as error:
        raise EnvironmentBroken(f"{path}: {_unread(error)}") from error
    for number, task in enumerate(_listed_in(value, path, split), 1):
        if not isinstance(task, dict):
            raise EnvironmentBroken(f"{path}: row {number}: a task is a JSON object")
        if split is None or isinstance(value, dict) or task.get("split") == split:
            yield _dumped(task, f"{path}: row {number}")


def _listed_in(value: Any, path: Path, split: str | None) -> list[Any]:
    if isinstance(value, list):
        return value
    named = value if isinstance(value, dict) else {}
    splits = sorted(key for key, rows in named.items() if isinstance(rows, list))
    if split is None and len(splits) == 1:
        split = splits[0]
    if split in splits:
        rows: list[Any] = value[split]
        return rows
    if splits:
        raise EnvironmentBroken(
            f"{path}: holds the splits {', '.join(splits)}, and split is {split!r}",
            hint=f"environment: {{tasks: {{path: {path.name}, split: {splits[-1]}}}}}",
        )
    raise EnvironmentBroken(f"{path}: is not a list of tasks, nor has it lists by split")


def _parquet(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise EnvironmentBroken(f"{path}: the tasks file cannot be read: there is none")
    for number, row in enumerate(read_parquet(path), 1):
        yield _dumped(row, f"{path}: row {number}")


def _dumped(row: dict[str, Any], where: str) -> Row:
    try:
        return encodable(json.dumps(row, ensure_ascii=False, default=_plain)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentBroken(
            f"{where}: {error}", hint="leave that column out of the file"
        ) from error


def _plain(value: object) -> object:
    """What parquet has and JSON has not; an image or another blob cannot be shown to the model."""
    if isinstance(value, datetime.date | datetime.time | uuid.UUID):
        return str(value)
    if isinstance(value, decimal.Decimal):
        return int(value) if value == int(value) else float(value)
    raise TypeError(f"it holds {type(value).__name__}, which is not text, a number or a list")
