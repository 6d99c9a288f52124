"""A run is seen again from its journal, and is started without a terminal."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from libra_cli.app import attach
from libra_cli.app.attach import DetachedRun, Watched
from libra_cli.cli.main import app
from libra_cli.config.errors import StateError
from libra_cli.core.records import (
    EvaluationRecord,
    NoteRecord,
    Record,
    RunRecord,
    StepRecord,
)
from libra_cli.core.warnings.watch import KIND
from libra_cli.report.terminal.progress import Progress
from libra_cli.runtime.store.controller_process import process_started
from libra_cli.runtime.store.event_log import EVENTS
from libra_cli.runtime.store.follower import ADOPTED, NOTE, JournalFollower
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import CONSOLE_LOG
from tests import sample_run

DEADLINE_S = 20.0
EVALUATION = EvaluationRecord(
    0, "held-out", 10, 1, "finished", 1.0, 2.0, 3, 1, 3, 0, 10.0, 60, '{"pass@1": 1, "avg@1": 1}'
)
WARNING = NoteRecord(KIND, "entropy", 2.0, "the policy has become certain")


def mine(state: str = "running") -> RunRecord:
    started = process_started(os.getpid())
    assert started is not None
    return sample_run.run_record(state, controller_pid=os.getpid(), controller_started=started)


def test_who_attaches_sees_what_the_run_itself_shows(tmp_path: Path) -> None:
    live = [Progress(Console(file=io.StringIO(), width=80), name="x") for _ in range(2)]
    with Journal(tmp_path) as journal:
        for record in (*(record for _, record in sample_run.records()), EVALUATION, WARNING):
            live[0].on(record)
            journal.save(record)
    with Reader(tmp_path) as reader:
        for record in JournalFollower().records(reader):
            live[1].on(record)
    drawn = [io.StringIO(), io.StringIO()]
    for progress, file in zip(live, drawn, strict=True):
        Console(file=file, width=80).print(progress)
    lines = [file.getvalue().splitlines()[1:] for file in drawn]
    assert lines[0] == lines[1]
    shown = " ".join(drawn[1].getvalue().split())
    assert "the policy has become certain" in shown
    assert "held-out" in shown


def test_a_follower_gives_every_change_once(tmp_path: Path) -> None:
    follower = JournalFollower()

    def news() -> tuple[list[Record], list[str]]:
        journal.flush()
        with Reader(tmp_path) as reader:
            return follower.records(reader), follower.notes(reader)

    with Journal(tmp_path) as journal:
        journal.save(mine())
        journal.save(sample_run.step_record(1, 5.0))
        journal.event(5.0, NOTE, {"text": "a note"})
        journal.event(5.0, "StepDone", {})
        assert news() == ([mine(), sample_run.step_record(1, 5.0)], ["a note"])
        assert news() == ([], [])
        saved = sample_run.step_record(1, 5.0, checkpoint="there")
        journal.save(saved)
        journal.save(sample_run.step_record(2, 6.0))
        journal.event(6.0, NOTE, {"text": "another"})
        assert news() == ([saved, sample_run.step_record(2, 6.0)], ["another"])


def test_attaching_lasts_until_the_controller_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that has finished models are still made, and hosts cleared."""
    first_step, gone = threading.Event(), threading.Event()
    monkeypatch.setattr(attach, "POLL_S", 0.01)
    monkeypatch.setattr(attach, "controller_alive", lambda reader: not gone.is_set())
    said: list[str] = []

    def watch(record: Record) -> None:
        if isinstance(record, StepRecord):
            first_step.set()

    def go_on() -> None:
        first_step.wait(DEADLINE_S)
        journal.save(mine("finished"))
        journal.flush()
        journal.event(9.0, NOTE, {"text": "the model is made"})
        journal.flush()
        gone.set()

    with Journal(tmp_path) as journal:
        journal.save(mine())
        journal.save(sample_run.step_record(1, 5.0))
        journal.flush()
        thread = threading.Thread(target=go_on)
        thread.start()
        assert attach.attach(tmp_path, Watched(watch, said.append)) == "finished"
        thread.join()
    assert said == ["the model is made"]


