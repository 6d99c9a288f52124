"""The run's memory: one SQLite file, written by one thread of one controller.

``Journal.save`` never waits for the disk. It keeps the newest row of every key in memory, and a
thread writes what has gathered every ``flush_s`` seconds in one transaction.

    guarantee  a row that was saved ``flush_s`` ago is in the file, and a reader sees whole
               transactions only. A full disk loses nothing: rows wait in memory and are tried
               again, ``on_error`` is told once each time it starts failing.
    limit      a controller killed outright loses at most the last ``flush_s`` seconds; a machine
               that loses power may lose a little more (WAL with ``synchronous=NORMAL``).

The schema is derived from the dataclasses of ``core.records``: a table a class, a column a field.
Its fingerprint is stored, so a file of another shape is refused rather than misread. Three tables
have no class: ``events`` (everything that happened, in order), ``slot_states`` (one row a change
of a slot, because ``slots`` only holds the present) and ``meta``.

``close`` folds the write-ahead log back, so that a finished run is one plain file that can be
copied and read from read-only storage.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import threading
import time
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from libra_cli import __version__
from libra_cli.config.errors import StateError
from libra_cli.core.records import Record, SlotRecord

DATABASE = "libra.db"
LOCK = "libra.lock"
RECORDS: tuple[type[Record], ...] = typing.get_args(Record)

_SQL_TYPES: dict[type, str] = {str: "TEXT", int: "INTEGER", bool: "INTEGER", float: "REAL"}
_ACCEPTED: dict[type, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    bool: (bool,),
    float: (float, int),
}
_CLOSE_DEADLINE_S = 2.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a record, as SQL sees it."""

    name: str
    kind: type
    optional: bool

    @property
    def ddl(self) -> str:
        # SQLite stores NaN as NULL, and a loss can be NaN: a float column must take it.
        nullable = self.optional or self.kind is float
        return f'"{self.name}" {_SQL_TYPES[self.kind]}' + ("" if nullable else " NOT NULL")


def _column(name: str, hint: object) -> Column:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [kind for kind in kinds if kind is not type(None)]
    return Column(name, typing.cast("type", plain[0]), optional=len(plain) < len(kinds))


