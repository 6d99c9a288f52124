"""The shape of a run's database, and how a file of an older libra comes to it.

The tables follow from the dataclasses of ``core.records``: a table a class, a column a field. Two
tables have no class: ``events`` (everything that happened, in order) and ``meta`` (who writes it).

A file of another libra is read and gone on with by these rules:

    a column the file lacks     has its field's default, or else an empty value of its type
    a column of ``RENAMED``     is read by its old name
    in ``steps``, a column      is a metric of that name: libra 0.1.0 had a column a metric
    that is no field
    any other column or table   is ignored, and stays
    a file of a newer format    is refused

``show`` applies them to a connection that only reads, by temporary views; ``migrate`` to the file.
"""

from __future__ import annotations

import json
import sqlite3
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path

from libra_cli import __version__
from libra_cli.config.errors import WrongRun
from libra_cli.core.records import RENAMED, Record, StepRecord

DATABASE = "libra.db"
FORMAT = 1
"""Kept in the file as ``PRAGMA user_version``; libra 0.1.0 wrote none, which is 0. It rises when an
older libra would misread the file: a column was renamed or means something else. A new table or a
new column needs no rise."""

METRICS = "metrics_json"
"""The column of ``steps`` that takes the columns which are no fields."""

Value: typing.TypeAlias = str | int | float | None
RECORDS: tuple[type[Record], ...] = typing.get_args(Record)

_SQL_TYPES: dict[type, str] = {str: "TEXT", int: "INTEGER", bool: "INTEGER", float: "REAL"}
_NO_RECORDS = (
    """CREATE TABLE IF NOT EXISTS events (
        seq INTEGER PRIMARY KEY, at REAL, kind TEXT NOT NULL, payload_json TEXT NOT NULL)""",
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS sample_times ON samples (at)",
    # `libra status --watch` counts trajectories by state, again and again, beside megabytes of ids.
    "CREATE INDEX IF NOT EXISTS trajectory_states ON trajectories (state, group_id, attempt)",
    """CREATE INDEX IF NOT EXISTS trajectory_ends
        ON trajectories (state, ended_at, group_id, member, attempt)""",
    "CREATE INDEX IF NOT EXISTS turn_ways ON turns (slot, moved_from, turn)",
)


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a record, as SQL sees it. ``default`` is what it has where the file has none."""

    name: str
    kind: type
    optional: bool
    default: Value

    @property
    def ddl(self) -> str:
        """The column in CREATE TABLE. Its default lets a libra write that does not know it."""
        # SQLite stores NaN as NULL, and a loss can be NaN: a float column must take it.
        nullable = self.optional or self.kind is float
        default = "" if self.default is None else f" DEFAULT {_literal(self.default)}"
        return (
            f'"{self.name}" {_SQL_TYPES[self.kind]}' + ("" if nullable else " NOT NULL") + default
        )


def _literal(value: Value) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "NULL" if value is None else str(value)


def _column(field: Field[typing.Any], hint: object) -> Column:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind, *_ = (typing.cast("type", kind) for kind in kinds if kind is not type(None))
    optional = type(None) in kinds
    empty = {str: "[]" if field.name.endswith("_json") else "", int: 0, bool: 0, float: None}
    default = (None if optional else empty[kind]) if field.default is MISSING else field.default
    return Column(field.name, kind, optional, default)


def _columns(kind: type[Record]) -> tuple[Column, ...]:
    hints = typing.get_type_hints(kind)
    kept = [field for field in fields(kind) if field.metadata.get("column", True)]
    return tuple(_column(field, hints[field.name]) for field in kept)


COLUMNS: Mapping[type, tuple[Column, ...]] = {kind: _columns(kind) for kind in RECORDS}


def check_format(connection: sqlite3.Connection, path: Path) -> dict[str, str]:
    """The ``meta`` table.

    Raises:
        WrongRun: the file is not a run of libra, or a newer libra wrote it.
    """
    try:
        meta: dict[str, str] = dict(connection.execute("SELECT key, value FROM meta"))
    except sqlite3.DatabaseError as error:
        raise WrongRun(
            f"{path} is not a run of libra: {error}", hint="name the directory of a run"
        ) from error
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    if number > FORMAT:
        wrote = meta.get("libra", "?")
        raise WrongRun(
            f"{path} was written by libra {wrote}, which is newer (database format {number});"
            f" this is libra {__version__} (format {FORMAT})",
            hint="pip install --upgrade libra-rl",
        )
    return meta


def migrate(connection: sqlite3.Connection) -> None:
    """Give the file every table and column of this libra, in the transaction that is open.

    What an older libra wrote stays. A file that has nothing yet comes out as a new one.
    """
    for kind in RECORDS:
        for statement in _changes(kind, _columns_in(connection, kind.TABLE)):
            connection.execute(statement)
    for statement in _NO_RECORDS:
        connection.execute(statement)
    # By this fingerprint libra 0.1.0 would take the file for its own.
    connection.execute("DELETE FROM meta WHERE key = 'schema'")
    connection.execute(f"PRAGMA user_version = {FORMAT}")


@dataclass(frozen=True, slots=True)
class _ColumnInFile:
    sql_type: str
    demands: bool
    """A row must give it a value: it is NOT NULL and has no default."""


def _columns_in(connection: sqlite3.Connection, table: str) -> dict[str, _ColumnInFile]:
    """The columns of the table by name; none where there is no such table."""
    rows = connection.execute(
        "SELECT name, type, \"notnull\" AND dflt_value IS NULL FROM pragma_table_info(?, 'main')",
        (table,),
    )
    return {name: _ColumnInFile(kind, bool(demands)) for name, kind, demands in rows}


def _changes(kind: type[Record], there: Mapping[str, _ColumnInFile]) -> Iterator[str]:
    """The statements that bring a record's table to its fields."""
    if not there:
        columns = ", ".join(column.ddl for column in COLUMNS[kind])
        yield f"CREATE TABLE {kind.TABLE} ({columns}, PRIMARY KEY ({', '.join(kind.KEY)}))"
        return
    known = set()
    for column in COLUMNS[kind]:
        source = _source(column, there)
        known |= {column.name, source}
        if source is None:
            yield f"ALTER TABLE {kind.TABLE} ADD COLUMN {column.ddl}"
        elif source != column.name:
            yield f'ALTER TABLE {kind.TABLE} RENAME COLUMN "{source}" TO "{column.name}"'
    for name, column_there in there.items():
        if column_there.demands and name not in known:
            yield from _without_demand(kind.TABLE, name, column_there.sql_type)


