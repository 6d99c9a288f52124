"""A run of libra 0.1.0 is read, reported on and gone on with.

``fixtures/0.1.0`` is a run that libra 0.1.0 made of ``recipes/elastic.yaml``: two moves, three
plans. Most of its turns, trajectories, samples and events were deleted, and its host was given
another name. ``status.json`` is what ``libra status --json`` of 0.1.0 printed of that.
"""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libra_cli.app.resume import last_checkpoint, plan_to_go_on_with
from libra_cli.cli.main import app
from libra_cli.config.errors import StateError
from libra_cli.core import records as r
from libra_cli.report.html.run_report import write_report
from libra_cli.report.status.summary import summary, to_json
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import recipe_of
from libra_cli.runtime.store.schema import COLUMNS, DATABASE, FORMAT, RECORDS
from tests import sample_run

OLD_RUN = Path(__file__).parents[2] / "fixtures/0.1.0"
NEW_RECORDS = (
    r.CreditRecord,
    r.DecisionRecord,
    r.EvaluationRecord,
    r.ExportRecord,
    r.FrozenModelRecord,
    r.LateRecord,
    r.NoteRecord,
    r.RegretRecord,
)
OLD_RECORDS = [kind for kind in RECORDS if kind not in NEW_RECORDS]
"""Those that 0.1.0 had tables for."""
_NOW = 1_795_320_000.0
_ANY: Mapping[type, Any] = {str: "x", int: 10_007, bool: True, float: 0.5}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD_RUN, tmp_path / "elastic-20261122-015652"))


