"""The run's memory: one SQLite file, written by one thread of one controller.

``Journal.save`` never waits for the disk. It keeps the newest row of every key in memory, and a
thread writes what has gathered every ``flush_s`` seconds in one transaction.

    guarantee  a row that was saved ``flush_s`` ago is in the file, and a reader sees whole
               transactions only. A full disk, or a database that is locked or broken, loses
               nothing up to ``MOST_WAITING`` rows: they wait in memory and are tried again, with
               pauses up to ``LONGEST_PAUSE_S``. ``on_error`` is told once each time it starts
               failing, and of rows that were lost. A row that no database takes is dropped alone.
    limit      a controller killed outright loses at most the last ``flush_s`` seconds; a machine
               that loses power may lose a little more (WAL with ``synchronous=NORMAL``).

The tokens of trajectories and their log-ratios go to a file of their own first
(``runtime.store.token_file``), and the row says where they lie.

A file of an older libra is migrated when it is opened (``runtime.store.schema``), so that a run
that is resumed goes on in one file.

``close`` folds the write-ahead log back, so that a finished run is one plain file that can be
copied and read from read-only storage.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from libra_cli.config.errors import StateError
from libra_cli.config.text import encodable
from libra_cli.core.records import (
    CreditRecord,
    Record,
    SlotRecord,
    SlotStateRecord,
    TrajectoryRecord,
)
from libra_cli.runtime.store.database import fold, hint_of, only_writer, open_database
from libra_cli.runtime.store.run_directory import make_run_dir
from libra_cli.runtime.store.schema import COLUMNS, DATABASE, RECORDS, Value
from libra_cli.runtime.store.token_file import TokenFile, packed, packed_log_ratios
from libra_cli.runtime.supervision.failures import words_of

_ACCEPTED: dict[type, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    bool: (bool,),
    float: (float, int),
}
_INT64 = range(-(2**63), 2**63)
_PROSE = frozenset({"waiting", "error", "detail", "why", "why_not", "text", "reason"})
"""Columns with sentences, which may quote what a host, a model or an environment said."""
RETRY_S = 1.0
CLOSING_S = 15.0
"""How long ``close`` tries to write the rest, in seconds: it waits for what passes by itself (a
process without descriptors), not for somebody to make room on a disk."""
LONGEST_PAUSE_S = 30.0
"""Between two tries to write; the pause doubles from ``RETRY_S`` while they fail."""
MOST_WAITING = 200_000
"""Rows that wait in memory while nothing can be written (about 100 MB); the oldest of more are
lost, events first."""

_PLACES = {
    kind.TABLE: [column.name for column in COLUMNS[kind]].index(name)
    for kind, name in ((TrajectoryRecord, "tokens_at"), (CreditRecord, "log_ratios_at"))
}
"""The column of each table that says where in the other file something of the row lies."""

_log = logging.getLogger(__name__)

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


def _row(record: Record, mask: Callable[[str], str]) -> _Row:
    """The record as SQL values. A wrong type is the caller's bug and is told where it is made."""
    row: list[Value] = []
    for column in COLUMNS[type(record)]:
        value: Value = getattr(record, column.name)
        wrong = value is None and not column.optional
        if wrong or (value is not None and not isinstance(value, _ACCEPTED[column.kind])):
            name = f"{type(record).__name__}.{column.name}"
            raise TypeError(f"{name} must be {column.kind.__name__}, not {value!r}")
        if isinstance(value, str):
            value = encodable(mask(value) if column.name in _PROSE else value)
        elif isinstance(value, int) and value not in _INT64:
            raise TypeError(f"{type(record).__name__}.{column.name} is out of range: {value:#x}")
        row.append(value)
    return tuple(row)


def _at(key: _Key, row: _Row, place: int) -> _Row:
    """Return the row with ``place``, at which the rest of it lies in the other file."""
    column = _PLACES[key[0]]
    return (*row[:column], place, *row[column + 1 :])