def _without_demand(table: str, name: str, sql_type: str) -> Iterator[str]:
    """Let rows leave the column out, which no field fills any more; SQLite cannot alter it."""
    yield f'ALTER TABLE {table} RENAME COLUMN "{name}" TO "{name}_demanded"'
    yield f'ALTER TABLE {table} ADD COLUMN "{name}" {sql_type}'
    yield f'UPDATE {table} SET "{name}" = "{name}_demanded"'
    yield f'ALTER TABLE {table} DROP COLUMN "{name}_demanded"'


def _source(column: Column, there: Mapping[str, _ColumnInFile]) -> str | None:
    """The name under which the file has the column, if it has it."""
    names = (column.name, RENAMED.get(column.name))
    return next((name for name in names if name in there), None)


def show(connection: sqlite3.Connection) -> None:
    """Show a file of another libra in the shape of this one, for as long as the connection lasts.

    A temporary view stands before every table that has another shape; the file is left alone.
    """
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.create_function("with_metrics", -1, _with_metrics, deterministic=True)
    for kind in RECORDS:
        there = _columns_in(connection, kind.TABLE)
        shown = [f'{_shown(kind, column, there)} AS "{column.name}"' for column in COLUMNS[kind]]
        if shown != [f'"{column.name}" AS "{column.name}"' for column in COLUMNS[kind]]:
            rows = f"FROM main.{kind.TABLE}" if there else "WHERE 0"
            connection.execute(f"CREATE TEMP VIEW {kind.TABLE} AS SELECT {', '.join(shown)} {rows}")


def _shown(kind: type[Record], column: Column, there: Mapping[str, _ColumnInFile]) -> str:
    source = _source(column, there)
    shown = _literal(column.default) if source is None else f'"{source}"'
    if kind is StepRecord and column.name == METRICS:
        known = {_source(other, there) for other in COLUMNS[kind]}
        others = [f"'{name}', \"{name}\"" for name in there if name not in known]
        return f"with_metrics({', '.join([shown, *others])})" if others else shown
    return shown


def _with_metrics(metrics_json: str, *columns: str | float | None) -> str:
    """The metrics with those of an older libra's columns, given as name, value, name, value..."""
    pairs = zip(columns[::2], columns[1::2], strict=True)
    older = {name: value for name, value in pairs if value is not None}
    return json.dumps(older | json.loads(metrics_json))
