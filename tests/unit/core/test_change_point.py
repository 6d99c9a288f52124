"""A sudden change of the work is found, and neither noise nor growth is one."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from random import Random

import pytest

from libra_cli.core.planning.controller import record_of_plan
from libra_cli.core.run.change_point import WorkHistory, since_change
from libra_cli.core.run.observer import RunObserver
from libra_cli.core.types import Plan
from tests import sample_run, world
from tests.unit.core.test_observer import ENDED, ROOM, play

SERIES = 200


def noisy(seed: int, factors: list[float], spread: float) -> list[float]:
    random = Random(seed)
    return [100 * factor * exp(random.gauss(0, spread)) for factor in factors]


@pytest.mark.parametrize("before", [4, 9, 16])
@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_change_is_known_within_three_steps(before: int, factor: float) -> None:
    factors = [1.0] * before + [factor] * 3
    found = [since_change(noisy(seed, factors, 0.15)) for seed in range(SERIES)]
    assert sum(each == 3 for each in found) > 0.9 * SERIES


def test_a_single_step_unlike_the_others_is_no_change() -> None:
    assert since_change([100.0] * 8 + [900.0]) == 9
    assert since_change([900.0] + [100.0] * 8) == 9
    assert since_change([]) == 0


@pytest.mark.parametrize("spread", [0.1, 0.2, 0.3])
def test_steps_that_differ_by_chance_are_of_one_work(spread: float) -> None:
    found = [since_change(noisy(seed, [1.0] * 12, spread)) for seed in range(SERIES)]
    assert sum(each < 12 for each in found) <= 0.02 * SERIES


def test_growth_is_no_sudden_change() -> None:
    growing = [1 + 0.06 * step for step in range(20)]
    found = [since_change(noisy(seed, growing, 0.1)) for seed in range(SERIES)]
    assert sum(each < 20 for each in found) <= 0.1 * SERIES
    assert since_change(growing) == 20


def test_work_that_comes_back_changes_twice() -> None:
    history = WorkHistory()
    since = []
    for length in [1.0] * 6 + [4.0] * 6 + [1.0] * 6:
        history.add({"length": length, "other": 1.0})
        since.append(history.since)
    assert since[:7] == [None] * 7
    assert since[7:13] == [2, 3, 4, 5, 6, 7]
    assert since[13:] == [2, 3, 4, 5, 6]


def test_what_was_before_a_change_is_no_evidence_after_it() -> None:
    recipe = world.recipe(training={"groups_per_step": 8, "max_staleness": 1}, **ROOM)
    observer = RunObserver(recipe)
    observer.saw(record_of_plan(0, Plan((), ("a/0",)), 0.0, "start", None))
    each = recipe.trajectories_per_step
    for step in range(1, 12):
        filtered = 0 if step < 9 else 300
        for group in range(step * each, (step + 1) * each):
            play(observer, group, 2.0)
            observer.saw(replace(ENDED, group_id=group))
        row = sample_run.step_record(step, step * 10.0, started_at=step * 10.0 - 4)
        told = f'{{"filtered_tokens": {filtered}}}'
        observer.saw(replace(row, generated_tokens=100, batch_json=told))
        if step == 8:
            assert observer.workload is not None
            assert (len(observer.measured), len(observer.lengths)) == (4, 8)
            assert len(observer.workload.samples) > 3 * each
    assert observer.workload is not None
    assert (len(observer.measured), len(observer.lengths)) == (3, 3)
    assert len(observer.workload.samples) == 3 * each
    assert observer.workload.extras.filtered == pytest.approx(3.0)
