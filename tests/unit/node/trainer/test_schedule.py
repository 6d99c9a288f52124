"""Schedules of the learning rate."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.training import TrainingSpec
from libra_cli.node.trainer.schedule import learning_rate_at

PEAK = 0.5


def rates(steps: int, **training: Any) -> list[float]:
    spec = TrainingSpec(learning_rate=PEAK, **training)
    return [learning_rate_at(step, spec, steps) for step in range(1, steps + 1)]


def test_the_first_step_has_its_part_of_the_ramp_and_the_peak_is_reached_at_its_end():
    assert rates(5, warmup_steps=4) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


def test_a_line_falls_evenly_from_the_end_of_the_ramp_to_the_last_step():
    found = rates(6, lr_scheduler_type="linear", warmup_steps=2)
    assert found == pytest.approx([0.25, 0.5, 0.375, 0.25, 0.125, 0.0])


def test_half_a_cosine_is_halfway_in_the_middle():
    found = rates(9, lr_scheduler_type="cosine", warmup_steps=1, min_lr_ratio=0.2)
    assert found[4] == pytest.approx(PEAK * 0.6)
    assert found[-1] == pytest.approx(PEAK * 0.2)


def test_a_stable_rate_falls_over_the_last_steps_only():
    found = rates(10, lr_scheduler_type="warmup_stable_decay", decay_steps=4)
    assert found[:6] == [PEAK] * 6
    assert found[6:] == pytest.approx([0.375, 0.25, 0.125, 0.0])
    tenth = rates(30, lr_scheduler_type="warmup_stable_decay")
    assert tenth.count(PEAK) == 27


@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "warmup_stable_decay"]),
    steps=st.integers(1, 60),
    warmup=st.integers(0, 70),
    floor=st.floats(0, 1),
    step=st.integers(1, 100),
)
def test_every_rate_is_between_none_and_the_peak_and_falls_after_the_ramp(
    kind: Any, steps: int, warmup: int, floor: float, step: int
):
    spec = TrainingSpec(
        learning_rate=PEAK, lr_scheduler_type=kind, warmup_steps=warmup, min_lr_ratio=floor
    )
    rate, following = (learning_rate_at(at, spec, steps) for at in (step, step + 1))
    assert 0 <= rate <= PEAK
    assert step < warmup or following <= rate + 1e-12