def libra(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def change(run_dir: Path, *statements: str) -> None:
    with closing(sqlite3.connect(run_dir / DATABASE)) as connection:
        connection.executescript("; ".join(statements))


def without(run_dir: Path, table: str, *columns: str) -> None:
    """The table as a libra would have made it that did not know the columns."""
    with closing(sqlite3.connect(run_dir / DATABASE)) as connection:
        rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall()
        kept = ", ".join(f'"{name}"' for (name,) in rows if name not in columns)
        connection.executescript(
            "PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF;"
            f"CREATE TABLE other AS SELECT {kept} FROM {table};"
            f"DROP TABLE {table}; ALTER TABLE other RENAME TO {table}"
        )


def read_everything(run_dir: Path) -> None:
    with Reader(run_dir) as reader:
        for kind in RECORDS:
            reader.rows(kind)
        json.loads(to_json(summary(reader, now=_NOW)))
        reader.played()
        reader.tool_outcomes()
        reader.slot_history()
        reader.turns_between(0.0, _NOW)


def any_of(kind: type[r.Record]) -> r.Record:
    values: dict[str, Any] = {}
    for column in COLUMNS[kind]:
        is_json = column.name.endswith("_json")
        values[column.name] = column.default if is_json else _ANY[column.kind]
    return kind(**values)


def said_before(new: Any, old: Any) -> bool:
    """Whether ``new`` says all that ``old`` says, and perhaps more."""
    if isinstance(old, dict):
        return all(key in new and said_before(new[key], value) for key, value in old.items())
    if isinstance(old, list):
        return len(new) == len(old) and all(map(said_before, new, old))
    if isinstance(old, float):
        return math.isclose(new, old, rel_tol=1e-12)
    return bool(new == old)


def test_status_as_json_says_all_that_the_libra_that_made_it_said(run_dir: Path) -> None:
    code, text = libra("status", str(run_dir), "--json")
    assert code == 0
    told, before = json.loads(text), json.loads((OLD_RUN / "status.json").read_text())
    del told["run"]["directory"], before["run"]["directory"]
    # Format 2 says no more of estimates, which libra's scheduler has none of.
    assert (told["format"], before.pop("format")) == (2, 1)
    del before["estimates"]
    for bucket in before["buckets"]:
        del bucket["off_by"], bucket["right"]
    assert said_before(told, before)


def test_status_is_shown_to_a_person(run_dir: Path) -> None:
    code, text = libra("status", str(run_dir))
    assert code == 0
    for words in ("50 of 50", "0.40 → 0.84", "91 verified", "gradient  rollout", "(planner)"):
        assert words in text


def test_the_report_is_made_again(run_dir: Path) -> None:
    page = write_report(run_dir, now=_NOW).read_text(encoding="utf-8")
    for words in ("local/1", "gradient", "Weight sync", "Time of a step"):
        assert words in page


def test_what_had_a_column_in_steps_is_a_metric(run_dir: Path) -> None:
    names = ("loss", "grad_norm", "learning_rate", "kl", "entropy", "clip_fraction", "tis_mean")
    with closing(sqlite3.connect(run_dir / DATABASE)) as connection:
        rows = connection.execute(f"SELECT {', '.join(names)} FROM steps ORDER BY step").fetchall()
    expected = [dict(zip(names, row, strict=True)) for row in rows]
    with Reader(run_dir) as reader:
        last = reader.steps()[-1]
        assert [step.metrics for step in reader.steps()] == expected
    with Journal(run_dir) as journal:
        journal.save(replace(last, step=51, metrics_json='{"kl": null, "new": 0.25}'))
    with Reader(run_dir) as reader:
        after = [step.metrics for step in reader.steps()]
    assert after == [*expected, {"kl": None, "new": 0.25}]


def test_its_processes_are_known(run_dir: Path) -> None:
    code, text = libra("logs", "local", "nothing", "--run", str(run_dir))
    assert code == 2
    for process in ("gradient-1", "model", "server-0", "server-1", "trainer-0"):
        assert process in text


def test_its_last_checkpoint_is_found(run_dir: Path) -> None:
    found = last_checkpoint(run_dir)
    assert (found.names[-1], found.trainer_incarnation) == ("step-000050", 1)


@pytest.mark.parametrize(
    ("last", "servers", "gradient"),
    [(2, ["local/0", "local/1"], ()), (1, ["local/0"], ("local/1",))],
)
def test_it_goes_on_with_its_last_plan(
    run_dir: Path, last: int, servers: list[str], gradient: tuple[str, ...]
) -> None:
    change(run_dir, f"DELETE FROM plans WHERE plan > {last}")
    begin = plan_to_go_on_with(recipe_of(run_dir), run_dir)(frozenset())
    assert [slot for slot, _ in begin.plan.servers] == servers
    assert (begin.plan.train, begin.plan.gradient) == (("local/2",), gradient)
    assert [slot.id for slot in begin.slots] == ["local/0", "local/1", "local/2"]
    assert begin.plan.reasons[0] == f"goes on with plan {last}, the last before the run was resumed"


def test_its_recipe_is_read_even_with_keys_that_are_gone(run_dir: Path) -> None:
    path = run_dir / "recipe.json"
    said = json.loads(path.read_text())
    said["training"]["forgotten"] = said["nodes"][0]["forgotten"] = 1
    path.write_text(json.dumps(said))
    assert recipe_of(run_dir).run.name == "elastic"


def test_reading_leaves_it_as_it_was(run_dir: Path) -> None:
    read_everything(run_dir)
    assert (run_dir / DATABASE).read_bytes() == (OLD_RUN / DATABASE).read_bytes()
    assert {path.name for path in run_dir.iterdir()} == {path.name for path in OLD_RUN.iterdir()}


def test_a_run_goes_on_in_its_file(run_dir: Path) -> None:
    with Reader(run_dir) as reader:
        before = {kind: reader.rows(kind) for kind in RECORDS}
    with Journal(run_dir) as journal:
        for kind in RECORDS:
            journal.save(any_of(kind))
    with Reader(run_dir) as reader:
        after = {kind: reader.rows(kind) for kind in RECORDS}
    for kind in RECORDS:
        assert [row for row in after[kind] if row in before[kind]] == before[kind]
        assert any_of(kind) in after[kind]
    read_everything(run_dir)


def test_a_slot_that_did_not_change_since_adds_nothing_to_its_history(run_dir: Path) -> None:
    with Reader(run_dir) as reader:
        before, slots = reader.slot_history(), reader.slots()
    with Journal(run_dir) as journal:
        for slot in slots:
            journal.save(slot)
    with Reader(run_dir) as reader:
        assert reader.slot_history() == before
        assert {state.incarnation for state in before} == {0, 1, 2}


def test_a_migrated_file_is_refused_by_the_libra_that_made_it(run_dir: Path) -> None:
    Journal(run_dir).close()
    with Reader(run_dir) as reader:
        assert "schema" not in reader.meta, "0.1.0 compares it with its own"


def test_migrating_twice_is_the_same_as_once(run_dir: Path) -> None:
    shapes = []
    for _ in range(2):
        Journal(run_dir).close()
        with closing(sqlite3.connect(run_dir / DATABASE)) as connection:
            shapes.append(connection.execute("SELECT name, sql FROM sqlite_master").fetchall())
            assert connection.execute("PRAGMA user_version").fetchone() == (FORMAT,)
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("kind", OLD_RECORDS, ids=lambda kind: kind.TABLE)
def test_a_database_without_any_one_column_is_read(kind: type[r.Record], tmp_path: Path) -> None:
    for column in COLUMNS[kind]:
        run_dir = Path(shutil.copytree(OLD_RUN, tmp_path / column.name))
        without(run_dir, kind.TABLE, column.name, r.RENAMED.get(column.name, ""))
        read_everything(run_dir)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.TABLE)
