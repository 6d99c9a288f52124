"""The journal keeps what it was given, whatever happens around it; reading leaves no trace."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.errors import StateError, WrongRun
from libra_cli.core import records as r
from libra_cli.runtime.store import database as database_module
from libra_cli.runtime.store import journal as journal_module
from libra_cli.runtime.store import schema as schema_module
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.schema import COLUMNS, DATABASE, RECORDS
from tests import sample_run

_DEADLINE_S = 10.0


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and modification time."""
    stats = {path.name: path.stat() for path in directory.iterdir()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def events(run_dir: Path) -> list[tuple[str, str]]:
    """Kind and payload of every event, in order."""
    with contextlib.closing(sqlite3.connect(run_dir / DATABASE)) as connection:
        return connection.execute("SELECT kind, payload_json FROM events ORDER BY seq").fetchall()


def any_record() -> st.SearchStrategy[r.Record]:
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)
    values = {
        str: text,
        int: st.integers(-(2**63), 2**63 - 1),
        bool: st.booleans(),
        float: st.floats(),
    }

    def one(kind: type[r.Record]) -> st.SearchStrategy[r.Record]:
        columns = {
            column.name: st.none() | values[column.kind] if column.optional else values[column.kind]
            for column in COLUMNS[kind]
        }
        return st.builds(kind, **columns)

    return st.one_of([one(kind) for kind in RECORDS])


def same(left: r.Record, right: r.Record) -> bool:
    """Equal, where not-a-number equals itself and, in an optional column, nothing."""
    pairs = [(getattr(left, f.name), getattr(right, f.name)) for f in fields(left)]
    return all(
        a == b or (isinstance(a, float) and math.isnan(a) and (b is None or math.isnan(b)))
        for a, b in pairs
    )


