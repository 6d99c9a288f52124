"""Copies a run's database for somebody else to look at: without what trajectories say."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.token_file import OLD_TOKENS

TEXTS = {OLD_TOKENS: "", "branches_json": "[]"}
"""Columns in which an older libra kept what a tokenizer makes prompts and answers of, and what
stands there instead. Today's tokens are in a file of their own, which is not copied."""


def copy_without_texts(reader: Reader, target: Path, mask: Callable[[str], str]) -> int:
    """Write a copy in which token ids are left out and ``mask`` has seen every text.

    Returns how many texts were masked. Nothing of them is left in free pages of the file.
    """
    masked = 0
    with closing(sqlite3.connect(target)) as copy:
        reader.backup(copy)
        copy.create_function("mask", 1, mask, deterministic=True)
        copy.execute("PRAGMA journal_mode = DELETE")
        for table, column in _columns(copy):
            name, value = f'"{column}"', TEXTS.get(column)
            if value is not None:
                copy.execute(f'UPDATE "{table}" SET {name} = ?', (value,))
            else:
                masked += copy.execute(
                    f'UPDATE "{table}" SET {name} = mask({name})'
                    f" WHERE typeof({name}) = 'text' AND mask({name}) <> {name}"
                ).rowcount
        copy.commit()
        copy.execute("VACUUM")
    return masked


def _columns(connection: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    for (table,) in tables:
        for column, kind in connection.execute(
            "SELECT name, type FROM pragma_table_info(?)", (table,)
        ).fetchall():
            if kind == "TEXT":
                yield table, column
