"""What a planner is shown: the work to come, and steps that measure something."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from libra_cli.core.planning.controller import record_of_plan
from libra_cli.core.records import TrajectoryRecord, TurnRecord
from libra_cli.core.run.observer import RunObserver
from libra_cli.core.types import Plan
from libra_cli.core.workload import BatchOverhead
from tests import sample_run, world

TURN = TurnRecord(0, 0, 0, 0, "a/0", 1, 0.0, 0.0, 1.0, 100, 10, "stop", "", "[]")
ENDED = TrajectoryRecord(0, 0, 0, "finished", 0.0, 50.0, 1.0, 5, 50, 200, 1, 1, "[]", "")
"""Five turns of ten tokens, each a second on its server."""
TOOLS = "time in play over time on servers"


def play(observer: RunObserver, group: int, tool_s: float) -> None:
    """Five turns with so many seconds of tools between two."""
    for turn in range(5):
        began = turn * (1.0 + tool_s)
        row = replace(TURN, group_id=group, turn=turn, queued_at=began, ended_at=began + 1.0)
        observer.saw(row)


ROOM = {
    "model": {"path": "/model", "max_len": 400},
    "rollout": {"max_turns": 8, "max_turn_tokens": 40},
}
"""Of a recipe that allows ``ENDED``."""


def tool_seconds(observer: RunObserver) -> set[float]:
    """Of all trajectories that stand for the work to come."""
    assert observer.workload is not None
    return {round(sample.tool_s, 1) for sample in observer.workload.samples}


def test_tools_that_take_longer_now_are_seen_before_their_trajectories_end() -> None:
    observer = RunObserver(world.recipe(**ROOM))
    assert observer.signs == {}
    for group in range(64):
        play(observer, group, 2.0)
        observer.saw(replace(ENDED, group_id=group))
    assert tool_seconds(observer) == {8.0}
    assert observer.signs == {"turns a trajectory": 5.0, TOOLS: pytest.approx(3.0)}
    for group in range(64, 364):
        play(observer, group, 20.0)
    assert tool_seconds(observer) == {80.0}
    assert observer.signs[TOOLS] == pytest.approx(21.0, rel=0.01)


def test_tools_that_take_longer_by_chance_change_nothing() -> None:
    observer = RunObserver(world.recipe(**ROOM))
    for group in range(64):
        play(observer, group, 2.0 if group % 8 else 20.0)
        observer.saw(replace(ENDED, group_id=group))
    before = tool_seconds(observer)
    play(observer, 64, 20.0)
    after = tool_seconds(observer)
    assert max(after) == pytest.approx(max(before), rel=0.02)


def test_the_step_that_all_first_groups_are_due_in_is_no_measure_of_rollout() -> None:
    recipe = world.recipe(training={"groups_per_step": 8, "max_staleness": 1})
    observer = RunObserver(recipe)
    observer.saw(record_of_plan(0, Plan((), ("a/0",)), 0.0, "start", None))
    for step in range(1, 5):
        row = sample_run.step_record(step, step * 10.0, started_at=step * 10.0 - 4)
        observer.saw(replace(row, waited_s=6.0, held_s=5.0))
    measured = [(step.step_s, step.waited_s, step.held_s) for step in observer.measured]
    assert measured == [(5.0, 1.0, 0.0), (10.0, 6.0, 5.0), (10.0, 6.0, 5.0)]


def test_what_is_filtered_stopped_and_replayed_is_seen_and_before_that_what_the_recipe_asks() -> (
    None
):
    recipe = world.recipe(
        rollout={"group_size": 4, "oversample": 1, "dynamic_sampling": True},
        training={"groups_per_step": 8},
        replay={"groups": 2},
    )
    observer = RunObserver(recipe)
    play(observer, 0, 2.0)
    observer.saw(replace(ENDED, group_id=0))
    assert observer.workload is not None
    assert observer.workload.extras == BatchOverhead(surplus=0.25, replayed=0.25)
    observer.saw(record_of_plan(0, Plan((), ("a/0",)), 0.0, "start", None))
    told = [{}, {"filtered_tokens": 100, "surplus_tokens": 20, "replayed_tokens": 40}]
    for step, batch in enumerate(told, 1):
        row = sample_run.step_record(step, step * 10.0, started_at=step * 10.0 - 4)
        row = replace(row, generated_tokens=100, context_tokens=1000, batch_json=json.dumps(batch))
        observer.saw(row)
    assert observer.workload.extras == BatchOverhead(filtered=0.5, surplus=0.1, replayed=0.2)
    assert [step.tokens for step in observer.evidence.steps] == [1000, 1400]
