"""The line and the numbers that people are shown of a run's evaluations."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from libra_cli.core.evaluation.estimates import evaluation_metrics
from libra_cli.core.records import EvaluationRecord, to_metrics_json
from libra_cli.report.status.evaluations import evaluation_parts
from libra_cli.report.terminal.evaluations import evaluation_table, evaluation_words
from libra_cli.report.terminal.progress import Progress


def row(number: int, rewards: list[list[float]], **changes: Any) -> EvaluationRecord:
    metrics = evaluation_metrics(rewards, samples=2, success=1.0) if rewards else {}
    played = sum(map(len, rewards))
    values: dict[str, Any] = {
        "evaluation": number, "name": "held-out", "step": 10 * number, "trainer_incarnation": 1,
        "state": "finished", "started_at": 1.0, "ended_at": 3.0, "tasks": 2, "samples": 2,
        "finished": played, "failed": 0, "version_mean": 10.0 * number, "generated_tokens": 9,
        "metrics_json": to_metrics_json(metrics),
    }  # fmt: skip
    return EvaluationRecord(**values | changes)


def words(*rows: EvaluationRecord, live: bool = True) -> str:
    (part,) = evaluation_parts(rows, live=live)
    return evaluation_words(part)


def test_the_newest_result_stands_beside_the_first() -> None:
    told = words(row(0, [[1.0, 0.0], [0.0, 0.0]]), row(1, [[1.0, 1.0], [1.0, 0.0]]))
    assert told.startswith("held-out  step 10  pass@1 0.25 → 0.75 [")
    assert told.endswith("pass@2 1.00  reward 0.75")


def test_trajectories_that_failed_are_told_beside_the_others() -> None:
    assert words(row(0, [[1.0], [0.0, 0.0]], failed=1)).endswith("1 of 4 trajectories failed")


def test_what_is_played_is_told_while_the_run_goes_on_and_not_after_its_controller_died() -> None:
    under_way = row(1, [[1.0]], state="running", ended_at=None)
    assert words(row(0, [[1.0, 0.0]]), under_way).endswith("step 10 playing: 1 of 4")
    assert "playing" not in words(row(0, [[1.0, 0.0]]), under_way, live=False)


def test_one_that_was_cut_is_not_shown_as_a_result() -> None:
    told = words(row(0, [[1.0, 0.0]]), row(1, [[0.0]], state="cut"))
    assert "step 0" in told
    assert "step 10" not in told


def test_a_run_tells_each_evaluation_that_is_over_in_one_line() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=80), name="run", clock=lambda: 0.0)
    first = row(0, [[1.0, 0.0], [0.0, 0.0]])
    under_way = row(1, [[1.0]], state="running", ended_at=None)
    for record in (first, under_way, under_way, row(1, [[1.0, 1.0], [1.0, 0.0]])):
        progress.on(record)
    told = [line.split("  ", 1)[1] for line in out.getvalue().splitlines()]
    assert len(told) == 2
    assert told[0].startswith("evaluation held-out  step 0  pass@1 0.25 [")
    assert told[1].startswith("evaluation held-out  step 10  pass@1 0.25 → 0.75 [")


def test_a_reward_of_one_task_is_shown_without_an_interval() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(evaluation_table(evaluation_parts([row(0, [[1.0, 0.0]])])))
    lines = {words[1]: words[2:] for words in map(str.split, out.getvalue().splitlines()[1:])}
    assert lines["avg@2"][:2] == ["0.50", "–"]
    assert lines["pass@1"][2] == "to"
