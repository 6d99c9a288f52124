"""The rows of the report's timeline say what each slot did, whatever the length of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_cli.core import records as r
from libra_cli.report.html.charts import TimelineRow
from libra_cli.report.html.slot_rows import SHADES, slot_rows
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from tests import sample_run
from tests.sample_run import slot_record

_SECONDS = 400.0


def rows_of(run_dir: Path, *records: r.Record) -> dict[str, TimelineRow]:
    """The rows of a run of 400 s; times of the records count from its start."""
    with Journal(run_dir) as journal:
        journal.save(sample_run.run_record())
        for record in records:
            journal.save(record)
    with Reader(run_dir) as reader:
        rows = slot_rows(reader, reader.steps(), began=sample_run.START, seconds=_SECONDS)
    return {row.name: row for row in rows}


def state(slot: str, role: str, name: str, at: float) -> r.SlotRecord:
    return slot_record(slot, role, name, sample_run.START + at)


def test_a_slot_that_moves_shows_every_state_it_was_in(tmp_path: Path) -> None:
    sample_run.write_moving(tmp_path / "run")
    with Reader(tmp_path / "run") as reader:
        rows = slot_rows(reader, reader.steps(), began=sample_run.START, seconds=260.0)
    (moved,) = (row for row in rows if row.name == sample_run.HYBRID)
    names = [name for _, _, name in moved.states]
    away = names.index("draining")
    assert names[away - 1 : away + 10] == [
        "serving",
        "draining",
        "stopping",
        "starting",
        "syncing",
        "gradient",
        "stopping",
        "starting",
        "syncing",
        "serving",
        "failed",
    ]


def test_training_is_told_by_who_does_it(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path, state("a/0", "train", "training", 0.0), state("a/1", "gradient", "training", 0.0)
    )
    assert rows["a/0"].states == [(0.0, _SECONDS, "training")]
    assert rows["a/1"].states == [(0.0, _SECONDS, "gradient")]


def test_a_state_shorter_than_a_bin_is_still_drawn_and_the_worst_one_wins(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        state("a/0", "rollout", "serving", 0.0),
        state("a/0", "rollout", "stopping", 100.1),
        state("a/0", "rollout", "unreachable", 100.2),
        state("a/0", "rollout", "serving", 100.3),
    )
    assert rows["a/0"].states == [
        (0.0, 100.0, "serving"),
        (100.0, 101.0, "failed"),
        (101.0, _SECONDS, "serving"),
    ]


@pytest.mark.parametrize("name", ["idle", "draining", "joining", "stopping", "starting", "failed"])
def test_every_state_of_a_slot_has_a_shade(tmp_path: Path, name: str) -> None:
    rows = rows_of(tmp_path, state("a/0", "rollout", name, 0.0))
    ((_, _, shade),) = rows["a/0"].states
    assert shade in SHADES


def test_how_busy_a_server_was_is_the_mean_share_of_its_seats(tmp_path: Path) -> None:
    samples = [
        r.SampleRecord("a/0", sample_run.START + at, 3, 0, 0.1, None, 0, share, 0, 1.0)
        for at, share in ((4.1, 0.25), (5.9, 0.75), (7.0, 1.0))
    ]
    busy = rows_of(tmp_path, state("a/0", "rollout", "serving", 0.0), *samples)["a/0"].busy
    assert busy[:4] == [0.0, 0.0, 0.5, 1.0]
    assert busy[4:8] == [1.0] * 4, "between two readings it goes on as it was"
    assert busy[20] == 0.0, "but not for long"


def test_how_busy_the_core_was_is_its_share_of_time_in_a_step(tmp_path: Path) -> None:
    began = sample_run.START + 5.0
    step = sample_run.step_record(1, began + 3.0, started_at=began)
    busy = rows_of(tmp_path, state("a/0", "train", "training", 0.0), step)["a/0"].busy
    assert busy[:5] == pytest.approx([0.0, 0.0, 0.5, 1.0, 0.0])


def test_waits_between_the_parts_of_a_streamed_step_are_no_training(tmp_path: Path) -> None:
    began = sample_run.START + 4.0
    step = sample_run.step_record(1, began + 8.0, started_at=began, between_parts_s=6.0)
    busy = rows_of(tmp_path, state("a/0", "train", "training", 0.0), step)["a/0"].busy
    assert busy[:7] == pytest.approx([0.0, 0.0, 0.25, 0.25, 0.25, 0.25, 0.0])


def test_a_run_that_has_not_begun_has_no_rows(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record())
    with Reader(tmp_path) as reader:
        assert slot_rows(reader, [], began=sample_run.START, seconds=0.0) == []
