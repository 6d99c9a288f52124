"""A warning is told once, until it has gone away."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from libra_cli.config.recipe import ModelSpec
from libra_cli.config.rollout import RolloutSpec
from libra_cli.core.records import NoteRecord, StepRecord, to_metrics_json
from libra_cli.core.warnings.gaps import ExpectedGap, expected_gap
from libra_cli.core.warnings.rules import RuleBounds
from libra_cli.core.warnings.watch import KIND, QUIET, LearningWatch
from tests.sample_run import records, step_record

RECORDED = Path(__file__).parents[3] / "fixtures/0.1.0/libra.db"
BF16 = RuleBounds(1.0, ExpectedGap(usual=0.008, wrong=0.05))
FLOAT32 = ExpectedGap(usual=1e-4, wrong=1e-3)


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
    notes = told(LearningWatch(BF16), range(1, 60), 3.0)
    assert [(note.kind, note.subject, note.at) for note in notes] == [(KIND, "gradient", 120.0)]
    assert "libra show RUN_DIR --step 20 --worst" in notes[0].text


def test_a_warning_that_comes_and_goes_is_not_told_again() -> None:
    watch = LearningWatch(BF16)
    assert len(told(watch, range(1, 25), 3.0)) == 1
    assert not told(watch, range(25, 25 + QUIET - 10), 0.5)
    assert not told(watch, range(25 + QUIET - 10, 70), 3.0)


def test_a_warning_goes_away_and_may_come_back() -> None:
    watch = LearningWatch(BF16)
    told(watch, range(1, 25), 3.0)
    gone = told(watch, range(25, 25 + QUIET), 0.5)
    assert [(note.subject, note.resolved_at) for note in gone] == [("gradient", 124.0 + QUIET)]
    again = told(watch, range(25 + QUIET, 50 + QUIET), 3.0)
    assert [note.resolved_at for note in again] == [None]


def test_a_run_that_goes_on_remembers_what_it_has_told() -> None:
    watch = LearningWatch(BF16)
    for number in range(1, 25):
        watch.remember(step(number, 3.0))
    watch.remember(NoteRecord(KIND, "gradient", 120.0, "clipped"))
    watch.remember(NoteRecord("checkpoint", "", 120.0, "could not be written"))
    assert not told(watch, range(25, 30), 3.0)
    assert len(told(watch, range(30, 30 + QUIET), 0.5)) == 1


def gaps_told(
    watch: LearningWatch, gaps: Iterable[float | None], *, after: int = 0
) -> list[NoteRecord]:
    """The warnings of the gap at steps that have these."""
    steps = [step_record(n, 1.0, logprob_gap=gap) for n, gap in enumerate(gaps, after + 1)]
    notes = [note for one in steps for note in watch.saw(one, now=float(one.step))]
    return [note for note in notes if note.subject == "logprob-gap"]


def test_a_gap_that_doubles_against_the_first_steps_is_told_however_long_ago_they_were() -> None:
    watch = LearningWatch(BF16)
    assert not gaps_told(watch, [0.012] * 10)
    slowly = [0.012 + 0.00015 * n for n in range(140)]
    (note,) = gaps_told(watch, slowly, after=10)
    assert 80 < note.at < 110
    assert "did by 0.012 in the first 10" in note.text


def test_a_gap_above_what_rounding_gives_is_told_from_the_first_steps_on() -> None:
    (note,) = gaps_told(LearningWatch(BF16), [None, *[0.07] * 12])
    assert note.at == 11.0
    assert "rounding is below 0.05" in note.text


def test_a_tiny_gap_may_double_and_so_may_one_of_a_single_step() -> None:
    assert not gaps_told(LearningWatch(BF16), [0.001] * 10 + [0.004] * 40)
    assert not gaps_told(LearningWatch(BF16), [0.01] * 10 + [0.01, 0.05] * 10)
    assert not gaps_told(LearningWatch(BF16), [0.01] * 10 + [None] * 30)


def test_a_gap_of_steps_that_were_rolled_back_is_not_compared_with() -> None:
    watch = LearningWatch(BF16)
    gaps_told(watch, [0.01] * 4 + [0.002] * 14)
    assert not gaps_told(watch, [0.01] * 30, after=4)


def test_nothing_is_told_of_the_gaps_of_recorded_runs() -> None:
    old = sqlite3.connect(f"file:{RECORDED}?mode=ro", uri=True)
    with closing(old):
        recorded = [gap for (gap,) in old.execute("SELECT logprob_gap FROM steps ORDER BY step")]
    sampled = [row.logprob_gap for _, row in records() if isinstance(row, StepRecord)]
    for gaps in (recorded, sampled):
        assert len([gap for gap in gaps if gap is not None]) >= 10
        assert not gaps_told(LearningWatch(RuleBounds(1.0, FLOAT32)), gaps)


@pytest.mark.parametrize(
    ("dtype", "on_gpus", "quantization", "wrong"),
    [
        ("auto", False, None, 1e-3),
        ("auto", True, None, 0.05),
        ("bfloat16", False, None, 0.05),
        ("float32", True, None, 0.02),
        ("bfloat16", True, "fp8_per_channel", 0.15),
    ],
)
def test_what_is_expected_depends_on_the_format_and_the_hardware(
    dtype: str, on_gpus: bool, quantization: str | None, wrong: float
) -> None:
    model = ModelSpec.model_validate({"path": "/m", "dtype": dtype})
    rollout = RolloutSpec.model_validate({"quantization": quantization})
    expected = expected_gap(model, rollout, on_gpus=on_gpus)
    assert expected.wrong == pytest.approx(wrong)
    assert expected.usual < expected.wrong


def test_steps_that_were_rolled_back_count_no_more() -> None:
    watch = LearningWatch(BF16)
    told(watch, range(1, 19), 3.0)
    assert not told(watch, range(4, 10), 0.5)
    assert not told(watch, range(10, 19), 3.0)