@given(record=any_record())
def test_every_record_comes_back_as_it_was_saved(
    record: r.Record, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    with Journal(run_dir) as journal:
        journal.save(record)
    with Reader(run_dir) as reader:
        (found,) = reader.rows(type(record))
    assert same(record, found)


def test_the_newest_row_of_a_key_wins_across_and_within_flushes(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for step in (1, 2):
            journal.save(sample_run.run_record(step=step))
        journal.flush()
        for step in (3, 4):
            journal.save(sample_run.run_record(step=step))
    with Reader(tmp_path) as reader:
        assert reader.run().step == 4


def test_a_wrong_type_is_told_where_it_is_made(tmp_path: Path) -> None:
    record = replace(sample_run.run_record(), step="three")  # type: ignore[arg-type]
    with Journal(tmp_path) as journal, pytest.raises(TypeError, match=r"RunRecord\.step"):
        journal.save(record)


def test_events_keep_their_order(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for index in range(5):
            journal.event(float(index), "tick" if index % 2 else "tock", {"index": index})
    rows = events(tmp_path)
    assert [json.loads(payload)["index"] for _, payload in rows] == [0, 1, 2, 3, 4]
    assert [kind for kind, _ in rows] == ["tock", "tick", "tock", "tick", "tock"]


def test_a_slot_keeps_one_row_a_change_of_state(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for since, state in ((1.0, "starting"), (1.0, "starting"), (5.0, "serving")):
            journal.save(sample_run.slot_record("a/0", "rollout", state, since))
        journal.flush()
        journal.save(sample_run.slot_record("a/0", "rollout", "serving", 5.0, running=3))
        # A slot that cannot be reached keeps the time since which it serves.
        journal.save(sample_run.slot_record("a/0", "rollout", "unreachable", 5.0))
        journal.save(sample_run.slot_record("a/0", "rollout", "serving", 5.0))
    with Reader(tmp_path) as reader:
        states = [state.state for state in reader.slot_history()]
        assert states == ["starting", "serving", "unreachable", "serving"]


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(StateError, match="another libra"):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_a_controller_that_comes_back_continues_its_file(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.slot_record("a/0", "rollout", "serving", 1.0))
    with Journal(tmp_path) as journal:
        journal.save(sample_run.slot_record("a/0", "rollout", "serving", 1.0))
        journal.save(sample_run.step_record(1, 9.0))
    with Reader(tmp_path) as reader:
        assert len(reader.slot_history()) == 1
        assert len(reader.steps()) == 1


def test_a_full_disk_loses_nothing_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
    told: list[StateError] = []
    heard = threading.Event()

    def tell(error: StateError) -> None:
        told.append(error)
        heard.set()

    journal = Journal(tmp_path, flush_s=0.01, on_error=tell)
    pages = journal._connection.execute("PRAGMA page_count").fetchone()[0]
    journal._connection.execute(f"PRAGMA max_page_count={pages}")
    for index in range(400):
        journal.event(float(index), "filler", {"text": "x" * 200})
    assert heard.wait(_DEADLINE_S)
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        journal.event(0.0, "more", {})
        time.sleep(0.01)
    assert len(told) == 1
    assert "full" in str(told[0])
    assert "df -h" in told[0].hint
    with journal._writing:
        journal._connection.execute("PRAGMA max_page_count=100000")
    journal.close()
    assert sum(kind == "filler" for kind, _ in events(tmp_path)) == 400


def test_reading_works_while_the_writer_writes(tmp_path: Path) -> None:
    with Journal(tmp_path, flush_s=0.001) as journal:
        journal.save(sample_run.run_record())
        journal.flush()
        for step in range(1, 60):
            journal.save(sample_run.step_record(step, 10.0 * step))
            journal.save(sample_run.run_record(step=step))
            if step % 3 == 0:
                journal.flush()
                with Reader(tmp_path) as reader:
                    assert reader.run().step == step
                    assert len(reader.steps()) == step


def test_a_reader_sees_one_instant_however_long_it_reads(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record(step=1))
        journal.flush()
        with Reader(tmp_path) as reader:
            assert reader.run().step == 1
            journal.save(sample_run.run_record(step=2))
            journal.flush()
            assert reader.run().step == 1


@pytest.fixture(params=["live", "finished", "killed", "killed and copied", "held open"])
def run_of(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A run directory in every shape in which one can be found."""
    monkeypatch.setattr(database_module, "CLOSE_DEADLINE_S", 0.1)
    run_dir = tmp_path / "run #1 100% ?"
    if request.param == "live":
        with Journal(run_dir) as journal:
            journal.save(sample_run.run_record(step=7))
            journal.flush()
            yield run_dir
    elif request.param == "finished":
        with Journal(run_dir) as journal:
            journal.save(sample_run.run_record(step=7))
        yield run_dir
    elif request.param == "held open":
        journal = Journal(run_dir)
        journal.save(sample_run.run_record(step=7))
        journal.flush()
        with Reader(run_dir):
            journal.close()
        yield run_dir
    else:
        _write_and_die(run_dir)
        if request.param == "killed and copied":
            os.remove(run_dir / f"{DATABASE}-shm")
        yield run_dir


def _write_and_die(run_dir: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from libra_cli.runtime.store.journal import Journal; from tests import sample_run\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "journal.save(sample_run.run_record(step=7)); journal.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = str(Path(__file__).resolve().parents[3])
    died = subprocess.run(
        [sys.executable, "-c", script, str(run_dir)],
        env=os.environ | {"PYTHONPATH": root},
        timeout=_DEADLINE_S,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL


def test_reading_gives_the_truth_and_leaves_the_directory_as_it_was(run_of: Path) -> None:
    before = listing(run_of)
    for _ in range(2):
        with Reader(run_of) as reader:
            assert reader.run().step == 7
            # The shared index of a live database is memory, and may show any time.
            names = {name for name in listing(run_of) if not name.endswith("-shm")}
            assert names == {name for name in before if not name.endswith("-shm")}
    assert set(listing(run_of)) == set(before)
    assert listing(run_of)[DATABASE] == before[DATABASE]


def test_a_finished_run_is_one_plain_file(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record())
    assert sorted(listing(tmp_path)) == [DATABASE, "libra.lock"]
    copied = tmp_path / "elsewhere"
    copied.mkdir()
    shutil.copy(tmp_path / DATABASE, copied)
    with Reader(copied) as reader:
        assert reader.run().id == "quickstart-1"


def test_what_is_no_run_is_refused_with_the_next_thing_to_type(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="not a run directory") as caught:
        Reader(tmp_path)
    assert "libra status" in caught.value.hint


def test_a_run_of_somebody_else_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.name == DATABASE:  # whoever is root may look anywhere
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return os.stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(WrongRun, match="cannot be looked into: Permission denied") as caught:
        Reader(tmp_path)
    assert f"ls -ld {tmp_path}" in caught.value.hint


@pytest.fixture
def left_log(tmp_path: Path) -> Path:
    """A run whose -shm is not there, so that it is read from a copy; the path of its -wal."""
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record(step=7))
    log = tmp_path / f"{DATABASE}-wal"
    log.touch()
    return log


def test_a_run_that_there_is_no_room_to_copy_is_refused_with_the_reason(
    left_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copy", copy)
    with pytest.raises(StateError, match="No space left") as caught:
        Reader(left_log.parent)
    assert "df -h" in caught.value.hint


def test_a_run_that_ends_while_it_is_copied_is_read(
    left_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(source: Path, target: Path) -> object:
        if source == left_log:
            source.unlink()
        return whole(source, target)

    whole = shutil.copy
    monkeypatch.setattr(shutil, "copy", copy)
    with Reader(left_log.parent) as reader:
        assert reader.run().step == 7


def test_a_file_that_is_no_run_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"not a database at all" * 100)
    with pytest.raises(StateError, match="not a run of libra"):
        Reader(tmp_path)


def test_whoever_finds_the_file_finds_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that dies while it makes the tables leaves no run; the next one can begin."""
    with monkeypatch.context() as patch:
        broken = (*schema_module._NO_RECORDS, "CREATE TABLE meta (again TEXT)")
        patch.setattr(schema_module, "_NO_RECORDS", broken)
        with pytest.raises(StateError, match="meta already exists"):
            Journal(tmp_path)
    with pytest.raises(StateError, match="not a run directory"):
        Reader(tmp_path)
    with Journal(tmp_path), Reader(tmp_path) as reader:
        assert reader.steps() == []


def test_a_run_that_wrote_nothing_yet_says_so(tmp_path: Path) -> None:
    with Journal(tmp_path), Reader(tmp_path) as reader:
        with pytest.raises(StateError, match="not written anything yet"):
            reader.run()
        assert reader.steps() == []