def _columns(kind: type[Record]) -> tuple[Column, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(_column(field.name, hints[field.name]) for field in fields(kind))


COLUMNS: dict[type, tuple[Column, ...]] = {kind: _columns(kind) for kind in RECORDS}

_EXTRA_DDL = (
    """CREATE TABLE events (
        seq INTEGER PRIMARY KEY, at REAL, kind TEXT NOT NULL, payload_json TEXT NOT NULL)""",
    """CREATE TABLE slot_states (
        slot TEXT NOT NULL, since REAL, role TEXT NOT NULL, state TEXT NOT NULL,
        incarnation INTEGER NOT NULL, PRIMARY KEY (slot, since, role, state, incarnation))""",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE INDEX sample_times ON samples (at)",
    # `libra status --watch` counts trajectories by state, again and again, beside megabytes of ids.
    "CREATE INDEX trajectory_states ON trajectories (state, group_id, attempt)",
    "CREATE INDEX trajectory_ends ON trajectories (state, ended_at, group_id, member, attempt)",
    "CREATE INDEX turn_ways ON turns (slot, moved_from, turn)",
)


def _ddl(kind: type[Record]) -> str:
    columns = ", ".join(column.ddl for column in COLUMNS[kind])
    return f"CREATE TABLE {kind.TABLE} ({columns}, PRIMARY KEY ({', '.join(kind.KEY)}))"


SCHEMA: tuple[str, ...] = (*(_ddl(kind) for kind in RECORDS), *_EXTRA_DDL)
SCHEMA_VERSION = hashlib.sha256(" ".join("\n".join(SCHEMA).split()).encode()).hexdigest()[:8]
"""A fingerprint of the schema: it changes when a record changes, without anybody's help."""

_UPSERTS: dict[str, str] = {
    kind.TABLE: f"INSERT OR REPLACE INTO {kind.TABLE} VALUES"
    f" ({', '.join('?' * len(COLUMNS[kind]))})"
    for kind in RECORDS
} | {
    "slot_states": "INSERT OR REPLACE INTO slot_states VALUES (?, ?, ?, ?, ?)",
    "events": "INSERT INTO events (at, kind, payload_json) VALUES (?, ?, ?)",
}

_Value: typing.TypeAlias = str | int | float | None
_Row: typing.TypeAlias = tuple[_Value, ...]
_Key: typing.TypeAlias = tuple[str, _Row]
_SlotState: typing.TypeAlias = tuple[float, tuple[str, str, int]]


def boot_id() -> str:
    """The kernel's id of this boot, so that a pid of before a reboot is never taken for alive."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _row(record: Record) -> _Row:
    """The record as SQL values. A wrong type is the caller's bug and is told where it is made."""
    row: list[_Value] = []
    for column in COLUMNS[type(record)]:
        value: _Value = getattr(record, column.name)
        wrong = value is None and not column.optional
        if wrong or (value is not None and not isinstance(value, _ACCEPTED[column.kind])):
            name = f"{type(record).__name__}.{column.name}"
            raise TypeError(f"{name} must be {column.kind.__name__}, not {value!r}")
        row.append(value)
    return tuple(row)


class Journal:
    """The one writer of a run directory's database.

    ``save`` and ``event`` may be called from any thread. Use as a context manager, or ``close``.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        flush_s: float = 0.25,
        on_error: Callable[[StateError], None] | None = None,
    ) -> None:
        self.path = run_dir / DATABASE
        self._flush_s = flush_s
        self._on_error = on_error
        self._rows: dict[_Key, _Row] = {}
        self._events: list[_Row] = []
        self._slots: dict[str, _SlotState] = {}
        self._mutex = threading.Lock()
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._failure: StateError | None = None
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = _only_writer(run_dir)
        try:
            self._connection = _open(self.path)
            self._slots.update(_present(self._connection))
        except BaseException:
            os.close(self._lock)
            raise
        self._thread = threading.Thread(target=self._work, name="libra-journal", daemon=True)
        self._thread.start()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def failure(self) -> StateError | None:
        """Why rows are waiting in memory, or None while the file takes them."""
        return self._failure

    def save(self, record: Record) -> None:
        """Remember the newest row of this record's key."""
        row = _row(record)
        key = tuple(getattr(record, name) for name in record.KEY)
        with self._mutex:
            self._rows[record.TABLE, key] = row
            if isinstance(record, SlotRecord):
                self._save_slot_state(record)

    def _save_slot_state(self, record: SlotRecord) -> None:
        state = (record.role, record.state, record.incarnation)
        last_since, last = self._slots.get(record.slot, (-1.0, None))
        if last == state:
            return
        # An unreachable slot keeps the `since` of the state it will come back to.
        since = record.since if record.since > last_since else time.time()
        self._slots[record.slot] = (since, state)
        row = (record.slot, since, *state)
        self._rows["slot_states", row] = row

    def event(self, at: float, kind: str, payload: Mapping[str, object]) -> None:
        """Append one event. ``payload`` must be JSON; secrets have no business in it."""
        row = (at, kind, json.dumps(payload, separators=(",", ":")))
        with self._mutex:
            self._events.append(row)

    def flush(self) -> None:
        """Return when everything saved so far is in the file, or raise StateError."""
        with self._writing:
            self._write()

    def close(self) -> None:
        """Write the rest and leave one plain file. Closing twice is the same as once."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        try:
            self.flush()
            _fold(self._connection)
        finally:
            self._connection.close()
            os.close(self._lock)

    def _work(self) -> None:
        pause_s = self._flush_s
        while not self._stop.wait(pause_s):
            try:
                self.flush()
            except StateError as error:
                pause_s = max(_RETRY_S, self._flush_s)
                self._report(error)
            else:
                pause_s, self._failure = self._flush_s, None

    def _report(self, error: StateError) -> None:
        first, self._failure = self._failure is None, error
        if first and self._on_error is not None:
            self._on_error(error)

    def _write(self) -> None:
        with self._mutex:
            rows, self._rows = self._rows, {}
            events, self._events = self._events, []
        if not rows and not events:
            return
        try:
            _write(self._connection, rows, events)
        except (sqlite3.Error, OverflowError) as error:
            with self._mutex:
                self._rows = rows | self._rows  # what was saved meanwhile is newer
                self._events = events + self._events
            raise StateError(
                f"cannot write {self.path}: {error}",
                hint=f"free some space: df -h {self.path.parent}",
            ) from error


def _write(connection: sqlite3.Connection, rows: Mapping[_Key, _Row], events: list[_Row]) -> None:
    tables: dict[str, list[_Row]] = {}
    for (table, _), row in rows.items():
        tables.setdefault(table, []).append(row)
    if events:
        tables["events"] = events
    connection.execute("BEGIN IMMEDIATE")
    try:
        for table, batch in tables.items():
            connection.executemany(_UPSERTS[table], batch)
        connection.execute("COMMIT")
    except BaseException:
        # SQLite may have rolled back by itself already (it does when the disk is full).
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _only_writer(run_dir: Path) -> int:
    """Hold ``libra.lock``; the kernel lets go of it when the controller dies, however it dies."""
    lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise StateError(
            f"{run_dir}: another libra is writing this run",
            hint=f"libra stop {run_dir}",
        ) from error
    return lock


def _open(path: Path) -> sqlite3.Connection:
    try:
        if not path.exists():
            _create(path)
        connection = _connected(path)
    except sqlite3.Error as error:
        raise StateError(f"cannot open {path}: {error}") from error
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        check_schema(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise StateError(f"cannot open {path}: {error}") from error
    except StateError:
        connection.close()
        raise
    return connection


def _create(path: Path) -> None:
    """Under another name until its tables are in it: who finds the file can read it."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    meta = {
        "schema": SCHEMA_VERSION,
        "libra": __version__,
        "host": os.uname().nodename,
        "boot": boot_id(),
    }
    with contextlib.closing(_connected(new)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute("COMMIT")
    new.rename(path)


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, timeout=1.0, check_same_thread=False)


