"""The run's memory: one SQLite file, written by one thread of one controller.

``Journal.save`` never waits for the disk. It keeps the newest row of every key in memory, and a
thread writes what has gathered every ``flush_s`` seconds in one transaction.

    guarantee  a row that was saved ``flush_s`` ago is in the file, and a reader sees whole
               transactions only. A full disk loses nothing: rows wait in memory and are tried
               again, ``on_error`` is told once each time it starts failing.
    limit      a controller killed outright loses at most the last ``flush_s`` seconds; a machine
               that loses power may lose a little more (WAL with ``synchronous=NORMAL``).

A file of an older libra is migrated when it is opened (``runtime.store.schema``), so that a run
that is resumed goes on in one file.

``close`` folds the write-ahead log back, so that a finished run is one plain file that can be
copied and read from read-only storage.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import time
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from libra_cli import __version__
from libra_cli.config.errors import StateError
from libra_cli.core.records import Record, SlotRecord, SlotStateRecord
from libra_cli.runtime.store.controller_process import boot_id
from libra_cli.runtime.store.schema import COLUMNS, DATABASE, RECORDS, Value, check_format, migrate

LOCK = "libra.lock"

_ACCEPTED: dict[type, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    bool: (bool,),
    float: (float, int),
}
_CLOSE_DEADLINE_S = 2.0
_RETRY_S = 1.0

_Row: typing.TypeAlias = tuple[Value, ...]
_Key: typing.TypeAlias = tuple[str, _Row]


def _upsert(kind: type[Record]) -> str:
    names = ", ".join(f'"{column.name}"' for column in COLUMNS[kind])
    marks = ", ".join("?" * len(COLUMNS[kind]))
    return f"INSERT OR REPLACE INTO {kind.TABLE} ({names}) VALUES ({marks})"


_UPSERTS: dict[str, str] = {
    **{kind.TABLE: _upsert(kind) for kind in RECORDS},
    "events": "INSERT INTO events (at, kind, payload_json) VALUES (?, ?, ?)",
}


def _row(record: Record) -> _Row:
    """The record as SQL values. A wrong type is the caller's bug and is told where it is made."""
    row: list[Value] = []
    for column in COLUMNS[type(record)]:
        value: Value = getattr(record, column.name)
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
        self._slots: dict[str, SlotStateRecord] = {}
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
        with self._mutex:
            self._keep(record, row)
            if isinstance(record, SlotRecord):
                self._save_slot_state(record)

    def _keep(self, record: Record, row: _Row) -> None:
        key = tuple(getattr(record, name) for name in record.KEY)
        self._rows[record.TABLE, key] = row

    def _save_slot_state(self, slot: SlotRecord) -> None:
        last = self._slots.get(slot.slot)
        # An unreachable slot keeps the `since` of the state it will come back to.
        since = slot.since if slot.since > (last.since if last else -1.0) else time.time()
        state = SlotStateRecord(slot.slot, since, slot.role, slot.state, slot.incarnation)
        if last is None or replace(last, since=since) != state:
            self._slots[slot.slot] = state
            self._keep(state, _row(state))

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
        check_format(connection, path)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        _make_ours(connection)
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
    with contextlib.closing(_connected(new)) as connection:
        _make_ours(connection)
    new.rename(path)


def _make_ours(connection: sqlite3.Connection) -> None:
    """Bring the file to this libra's schema, and say who writes it from now on."""
    writer = {"libra": __version__, "host": os.uname().nodename, "boot": boot_id()}
    connection.execute("BEGIN IMMEDIATE")
    migrate(connection)
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", writer.items())
    connection.execute("COMMIT")


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, timeout=1.0, check_same_thread=False)


def _present(connection: sqlite3.Connection) -> dict[str, SlotStateRecord]:
    """The newest state of every slot, for a controller that comes back to its run."""
    names = ", ".join(column.name for column in COLUMNS[SlotStateRecord])
    rows = connection.execute(f"SELECT {names} FROM slot_states ORDER BY since")
    states = (SlotStateRecord(*row) for row in rows)
    return {state.slot: state for state in states}


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