def test_attaching_to_a_run_whose_controller_died_says_so(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record(controller_pid=1, controller_started=-1.0))
    done = CliRunner().invoke(app, ["attach", str(tmp_path)])
    assert done.exit_code == 1, done.output
    assert "died without ending the run" in done.output
    assert "go on with: libra run recipes/quickstart.yaml\n" in done.output


def test_attaching_to_one_that_was_killed_before_its_first_checkpoint_says_how_it_goes_on(
    tmp_path: Path,
) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record(controller_pid=1, controller_started=-1.0))
    (tmp_path / EVENTS).touch()
    done = CliRunner().invoke(app, ["attach", str(tmp_path)])
    assert f"quickstart.yaml --resume {tmp_path}" in done.output


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1), ("stopped", 4)])
def test_attaching_ends_as_the_run_did(tmp_path: Path, state: str, code: int) -> None:
    sample_run.write(tmp_path)
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record(state, ended_at=sample_run.START + 300.0))
    done = CliRunner().invoke(app, ["attach", str(tmp_path)])
    assert done.exit_code == code, done.output
    assert "step 40" in done.output


def test_ctrl_c_ends_the_view_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run_dir: Path, told: Watched) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(attach, "attach", interrupted)
    with Journal(tmp_path) as journal:
        journal.save(mine())
    done = CliRunner().invoke(app, ["attach", str(tmp_path)])
    assert done.exit_code == 0
    assert f"libra stop {tmp_path}" in done.output.replace("\n", "")


def test_attaching_to_nothing_says_what_to_type(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["attach", str(tmp_path)])
    assert done.exit_code == 2
    assert "is not a run directory" in done.output


CONTROLLER = """
import os, sys, time
from pathlib import Path
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.controller_process import process_started
from tests import sample_run
run_dir, ends = Path(sys.argv[1]), sys.argv[2]
print("its words", os.getsid(0) == os.getpid(), sys.stdin.read(), flush=True)
if ends == "fails":
    sys.exit("no such environment")
with Journal(run_dir, flush_s=0.01) as journal:
    pid = os.getpid()
    journal.save(sample_run.run_record(controller_pid=pid, controller_started=process_started(pid)))
    if ends == "late":
        journal.flush()
        sys.exit(3)
    journal.event(1.0, sys.argv[3], {})
    journal.flush()
    time.sleep(60)
"""


@pytest.mark.parametrize("begins", ["RunStarted", ADOPTED])
def test_a_detached_run_has_a_session_of_its_own_and_is_left_once_its_hosts_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    monkeypatch.setattr(attach, "POLL_S", 0.02)
    seen: list[Record] = []
    with Journal(tmp_path / "run") as journal:  # of the controller before it
        journal.save(mine("stopped"))
        journal.event(0.5, "RunStarted", {})
    argv = [sys.executable, "-c", CONTROLLER, str(tmp_path / "run"), "goes on", begins]
    detached = DetachedRun(tmp_path / "run", argv)
    try:
        assert detached.until_started(Watched(seen.append, lambda text: None)) is None
        assert os.getsid(detached.pid) == detached.pid
    finally:
        detached._process.kill()
        detached._process.wait(DEADLINE_S)
    assert [row.controller_pid for row in seen if isinstance(row, RunRecord)] == [detached.pid]
    assert (tmp_path / "run" / CONSOLE_LOG).read_text() == "its words True \n"


@pytest.mark.parametrize(("ends", "status"), [("fails", 1), ("late", 3)])
def test_a_detached_run_that_cannot_begin_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, status: int
) -> None:
    monkeypatch.setattr(attach, "POLL_S", 0.02)
    (tmp_path / CONSOLE_LOG).write_text("of a run before\n")
    argv = [sys.executable, "-c", CONTROLLER, str(tmp_path), ends]
    detached = DetachedRun(tmp_path, argv)
    began = time.monotonic()
    seen: list[Record] = []
    assert detached.until_started(Watched(seen.append, lambda text: None)) == status
    ids = {row.id for row in seen if isinstance(row, RunRecord)}
    assert ids == ({"quickstart-1"} if ends == "late" else set())
    assert time.monotonic() - began < DEADLINE_S
    assert detached.said().startswith("its words True")
    assert ("no such environment" in detached.said()) == (ends == "fails")


def test_a_run_directory_that_cannot_be_made_is_told_before_anything_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(StateError, match="cannot be made"):
        DetachedRun(tmp_path / "runs" / "run", ["true"])