def _beside(record: Record) -> Callable[[], bytes] | None:
    """What makes the part of a record that is kept beside the database, if it has one."""
    if isinstance(record, TrajectoryRecord) and record.tokens:
        return partial(packed, record.tokens)
    if isinstance(record, CreditRecord) and record.log_ratios:
        return partial(packed_log_ratios, record.log_ratios)
    return None


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
        mask: Callable[[str], str] = str,
    ) -> None:
        """``mask`` takes secrets out of sentences and of events.

        Raises:
            StateError: the directory or the database cannot be written, or another writes it.
        """
        self.path = run_dir / DATABASE
        self._flush_s = flush_s
        self._on_error = on_error
        self._rows: dict[_Key, _Row] = {}
        #: Of rows that wait, what is kept beside the database.
        self._besides: dict[_Key, Callable[[], bytes]] = {}
        self._token_file = TokenFile(run_dir)
        self._events: list[_Row] = []
        self._slots: dict[str, SlotStateRecord] = {}
        self._mutex = threading.Lock()
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._failure: StateError | None = None
        self._lost = 0
        self._mask = mask
        make_run_dir(run_dir)
        self._lock = only_writer(run_dir)
        try:
            self._connection = open_database(self.path)
            self._slots.update(_present(self._connection))
            #: When the newest event happened that was there when the file was opened; 0: none.
            self.last_event = _last_event(self._connection)
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
        row = _row(record, self._mask)
        with self._mutex:
            self._keep(record, row)
            if isinstance(record, SlotRecord):
                self._save_slot_state(record)

    def _keep(self, record: Record, row: _Row) -> None:
        key = record.TABLE, tuple(getattr(record, name) for name in record.KEY)
        self._rows[key] = row
        if beside := _beside(record):
            self._besides[key] = beside

    def _save_slot_state(self, slot: SlotRecord) -> None:
        last = self._slots.get(slot.slot)
        # An unreachable slot keeps the `since` of the state it will come back to.
        since = slot.since if slot.since > (last.since if last else -1.0) else time.time()
        state = SlotStateRecord(slot.slot, since, slot.role, slot.state, slot.incarnation)
        if last is None or replace(last, since=since) != state:
            self._slots[slot.slot] = state
            self._keep(state, _row(state, self._mask))

    def event(self, at: float, kind: str, payload: Mapping[str, object]) -> None:
        """Append one event; strings in its payload are masked."""
        safe = _safe(payload, self._mask)
        row = (at, kind, json.dumps(safe, ensure_ascii=False, separators=(",", ":"), default=str))
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
            self._flush_last()
            fold(self._connection)
        finally:
            self._connection.close()
            self._token_file.close()
            os.close(self._lock)

    def _flush_last(self) -> None:
        give_up = time.monotonic() + CLOSING_S
        while True:
            try:
                self.flush()
                return
            except StateError:
                if time.monotonic() + RETRY_S > give_up:
                    raise
            time.sleep(RETRY_S)

    def _work(self) -> None:
        pause_s = self._flush_s
        while not self._stop.wait(pause_s):
            try:
                self.flush()
            except StateError as error:
                retry_s = max(RETRY_S, self._flush_s)
                pause_s = retry_s if self._failure is None else min(2 * pause_s, LONGEST_PAUSE_S)
                self._report(error)
            else:
                pause_s, self._failure = self._flush_s, None
                self._report_lost()

    def _report(self, error: StateError) -> None:
        first, self._failure = self._failure is None, error
        if first:
            self._tell(error)

    def _report_lost(self) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            self._tell(StateError(f"{self.path} is written again; {lost} of its rows are lost"))

    def _tell(self, error: StateError) -> None:
        if self._on_error is not None:
            with contextlib.suppress(Exception):  # whoever is told must not end this thread
                self._on_error(error)

    def _write(self) -> None:
        with self._mutex:
            rows, self._rows = self._rows, {}
            events, self._events = self._events, []
            besides, self._besides = self._besides, {}
        if not rows and not events:
            return
        try:
            if besides:
                places = self._token_file.append(pack() for pack in besides.values())
                rows |= {
                    key: _at(key, rows[key], place)
                    for key, place in zip(besides, places, strict=True)
                }
                besides = {}
            self._lost += _write(self._connection, rows, events)
        except Exception as error:
            with self._mutex:
                self._rows = rows | self._rows  # what was saved meanwhile is newer
                self._events = events + self._events
                self._besides = besides | self._besides
                self._forget_oldest()
            raise StateError(
                f"cannot write {self.path}: {error}", hint=hint_of(error, self.path.parent)
            ) from error

    def _forget_oldest(self) -> None:
        """Drop the oldest events, then the oldest rows, until ``MOST_WAITING`` wait."""
        excess = len(self._rows) + len(self._events) - MOST_WAITING
        if excess <= 0:
            return
        self._lost += excess
        from_rows = max(excess - len(self._events), 0)
        del self._events[:excess]
        for key in list(self._rows)[:from_rows]:
            del self._rows[key]
            self._besides.pop(key, None)


def _safe(value: object, mask: Callable[[str], str]) -> object:
    """A payload whose every string can be stored and has no secret."""
    if isinstance(value, str):
        return encodable(mask(value))
    if isinstance(value, Mapping):
        return {encodable(str(key)): _safe(item, mask) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(item, mask) for item in value]
    return value


def _write(connection: sqlite3.Connection, rows: Mapping[_Key, _Row], events: list[_Row]) -> int:
    """Write all in one transaction, or all but those rows that no database takes: their number."""
    tables: dict[str, list[_Row]] = {}
    for (table, _), row in rows.items():
        tables.setdefault(table, []).append(row)
    if events:
        tables["events"] = events
    dropped = 0
    connection.execute("BEGIN IMMEDIATE")
    try:
        for table, batch in tables.items():
            dropped += _insert(connection, table, batch)
        connection.execute("COMMIT")
    except BaseException:
        # SQLite may have rolled back by itself already (it does when the disk is full).
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return dropped


def _insert(connection: sqlite3.Connection, table: str, batch: list[_Row]) -> int:
    """Insert rows; returns how many of them cannot be stored, whatever is tried."""
    connection.execute("SAVEPOINT batch")
    try:
        connection.executemany(_UPSERTS[table], batch)
    except sqlite3.OperationalError:  # the file is at fault
        raise
    except (sqlite3.Error, ArithmeticError, ValueError):  # a row is
        connection.execute("ROLLBACK TO batch")
        return sum(not _inserted(connection, table, row) for row in batch)
    return 0


def _inserted(connection: sqlite3.Connection, table: str, row: _Row) -> bool:
    try:
        connection.execute(_UPSERTS[table], row)
    except sqlite3.OperationalError:
        raise
    except (sqlite3.Error, ArithmeticError, ValueError) as error:
        _log.error("a row of %s cannot be stored: %s", table, words_of(error))
        return False
    return True


def _present(connection: sqlite3.Connection) -> dict[str, SlotStateRecord]:
    """The newest state of every slot, for a controller that comes back to its run."""
    names = ", ".join(column.name for column in COLUMNS[SlotStateRecord])
    rows = connection.execute(f"SELECT {names} FROM slot_states ORDER BY since")
    states = (SlotStateRecord(*row) for row in rows)
    return {state.slot: state for state in states}


def _last_event(connection: sqlite3.Connection) -> float:
    # Notes are not of the machine's clock.
    ((at,),) = connection.execute("SELECT max(at) FROM events WHERE kind != 'Note'").fetchall()
    return float(at or 0.0)
