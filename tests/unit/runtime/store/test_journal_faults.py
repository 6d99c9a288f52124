"""A journal that cannot write says so at once, keeps what it was given, and never dies silently."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import shutil
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from libra_cli.config.errors import StateError
from libra_cli.config.secrets import masker
from libra_cli.runtime.store import database
from libra_cli.runtime.store import journal as journal_module
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.schema import DATABASE
from tests import sample_run

DEADLINE_S = 5.0


def events(run_dir: Path) -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(run_dir / DATABASE)) as connection:
        return connection.execute("SELECT kind, payload_json FROM events ORDER BY seq").fetchall()


class Told:
    """What the journal tells of its errors."""

    def __init__(self) -> None:
        self.errors: list[StateError] = []
        self.heard = threading.Event()

    def __call__(self, error: StateError) -> None:
        self.errors.append(error)
        self.heard.set()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception | None], None]:
    """Let every write of a journal raise this, or none."""
    whole = journal_module._write
    monkeypatch.setattr(journal_module, "RETRY_S", 0.005)

    def fail(error: Exception | None) -> None:
        def write(*arguments: object) -> int:
            if error is not None:
                raise error
            return whole(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(journal_module, "_write", write)

    return fail


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (sqlite3.OperationalError("database or disk is full"), "df -h"),
        (sqlite3.OperationalError("disk I/O error"), "dmesg"),
        (sqlite3.OperationalError("database is locked"), "fuser"),
        (sqlite3.OperationalError("locking protocol"), "fuser"),
        (sqlite3.OperationalError("attempt to write a readonly database"), "ls -ld"),
        (sqlite3.DatabaseError("database disk image is malformed"), "df -h"),
        (sqlite3.ProgrammingError("Cannot operate on a closed database."), "df -h"),
        (OSError(errno.ENOLCK, "No locks available"), "df -h"),
        (MemoryError(), "df -h"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), "df -h"),
    ],
    ids=repr,
)
def test_whatever_writing_raises_is_told_once_and_nothing_is_lost(tmp_path, failing, error, hint):
    told = Told()
    journal = Journal(tmp_path, flush_s=0.005, on_error=told)
    failing(error)
    for number in range(10):
        journal.event(float(number), "kept", {})
    assert told.heard.wait(DEADLINE_S)
    assert journal._thread.is_alive()
    assert hint in told.errors[0].hint
    failing(None)
    journal.close()
    assert len(events(tmp_path)) == 10
    assert len(told.errors) == 1


def test_what_waits_is_bounded_and_what_was_lost_is_told(tmp_path, failing, monkeypatch):
    monkeypatch.setattr(journal_module, "MOST_WAITING", 50)
    told = Told()
    journal = Journal(tmp_path, flush_s=60.0, on_error=told)
    failing(sqlite3.OperationalError("database or disk is full"))
    journal.save(sample_run.run_record(step=7))
    for number in range(200):
        journal.event(float(number), "event", {"number": number})
    with pytest.raises(StateError):
        journal.flush()
    assert len(journal._events) + len(journal._rows) == 50
    failing(None)
    journal.flush()
    journal._report_lost()
    assert "151 of its rows are lost" in str(told.errors[0])
    journal.close()
    assert json.loads(events(tmp_path)[0][1])["number"] == 151
    with Reader(tmp_path) as reader:
        assert reader.run().step == 7


def test_a_row_that_is_saved_while_an_older_one_cannot_be_written_stays_the_newer(
    tmp_path, monkeypatch
):
    journal = Journal(tmp_path, flush_s=60.0)

    def write(*_: object) -> int:
        monkeypatch.undo()
        journal.save(sample_run.run_record(step=8))
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(journal_module, "_write", write)
    journal.save(sample_run.run_record(step=7))
    with pytest.raises(StateError):
        journal.flush()
    journal.close()
    with Reader(tmp_path) as reader:
        assert reader.run().step == 8


def test_pauses_between_tries_grow(tmp_path, failing, monkeypatch):
    pauses: list[float] = []
    journal = Journal(tmp_path, flush_s=0.001)
    failing(OSError(errno.EIO, "Input/output error"))
    wait = journal._stop.wait

    def waited(pause_s: float) -> bool:
        if pause_s > 0.002:
            pauses.append(pause_s)
        return len(pauses) > 3 or wait(0)

    monkeypatch.setattr(journal._stop, "wait", waited)
    journal.event(0.0, "kept", {})
    journal._thread.join(DEADLINE_S)
    assert pauses == [0.005, 0.01, 0.02, 0.04]
    failing(None)
    journal.close()


def test_whoever_is_told_cannot_end_the_writing_thread(tmp_path, failing):
    def tell(_: StateError) -> None:
        raise OSError(errno.ENOSPC, "the terminal is on a full disk")

    journal = Journal(tmp_path, flush_s=0.001, on_error=tell)
    failing(sqlite3.OperationalError("disk I/O error"))
    journal.event(0.0, "kept", {})
    for _ in range(100):
        if journal.failure is not None:
            break
        journal._thread.join(0.01)
    assert journal._thread.is_alive()
    failing(None)
    journal.close()
    assert len(events(tmp_path)) == 1


SAID = "broken \udcff text \ud83d"


def test_lone_surrogates_are_replaced_in_rows_and_events(tmp_path):
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record(error=SAID))
        journal.event(0.0, "EpisodeFailed", {"reason": SAID, SAID: [SAID]})
    with Reader(tmp_path) as reader:
        assert reader.run().error == "broken \ufffd text \ufffd"
    assert "\\ud" not in events(tmp_path)[0][1]


def test_a_row_that_no_database_takes_is_dropped_alone(tmp_path, caplog):
    told = Told()
    journal = Journal(tmp_path, flush_s=60.0, on_error=told)
    journal.event(2**70, "too late", {})
    journal.event(1.0, "kept", {})
    journal.flush()
    journal.close()
    assert [kind for kind, _ in events(tmp_path)] == ["kept"]
    assert "cannot be stored" in caplog.text


def test_a_number_that_is_out_of_range_is_told_where_it_is_made(tmp_path):
    record = replace(sample_run.run_record(), step=2**64)
    with Journal(tmp_path) as journal, pytest.raises(TypeError, match=r"RunRecord\.step"):
        journal.save(record)


def test_secrets_are_masked_in_sentences_and_events(tmp_path):
    with Journal(tmp_path, mask=masker(["s3cret-value"])) as journal:
        journal.save(sample_run.run_record(error="login s3cret-value failed"))
        journal.event(0.0, "EpisodeFailed", {"reason": ["a", {"b": "s3cret-value"}]})
    with Reader(tmp_path) as reader:
        assert reader.run().error == "login [masked] failed"
    assert "s3cret" not in events(tmp_path)[0][1]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.EIO])
def test_a_directory_without_locks_is_a_named_stop(tmp_path, monkeypatch, code):
    def flock(*_: object) -> None:
        raise OSError(code, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StateError, match="cannot be locked") as caught:
        Journal(tmp_path)
    assert "run.directory" in caught.value.hint


def mode_of(run_dir: Path) -> str:
    journal = Journal(run_dir)
    (mode,) = journal._connection.execute("PRAGMA journal_mode").fetchone()
    journal.save(sample_run.run_record(step=3))
    journal.flush()
    with Reader(run_dir) as reader:
        assert reader.run().step == 3
    journal.close()
    return str(mode)


@pytest.mark.parametrize(
    ("mounts", "mode"),
    [
        ("server:/x {} nfs4 rw 0 0", "delete"),
        ("user@h: {} fuse.sshfs rw 0 0", "delete"),
        ("/dev/sda1 {} ext4 rw 0 0", "wal"),
        ("", "wal"),
        ("nonsense", "wal"),
    ],
)
def test_on_a_file_system_of_a_network_there_is_no_shared_memory(
    tmp_path, monkeypatch, mounts, mode
):
    listed = tmp_path / "mounts"
    listed.write_text(f"proc /proc proc rw 0 0\n{mounts.format(tmp_path)}\n")
    monkeypatch.setattr(database, "_MOUNTS", listed)
    assert mode_of(tmp_path / "run") == mode


def test_where_memory_cannot_be_shared_the_database_is_opened_without(tmp_path, monkeypatch):
    opened = database._opened

    def refused(path: Path, mode: str) -> sqlite3.Connection:
        if mode == "WAL":
            raise sqlite3.OperationalError("locking protocol")
        return opened(path, mode)

    monkeypatch.setattr(database, "_opened", refused)
    assert mode_of(tmp_path) == "delete"


def test_without_shared_memory_nobody_reads_half_a_transaction(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "_is_shared", lambda path: True)
    run_dir, killed = tmp_path / "run", tmp_path / "killed"
    with Journal(run_dir) as journal:
        journal.save(sample_run.run_record())
        journal.event(1.0, "before", {"text": "x" * 100_000})
    with contextlib.closing(sqlite3.connect(run_dir / DATABASE, isolation_level=None)) as writer:
        writer.execute("PRAGMA cache_size=1")  # so that pages are written before the commit
        writer.execute("BEGIN")
        writer.execute("DELETE FROM events")
        row = "INSERT INTO events (at, kind, payload_json) VALUES (2, 'after', hex(randomblob(?)))"
        for _ in range(50):
            writer.execute(row, (10_000,))
        shutil.copytree(run_dir, killed)
    with Reader(killed) as reader:
        assert [number for number, _ in reader.events("before")] == [1]


@pytest.mark.parametrize("content", [b"SQLite format 3\x00" + b"\xff" * 200, b"no database" * 99])
def test_a_damaged_database_is_a_named_stop(tmp_path, content):
    (tmp_path / DATABASE).write_bytes(content)
    with pytest.raises(StateError, match=DATABASE):
        Journal(tmp_path)


def test_the_last_rows_wait_for_what_passes_by_itself(tmp_path, failing):
    journal = Journal(tmp_path, flush_s=60.0)
    journal.save(sample_run.run_record())
    failing(sqlite3.OperationalError("unable to open database file"))
    threading.Timer(0.05, failing, [None]).start()
    journal.close()
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (1,)


def test_a_journal_that_cannot_be_written_at_the_end_says_so(tmp_path, failing, monkeypatch):
    monkeypatch.setattr(journal_module, "CLOSING_S", 0.05)
    journal = Journal(tmp_path, flush_s=60.0)
    journal.save(sample_run.run_record())
    failing(sqlite3.OperationalError("disk I/O error"))
    with pytest.raises(StateError, match="disk I/O error"):
        journal.close()
