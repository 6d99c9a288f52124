"""What people are told of evaluations, of one that has nothing to say, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from libra_cli.cli.main import app
from libra_cli.core.records import EvaluationRecord
from libra_cli.report.html.run_report import write_report
from libra_cli.report.status.evaluations import evaluation_parts
from libra_cli.report.terminal.evaluations import evaluation_words
from libra_cli.runtime.store.journal import Journal
from tests.sample_run import write_whole

FAILED = EvaluationRecord(0, "held-out", 10, 1, "finished", 1.0, 2.0, 3, 2, 0, 6, None, 0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with an evaluation of which every trajectory has failed."""
    made = write_whole(tmp_path / "run")
    with Journal(made) as journal:
        journal.save(FAILED)
    return made


def test_an_evaluation_in_which_all_has_failed_says_so() -> None:
    (part,) = evaluation_parts([FAILED])
    assert evaluation_words(part) == "held-out  step 10  all 6 trajectories failed"


def test_status_and_report_show_a_run_with_such_an_evaluation(run_dir: Path) -> None:
    shown = CliRunner().invoke(app, ["status", str(run_dir)])
    assert shown.exit_code == 0, shown.output
    assert "all 6 trajectories failed" in shown.output
    assert write_report(run_dir, now=2_000_000_000.0).exists()