def test_columns_that_are_no_key_are_added_to_the_file(
    kind: type[r.Record], tmp_path: Path
) -> None:
    added = [column for column in COLUMNS[kind] if column.name not in kind.KEY]
    with Journal(tmp_path) as journal:
        journal.save(any_of(kind))
    without(tmp_path, kind.TABLE, *(column.name for column in added))
    Journal(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        for column in added:
            (value,) = connection.execute(f"SELECT {column.name} FROM {kind.TABLE}").fetchone()
            assert value == column.default


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.TABLE)
def test_a_database_without_a_table_is_read_and_written(
    kind: type[r.Record], run_dir: Path
) -> None:
    change(run_dir, f"DROP TABLE IF EXISTS {kind.TABLE}")
    if kind is not r.RunRecord:
        read_everything(run_dir)
    with Journal(run_dir) as journal:
        journal.save(any_of(kind))
    with Reader(run_dir) as reader:
        assert any_of(kind) in reader.rows(kind)


def test_tables_and_columns_that_nobody_knows_are_left_alone(run_dir: Path) -> None:
    change(
        run_dir,
        "CREATE TABLE more (thing TEXT)",
        "INSERT INTO more VALUES ('kept')",
        "CREATE TABLE other (node TEXT PRIMARY KEY, host TEXT, rack INTEGER NOT NULL)",
        "INSERT INTO other SELECT node, host, 42 FROM nodes",
        "DROP TABLE nodes",
        "ALTER TABLE other RENAME TO nodes",
    )
    read_everything(run_dir)
    added = r.NodeRecord("new", "10.0.0.9", "ready", 1.0, "{}", "")
    with Journal(run_dir) as journal:
        journal.save(added)
    with Reader(run_dir) as reader:
        assert added in reader.nodes()
    with closing(sqlite3.connect(run_dir / DATABASE)) as connection:
        assert connection.execute("SELECT thing FROM more").fetchall() == [("kept",)]
        racks = connection.execute("SELECT node, rack FROM nodes ORDER BY node").fetchall()
    assert racks == [("local", 42), ("new", None)]


@pytest.mark.parametrize("opened", [Reader, Journal])
def test_a_database_of_a_newer_libra_is_refused(
    run_dir: Path, opened: Callable[[Path], object]
) -> None:
    change(
        run_dir,
        f"PRAGMA user_version = {FORMAT + 1}",
        "UPDATE meta SET value = '9.1.0' WHERE key = 'libra'",
    )
    before = (run_dir / DATABASE).read_bytes()
    with pytest.raises(StateError, match=r"libra 9\.1\.0, which is newer") as caught:
        opened(run_dir)
    assert "pip install --upgrade" in caught.value.hint
    assert (run_dir / DATABASE).read_bytes() == before


def test_a_resumed_run_is_known_by_the_machine_that_goes_on_with_it(run_dir: Path) -> None:
    sample = sample_run.run_record(controller_pid=1, controller_started=-1.0)
    with Journal(run_dir) as journal:
        journal.save(sample)
    with Reader(run_dir) as reader:
        assert reader.meta["host"] != "controller"
        assert summary(reader, now=_NOW).run.state == "failed", "no such controller lives"