def check_schema(connection: sqlite3.Connection, path: Path) -> dict[str, str]:
    """The ``meta`` table, or StateError when the file is not a run of this libra's schema."""
    try:
        meta: dict[str, str] = dict(connection.execute("SELECT key, value FROM meta"))
    except sqlite3.DatabaseError as error:
        raise StateError(
            f"{path} is not a run of libra: {error}", hint="name the directory of a run"
        ) from error
    if meta.get("schema") != SCHEMA_VERSION:
        wrote = meta.get("libra", "?")
        raise StateError(
            f"{path} was written by libra {wrote} (schema {meta.get('schema', '?')});"
            f" this is libra {__version__} (schema {SCHEMA_VERSION})",
            hint=f"read it with the libra that wrote it: pip install libra-rl=={wrote}",
        )
    return meta


def _present(connection: sqlite3.Connection) -> dict[str, _SlotState]:
    """The newest state of every slot, for a controller that comes back to its run."""
    rows = connection.execute(
        "SELECT slot, since, role, state, incarnation FROM slot_states ORDER BY 2"
    )
    return {
        slot: (since, (role, state, incarnation)) for slot, since, role, state, incarnation in rows
    }


def _fold(connection: sqlite3.Connection) -> None:
    """Leave WAL mode, which removes -wal and -shm. A reader holds it up for a moment only; if one
    stays, the files stay beside the database and every reader still understands them."""
    deadline = time.monotonic() + _CLOSE_DEADLINE_S
    with contextlib.suppress(sqlite3.Error):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    while time.monotonic() < deadline:
        try:
            if connection.execute("PRAGMA journal_mode=DELETE").fetchone()[0] == "delete":
                return
        except sqlite3.OperationalError:
            time.sleep(0.05)
