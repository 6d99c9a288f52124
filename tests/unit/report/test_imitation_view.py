"""What is shown of a run on demonstrations: its loss, since all rewards are the same."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from libra_cli.core import records as r
from libra_cli.report.html.run_report import report_page
from libra_cli.report.status.metrics import FirstLast
from libra_cli.report.status.steps import yardstick
from libra_cli.report.status.summary import RunSummary, summary
from libra_cli.report.terminal.console import final_view, status_view
from libra_cli.report.terminal.progress import Progress
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from tests import sample_run

NOW = sample_run.START + 1000.0


def imitated(step: r.StepRecord) -> r.StepRecord:
    """The step as one on demonstrations: the loss falls from 2."""
    metrics = {"loss": 2.0 / step.step, "token_accuracy": 1 - 1 / step.step}
    return replace(step, reward=1.0, metrics_json=r.to_metrics_json(metrics))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    sample_run.write(tmp_path)
    with Journal(tmp_path) as journal, Reader(tmp_path) as reader:
        for step in reader.steps():
            journal.save(imitated(step))
    return tmp_path


def drawn(view: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(view)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def told(run_dir: Path) -> tuple[RunSummary, list[r.StepRecord]]:
    with Reader(run_dir) as reader:
        return summary(reader, now=NOW), list(reader.steps())


def test_status_and_the_end_of_a_run_show_the_loss(run_dir: Path) -> None:
    value, steps = told(run_dir)
    first = sum(2.0 / number for number in range(1, 11)) / 10
    for view in (status_view(value, now=NOW), final_view(value, steps)):
        text = drawn(view)
        assert f"{first:.2f} → 0.06" in text
        assert "reward" not in text.split("trajectories")[0]
    assert value.reward == FirstLast(1.0, 1.0)  # --json tells what there is


def test_the_report_draws_the_loss(run_dir: Path) -> None:
    html = report_page(run_dir, now=NOW)
    assert "nats a token" in html
    assert "mean over the trajectories of a step" not in html


def test_the_live_view_has_the_loss_in_every_line(run_dir: Path) -> None:
    _, steps = told(run_dir)
    line = Progress(Console(file=io.StringIO()), name="sft")._take_step(steps[0])
    assert "loss 2.000" in line
    assert "reward" not in line


def test_other_runs_are_judged_by_their_reward(tmp_path: Path) -> None:
    sample_run.write(tmp_path)
    _, steps = told(tmp_path)
    assert yardstick(steps).name == "reward"
    assert yardstick(steps).values == [step.reward for step in steps]
    assert yardstick([]).change == FirstLast(None, None)
