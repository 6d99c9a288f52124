"""A warning is told once, until it has gone away."""

from __future__ import annotations

from libra_cli.core.records import NoteRecord, StepRecord, to_metrics_json
from libra_cli.core.warnings.rules import RuleBounds
from libra_cli.core.warnings.watch import KIND, QUIET, LearningWatch
from tests.sample_run import step_record


def step(number: int, grad_norm: float) -> StepRecord:
    metrics = to_metrics_json({"grad_norm": grad_norm})
    return step_record(number, 100.0 + number, metrics_json=metrics)


def told(watch: LearningWatch, numbers: range, grad_norm: float) -> list[NoteRecord]:
    return [
        note
        for number in numbers
        for note in watch.saw(step(number, grad_norm), now=100.0 + number)
    ]


def test_a_warning_is_told_once_while_it_holds() -> None:
    notes = told(LearningWatch(RuleBounds(1.0)), range(1, 60), 3.0)
    assert [(note.kind, note.subject, note.at) for note in notes] == [(KIND, "gradient", 120.0)]
    assert "libra show RUN_DIR --step 20 --worst" in notes[0].text


def test_a_warning_that_comes_and_goes_is_not_told_again() -> None:
    watch = LearningWatch(RuleBounds(1.0))
    assert len(told(watch, range(1, 25), 3.0)) == 1
    assert not told(watch, range(25, 25 + QUIET - 10), 0.5)
    assert not told(watch, range(25 + QUIET - 10, 70), 3.0)


def test_a_warning_goes_away_and_may_come_back() -> None:
    watch = LearningWatch(RuleBounds(1.0))
    told(watch, range(1, 25), 3.0)
    gone = told(watch, range(25, 25 + QUIET), 0.5)
    assert [(note.subject, note.resolved_at) for note in gone] == [("gradient", 124.0 + QUIET)]
    again = told(watch, range(25 + QUIET, 50 + QUIET), 3.0)
    assert [note.resolved_at for note in again] == [None]


def test_a_run_that_goes_on_remembers_what_it_has_told() -> None:
    watch = LearningWatch(RuleBounds(1.0))
    for number in range(1, 25):
        watch.remember(step(number, 3.0))
    watch.remember(NoteRecord(KIND, "gradient", 120.0, "clipped"))
    watch.remember(NoteRecord("checkpoint", "", 120.0, "could not be written"))
    assert not told(watch, range(25, 30), 3.0)
    assert len(told(watch, range(30, 30 + QUIET), 0.5)) == 1


def test_steps_that_were_rolled_back_count_no_more() -> None:
    watch = LearningWatch(RuleBounds(1.0))
    told(watch, range(1, 19), 3.0)
    assert not told(watch, range(4, 10), 0.5)
    assert not told(watch, range(10, 19), 3.0)
