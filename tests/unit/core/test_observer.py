"""What a planner is shown: the work to come, and steps that measure something."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, inf, log
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libra_cli.core.model_use import ModelUse, ModelUses
from libra_cli.core.observed.early_work import TOLD
from libra_cli.core.planning.controller import record_of_plan
from libra_cli.core.planning.triggers import OVERDUE
from libra_cli.core.records import (
    DecisionRecord,
    GroupRecord,
    MoveRecord,
    SyncRecord,
    TrajectoryRecord,
    TurnRecord,
    VersionRecord,
)
from libra_cli.core.rollout.active import ActiveTrajectory, Stage
from libra_cli.core.run.asked_now import AskedNow, Asking, asked_now
from libra_cli.core.run.assembly import RunParts
from libra_cli.core.run.observer import RunObserver
from libra_cli.core.types import EVALUATION_GROUPS, Plan, Trajectory, TrajectoryId
from libra_cli.core.workload import BatchOverhead, TrajectorySample
from tests import sample_run, world

TURN = TurnRecord(0, 0, 0, 0, "a/0", 1, 0.0, 0.0, 1.0, 100, 10, "stop", "", "[]")
ENDED = TrajectoryRecord(0, 0, 0, "finished", 0.0, 50.0, 1.0, 5, 50, 200, 1, 1, "[]", "")
"""Five turns of ten tokens, each a second on its server."""
START = Plan((), ("a/0",))
TOOLS = "time in play over time on servers"


def play(observer: RunObserver, group: int, tool_s: float) -> None:
    """Five turns with so many seconds of tools between two."""
    for turn in range(5):
        began = turn * (1.0 + tool_s)
        row = replace(TURN, group_id=group, turn=turn, queued_at=began, ended_at=began + 1.0)
        observer.saw(row)


def moved(slot: str, phases: str) -> MoveRecord:
    """A slot that serves no more, and trains."""
    return MoveRecord(1, 1, slot, "rollout", "gradient", "done", 0.0, 9.0, phases, "")


ROOM: dict[str, Any] = {
    "model": {"path": "/model", "max_len": 400},
    "rollout": {"max_turns": 8, "max_turn_tokens": 40},
}
"""Of a recipe that allows ``ENDED``."""


def tool_seconds(observer: RunObserver) -> set[float]:
    """Of the finished trajectories that stand for the work to come, beside those under way."""
    assert observer.workload is not None
    return {round(sample.tool_s, 1) for sample in observer.workload.samples[: observer.first_ended]}


def test_tools_that_take_longer_now_are_seen_before_their_trajectories_end() -> None:
    observer = RunObserver(world.recipe(**ROOM))
    assert observer.signs == {}
    for group in range(64):
        play(observer, group, 2.0)
        observer.saw(replace(ENDED, group_id=group))
    assert tool_seconds(observer) == {8.0}
    assert observer.signs == {
        "turns a trajectory": 5.0,
        "tokens of a context": ENDED.context_tokens,
        TOOLS: pytest.approx(3.0),
        "tokens played for each of a batch": 1.0,
    }
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


def test_the_waits_of_a_streamed_step_are_waits_and_no_training() -> None:
    observer = RunObserver(world.recipe(training={"groups_per_step": 8, "stream": True}))
    observer.saw(record_of_plan(0, Plan((), ("a/0",)), 0.0, "start", None))
    for step in range(1, 5):
        row = sample_run.step_record(step, step * 10.0, started_at=step * 10.0 - 8)
        observer.saw(replace(row, waited_s=7.0, between_parts_s=5.0))
    measured = {(step.step_s, step.train_s, step.waited_s) for step in observer.measured}
    assert measured == {(10.0, 3.0, 7.0)}
    assert {step.seconds for step in observer.evidence.steps} == {3.0}


def test_in_the_first_steps_those_under_way_count_as_long_as_they_will_be() -> None:
    recipe = world.recipe(**ROOM, training={"groups_per_step": 8, "max_staleness": 1})
    observer = RunObserver(recipe)
    observer.saw(record_of_plan(0, START, 0.0, "start", None))
    assert (observer.first_ended, observer.first_error) == (0, inf)
    for group in range(40):
        for turn in range(1 if group < 20 else 2):
            observer.saw(replace(TURN, group_id=group, turn=turn))
    for group in range(20):
        observer.saw(replace(ENDED, group_id=group, turns=1, generated_tokens=10))
    assert observer.first_ended == 20
    assert 0 < observer.first_error < 1
    assert observer.workload is not None
    turns = [sample.turns for sample in observer.workload.samples]
    assert turns[:20] == [1] * 20
    assert min(turns[20:]) > 2
    for step in (1, 2):
        observer.saw(sample_run.step_record(step, step * 10.0))
    assert observer.first_ended == 0
    assert {sample.turns for sample in observer.workload.samples} == {1}


def test_what_the_recipe_says_of_lengths_counts_until_the_first_steps_are_trained() -> None:
    recipe = world.recipe(
        **ROOM,
        training={"groups_per_step": 8, "max_staleness": 1},
        planner={"lengths": {"generated": 30.0}},
    )
    observer = RunObserver(recipe)
    observer.saw(record_of_plan(0, START, 0.0, "start", None))
    for group in range(16):
        observer.saw(replace(TURN, group_id=group))
        observer.saw(replace(ENDED, group_id=group, turns=1, generated_tokens=10))
    told = (16 * 10 + TOLD * 30) / (16 + TOLD)
    assert observer.workload is not None
    assert observer.workload.mean_generated == pytest.approx(told, abs=0.5)
    for step in (1, 2):
        observer.saw(sample_run.step_record(step, step * 10.0))
    assert observer.workload.mean_generated == 10


def test_lengths_that_a_trace_stands_for_count_for_nothing() -> None:
    planner = {"trace": "mint", "lengths": {"generated": 30.0}}
    observer = RunObserver(world.recipe(**ROOM, planner=planner))
    observer.saw(record_of_plan(0, START, 0.0, "start", None))
    for group in range(16):
        observer.saw(replace(TURN, group_id=group))
        observer.saw(replace(ENDED, group_id=group, turns=1, generated_tokens=10))
    assert observer.workload is not None
    assert observer.workload.mean_generated == 10


def played(group: int, turn: int, at: float, ended_at: float) -> TurnRecord:
    """A turn that was asked for and began at a time."""
    row = replace(TURN, group_id=group, turn=turn, queued_at=at)
    return replace(row, started_at=at, ended_at=ended_at)


def measured_run(bound: int, steps: int) -> RunObserver:
    """So many steps of 10 s have ended, of trajectories of a turn each."""
    recipe = world.recipe(**ROOM, training={"groups_per_step": 8, "max_staleness": bound})
    observer = RunObserver(recipe)
    observer.saw(record_of_plan(0, START, 0.0, "start", None))
    for group in range(20):
        observer.saw(replace(TURN, group_id=group))
        observer.saw(replace(ENDED, group_id=group, turns=1, generated_tokens=10))
    for step in range(1, steps + 1):
        observer.saw(sample_run.step_record(step, step * 10.0, started_at=step * 10.0 - 4))
    return observer


@pytest.mark.parametrize(("bound", "steps", "late"), [(1, 4, True), (4, 4, False), (4, 6, True)])
def test_a_step_is_late_after_three_times_the_longest_of_those_that_overlap(
    bound: int, steps: int, *, late: bool
) -> None:
    observer = measured_run(bound, steps)
    longest_s, ended_at = max(step.step_s for step in observer.measured), steps * 10.0
    assert not observer.is_late(0.0, now=ended_at + OVERDUE * longest_s)
    assert observer.is_late(0.0, now=ended_at + OVERDUE * longest_s + 0.1) is late


def test_in_a_late_step_only_what_has_begun_in_it_tells_the_work() -> None:
    observer = measured_run(bound=1, steps=4)
    for group in range(20, 40):  # of before, which have played a turn, and play one more
        observer.saw(played(group, 0, 39.0, 39.5))
        observer.saw(played(group, 1, 41.0, 42.0))
        if group < 30:
            observer.saw(replace(ENDED, group_id=group, turns=2, generated_tokens=20))
    for group in range(40, 60):  # of now
        for turn in range(5):
            at = 41.0 + turn
            observer.saw(played(group, turn, at, at + 0.5))
        if group < 50:
            observer.saw(replace(ENDED, group_id=group, turns=5, generated_tokens=50))
    assert observer.first_ended == 0
    assert observer.measured
    assert observer.lengths
    observer.early.overdue = True
    assert observer.first_ended == 10
    assert tool_seconds(observer) == {2.0}  # of today, whatever tools took before
    assert 0 < observer.first_error < 1
    assert not observer.measured
    assert not observer.lengths
    assert observer.workload is not None
    assert len(observer.workload.samples) == 20
    assert min(sample.turns for sample in observer.workload.samples) == 5
    observer.saw(sample_run.step_record(5, 99.0))
    assert observer.first_ended == 0


def test_in_a_late_step_the_first_to_end_tell_nothing_before_most_have_played() -> None:
    observer = measured_run(bound=1, steps=4)
    for group in range(20, 60):
        observer.saw(
            replace(ENDED, group_id=group, state="running", started_at=41.0, ended_at=None)
        )
    for group in range(20, 40):
        assert observer.first_error == inf
        observer.saw(played(group, 0, 41.0, 42.0))
        observer.saw(replace(ENDED, group_id=group, turns=1, generated_tokens=10, ended_at=42.0))
        observer.early.overdue = True
    assert observer.first_error == 0


def test_in_a_late_step_nothing_is_said_of_the_staleness_bound() -> None:
    training = {"groups_per_step": 8, "max_staleness": 1, "staleness": "auto"}
    observer = RunObserver(world.recipe(**ROOM, training=training))
    assert observer.staleness is not None
    observer.early.overdue = True
    assert observer.staleness is None


def judged(turns: int) -> RunObserver:
    """Of 40 trajectories of so many turns 30 have played them, with three seconds of a tool between
    two, and a judge has answered 10; the rows of a last turn come with the answer. The others have
    played a turn."""
    recipe = world.recipe(**ROOM, training={"groups_per_step": 8, "max_staleness": 1})
    observer = RunObserver(recipe)
    observer.saw(record_of_plan(0, START, 0.0, "start", None))
    for group in range(40):
        for turn in range(turns if group < 10 else turns - 1 if group < 30 else 1):
            row = replace(TURN, group_id=group, turn=turn, queued_at=4.0 * turn)
            observer.saw(replace(row, ended_at=row.queued_at + 1))
    for group in range(10):
        observer.saw(replace(ENDED, group_id=group, turns=turns, generated_tokens=10 * turns))
    uses = (ModelUse("judge", 1, 40.0, 800.0, open=20, answered=10),)
    ended = Asking(TrajectorySample(100, 10 * turns, turns=turns), queued_at=4.0 * (turns - 1))
    # An evaluation waits too, and so does one that a tool has not answered.
    asking = {(group, 0, 0): ended for group in (EVALUATION_GROUPS, *range(11, 30))}
    observer.asked_now = AskedNow(uses, uses, {**asking, (30, 0, 0): ended})
    return observer


@pytest.mark.parametrize("turns", [1, 2])
def test_those_that_wait_for_a_judge_have_played_all_their_turns(turns: int) -> None:
    observer = judged(turns)
    assert observer.workload is not None
    samples = observer.workload.samples
    assert [sample.turns for sample in samples[:29]] == [turns] * 29
    assert {sample.tool_s for sample in samples[:29]} == {3.0 * (turns - 1)}
    assert len(samples) == (39 if turns == 1 else 40)  # the one that is left has played no turn
    (judge,) = observer.first_demands(observer.workload)
    # Thirty have asked, of which ten have an answer; the others have played a turn.
    others = (len(samples) - 29) / fmean(sample.turns for sample in samples)
    assert judge.busy_s == pytest.approx(40 / 10 * 30 / (30 + others) * observer.workload.finished)


def test_what_waits_for_its_environment_is_told_those_first_that_are_over() -> None:
    def active(group: int, stage: Stage, asked_at: float) -> ActiveTrajectory:
        trajectory = Trajectory(id=TrajectoryId(group, 0))
        trajectory.token_ids.extend(range(30))
        trajectory.generated, trajectory.turns = 12, 2
        return ActiveTrajectory(trajectory, stage, asked_at=asked_at, queued_at=7.0, prompt=10)

    stages = [Stage.GENERATING, Stage.ADVANCING, Stage.ADVANCING, Stage.TAUGHT, Stage.WAITING]
    playing = [
        active(*one) for one in zip(range(5), stages, (1.0, 3.0, 2.0, 4.0, 5.0), strict=True)
    ]
    uses = ModelUses()
    uses.saw([ModelUse("judge", 1, 1.0, 2.0, open=3, answered=4)])
    rollout = SimpleNamespace(active={one.trajectory.id: one for one in playing})
    parts = SimpleNamespace(rollout=rollout, ledger=SimpleNamespace(models=uses))
    told = asked_now(cast(RunParts, parts))
    assert [group for group, *_ in told.asking] == [3, 2, 1]
    assert told.asking[2, 0, 0] == Asking(TrajectorySample(10, 12, 8, turns=2), queued_at=7.0)
    assert told.uses == told.all_uses == (ModelUse("judge", 1, 1.0, 2.0, open=3, answered=4),)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_work_overlaps_and_steps_are_averaged_by_how_stale_a_batch_may_be(staleness: int) -> None:
    recipe = world.recipe(training={"groups_per_step": 8, "max_staleness": staleness}, **ROOM)
    observer = RunObserver(recipe)
    observer.saw(record_of_plan(0, START, 0.0, "start", None))
    for step in range(1, 12):
        observer.saw(sample_run.step_record(step, step * 10.0, started_at=step * 10.0 - 4))
    play(observer, 0, 2.0)
    observer.saw(ENDED)
    assert observer.workload is not None
    assert observer.workload.overlap == 1 + staleness
    assert len(observer.measured) == 2 * (1 + staleness)


@pytest.mark.parametrize(("groups", "kept"), [(100, 256), (150, 300)])
def test_the_work_to_come_is_that_of_two_steps_and_of_256_trajectories(
    groups: int, kept: int
) -> None:
    recipe = world.recipe(
        training={"groups_per_step": groups},
        rollout=ROOM["rollout"] | {"group_size": 1},
        model=ROOM["model"],
    )
    observer = RunObserver(recipe)
    for step in (1, 2):
        observer.saw(sample_run.step_record(step, step * 10.0))
    for group in range(310):
        observer.saw(replace(TURN, group_id=group))
        observer.saw(replace(ENDED, group_id=group, turns=1 if group < 300 else 5))
    assert observer.workload is not None
    turns = [sample.turns for sample in observer.workload.samples]
    assert turns == [1] * (kept - 10) + [5] * 10
    assert observer.signs["turns a trajectory"] == pytest.approx(1 + 4 * 10 / groups)


def test_what_a_plan_was_predicted_is_kept_with_what_came_and_a_version_with_its_bytes() -> None:
    observer = RunObserver(world.recipe())
    assert observer.evidence.version_bytes == 0
    decided = DecisionRecord(1.0, 1, "", None, "", 1.0, 1.0, sample_run.KEPT.to_json())
    observer.saw(decided)
    assert [*observer.predictions] == []
    observer.saw(replace(decided, observed_s=9.0))
    observer.saw(VersionRecord(1, 1, 0.0, 800))
    assert [(one.predicted_s, one.observed_s) for one in observer.predictions] == [(5.1, 9.0)]
    assert observer.evidence.version_bytes == 800


@pytest.mark.parametrize(
    ("turns", "turn_s", "before_s", "now_s", "factor", "stretch"),
    [
        (1, 1.0, 0.0, None, 1.0, 1.0),  # no tool was ever called
        (2, 0.0, 3.0, None, 1.0, 1.0),  # nor did a turn take any time
        (2, 1.0, 0.0, 5.0, 1.0, 1 + 5.0 / 2),  # tools took no time before
        (2, 1.0, 3.0, None, 1.0, 1 + 3.0),
    ],
)
def test_tools_are_as_they_were_where_nothing_is_known_to_compare(
    turns: int,
    turn_s: float,
    before_s: float,
    now_s: float | None,
    factor: float,
    stretch: float,
) -> None:
    observer = RunObserver(world.recipe(**ROOM))

    def play_turns(group: int, tool_s: float) -> None:
        for turn in range(turns):
            began = turn * (turn_s + tool_s)
            row = replace(TURN, group_id=group, turn=turn, queued_at=began)
            observer.saw(replace(row, ended_at=began + turn_s))

    play_turns(0, before_s)
    observer.saw(replace(ENDED, turns=turns))
    if now_s is not None:
        play_turns(1, now_s)
    assert tool_seconds(observer) == {(turns - 1) * before_s * factor}
    assert observer.signs[TOOLS] == pytest.approx(stretch)


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


def test_a_measured_step_has_its_seconds_and_who_was_in_play() -> None:
    observer = RunObserver(world.recipe(training={"max_staleness": 0}))
    observer.saw(record_of_plan(0, START, 0.0, "start", None))
    in_play = replace(ENDED, state="running", ended_at=None)
    for step in range(1, 4):
        began = 10.0 * (step - 1)
        for group in (0, 1):
            observer.saw(replace(in_play, group_id=group, started_at=began))
            play(observer, group, 0.0)
        for group, ended_at in ((0, 4.0), (1, 8.0)):
            observer.saw(replace(ENDED, group_id=group, ended_at=began + ended_at))
        row = sample_run.step_record(step, began + 10.0, started_at=began + 7.0)
        observer.saw(replace(row, waited_s=7.0, held_s=1.0, mean_length=20.0 + step))
    one = observer.measured[-1]
    assert (one.step_s, one.train_s, one.waited_s) == (10.0, 3.0, 7.0)
    assert one.in_play_s == 12.0
    assert one.concurrency == pytest.approx(20 / 12)
    assert one.played_tokens == 2 * 5 * 10
    assert observer.lengths == (21.0, 22.0, 23.0)


def test_the_first_step_that_is_measured_began_when_the_one_before_it_ended() -> None:
    observer = RunObserver(world.recipe(training={"max_staleness": 0}))
    observer.saw(record_of_plan(0, START, 0.0, "start", None))
    for step, ended_at, waited_s in ((1, 10.0, 8.0), (2, 25.0, 13.0)):
        row = sample_run.step_record(step, ended_at, started_at=ended_at - 2.0)
        observer.saw(replace(row, waited_s=waited_s))
    assert [step.step_s for step in observer.measured] == [15.0]
    observer.saw(record_of_plan(1, START, 25.0, "planner", None))
    assert [step.step_s for step in observer.measured] == []
    observer.saw(sample_run.step_record(3, 40.0, started_at=24.0))  # begun under the old plan
    observer.saw(replace(sample_run.step_record(4, 52.0, started_at=41.0), waited_s=1.0))
    assert [step.step_s for step in observer.measured] == [12.0]


def test_the_time_in_which_there_was_no_trainer_is_no_part_of_a_step() -> None:
    observer = measured_run(1, 4)
    row = sample_run.step_record(5, 300.0, started_at=296.0)
    observer.saw(replace(row, waited_s=6.0))  # it was started again at 290 s
    assert observer.measured[-1].step_s == 10.0
    late_s = OVERDUE * max(step.step_s for step in observer.measured)
    assert not observer.is_late(400.0, now=300.0 + late_s + 1.0)
    assert observer.is_late(400.0, now=400.0 + late_s + 1.0)


def test_a_link_is_as_fast_as_the_fastest_whole_version_that_came_over_it() -> None:
    observer = RunObserver(world.recipe())
    synced = SyncRecord("a/0", 1, 1, 1, 0.0, 9.0, 9.0, 2.0, 3.0, 800, 800, "full", 0.0, True, "")
    assert (observer.sync_s, observer.evidence.link_bandwidth) == (0.0, 0.0)
    observer.saw(synced)
    assert (observer.sync_s, observer.evidence.link_bandwidth) == (5.0, 400.0)
    told = (
        replace(synced, pull_s=4.0),  # slower
        replace(synced, pull_s=0.0),  # was there already
        replace(synced, pull_s=1.0, kind="delta"),
        replace(synced, pull_s=1.0, verified=False),
    )
    for one in told:
        observer.saw(one)
    assert (observer.sync_s, observer.evidence.link_bandwidth) == (4.0, 400.0)
    observer.saw(replace(synced, pull_s=0.5))
    assert observer.evidence.link_bandwidth == 1600.0


def test_what_a_server_has_cached_of_a_prompt_is_the_turn_before_if_it_played_that() -> None:
    observer = RunObserver(world.recipe())
    told = [("a/0", 100), ("a/0", 150), ("a/1", 190)]
    for turn, (slot, prompt) in enumerate(told):
        observer.saw(replace(TURN, turn=turn, slot=slot, prompt_tokens=prompt))
    assert [turn.fresh for turn in observer.evidence.turns] == [100, 150 - 110, 190]


def test_a_sample_has_what_was_prompted_generated_and_observed_and_all_time_in_tools() -> None:
    observer = RunObserver(world.recipe(**ROOM))
    observer.saw(replace(TURN, queued_at=0.0, ended_at=1.0))
    last = replace(TURN, turn=1, queued_at=4.0, ended_at=5.0)
    observer.saw(replace(last, tools_json='[["search", "ok", 2.0, 9]]'))
    observer.saw(replace(ENDED, turns=2, generated_tokens=20, context_tokens=150))
    assert tool_seconds(observer) == {3.0 + 2.0}
    play(observer, 1, 0.0)
    observer.saw(replace(ENDED, group_id=1, state="failed"))
    assert observer.workload is not None
    (sample,) = observer.workload.samples
    assert (sample.prompt, sample.generated, sample.observed) == (100, 20, 30)
    assert sample.turns == 2


@pytest.mark.parametrize(
    ("generated", "context", "told"),
    [
        (0, 100, None),
        (1, 102, (100, 1, 1)),
        (20, 110, (90, 20, 0)),  # what was prompted at first is no longer all there
        (20, 15, (0, 20, 0)),
    ],
)
def test_a_sample_has_a_generated_token_and_no_more_than_its_last_context(
    generated: int, context: int, told: tuple[int, int, int] | None
) -> None:
    observer = RunObserver(world.recipe(**ROOM))
    observer.saw(TURN)
    observer.saw(replace(ENDED, turns=1, generated_tokens=generated, context_tokens=context))
    samples = observer.workload.samples if observer.workload else ()
    assert [(one.prompt, one.generated, one.observed) for one in samples] == [told] * bool(told)


def test_seconds_of_compiling_layers_are_none_of_a_step() -> None:
    observer = RunObserver(world.recipe(training={"max_staleness": 0}, **ROOM))
    observer.saw(record_of_plan(0, START, 0.0, "start", None))
    for step in range(1, 5):
        row = sample_run.step_record(step, 60.0 * step, started_at=60.0 * step - 45.0)
        told = {"compile_s": 40.0} if step == 4 else {"loss": 0.5}
        observer.saw(replace(row, waited_s=15.0, metrics_json=json.dumps(told)))
    one = observer.measured[-1]
    assert (one.step_s, one.train_s) == (20.0, 5.0)
    assert [step.seconds for step in observer.evidence.steps][-2:] == [45.0, 5.0]


@pytest.mark.parametrize("generated", [0, 1])
def test_a_step_of_hardly_a_token_that_was_held_throughout_divides_by_nothing(
    generated: int,
) -> None:
    observer = RunObserver(world.recipe(training={"max_staleness": 1}, **ROOM))
    observer.saw(TURN)
    observer.saw(ENDED)
    row = sample_run.step_record(1, 10.0, started_at=8.0)
    row = replace(row, generated_tokens=generated, batch_json='{"filtered_tokens": 3}')
    observer.saw(row)
    assert [*observer.measured] == []
    observer.saw(replace(row, step=2, started_at=12.0, ended_at=14.0, held_s=4.0))
    assert 0 < observer.measured[0].step_s < 1e-6
    assert observer.workload is not None
    assert observer.workload.extras == BatchOverhead(filtered=6 / max(1, 2 * generated))


def test_starts_are_from_starting_to_work_and_moves_idle_while_neither_process_works() -> None:
    observer = RunObserver(world.recipe())
    states = [("b/0", "serving", 1.0), ("a/0", "starting", 2.0), ("a/0", "serving", 12.0)]
    for slot, state, since in states:
        observer.saw(sample_run.slot_record(slot, "rollout", state, since))
    observer.saw(sample_run.slot_record("a/0", "rollout", "serving", 90.0))
    for state in ("starting", "training"):  # at once, as where a simulation begins
        observer.saw(sample_run.slot_record("c/0", "train", state, 0.0))
    starts = observer.evidence.starts
    assert (starts.server_s, starts.trainer_s, starts.to_training_s) == (10.0, None, None)
    for after, phases in (
        (True, [["start", 0, 20], ["drain", 20, 25], ["stop", 25, 28]]),
        (False, [["drain", 0, 4], ["stop", 4, 5], ["start", 5, 9], ["join", 9, 99]]),
    ):
        observer.saw(moved("a/0", json.dumps(phases)))
        assert observer.evidence.starts.to_training_s == (3.0 if after else (3.0 + 9.0) / 2)
    observer.saw(replace(moved("a/0", "[]"), state="failed"))
    assert observer.evidence.starts.to_training_s == 6.0


def test_training_is_priced_by_steps_in_which_no_slot_moved() -> None:
    observer = RunObserver(world.recipe())
    observer.saw(record_of_plan(0, Plan((), ("a/0", "a/1")), 0.0, "start", None))
    observer.saw(sample_run.slot_record("a/0", "train", "training", 0.0, gpus_json="[0, 1]"))
    observer.saw(sample_run.slot_record("a/1", "train", "training", 0.0, gpus_json="[]"))
    assert observer.evidence.ranks == 3

    def step(number: int, began: float) -> None:
        row = sample_run.step_record(number, began + number, started_at=began)
        observer.saw(replace(row, context_tokens=100))

    step(1, 1.0)
    observer.saw(replace(moved("a/1", "[]"), state="drain", ended_at=None))
    step(2, 10.0)
    observer.saw(replace(moved("a/1", '[["stop", 0, 1]]'), ended_at=21.0))
    step(3, 20.0)  # begun before the slot was there
    step(4, 21.0)
    assert [one.seconds for one in observer.evidence.steps] == [1.0, 4.0]
    observer.saw(record_of_plan(1, Plan((), ("a/0",)), 30.0, "planner", None))
    step(5, 31.0)  # one step of the new plan is not enough to go by
    assert [one.seconds for one in observer.evidence.steps] == [1.0, 4.0]
    assert observer.evidence.ranks == 3
    step(6, 40.0)
    assert [one.seconds for one in observer.evidence.steps] == [5.0, 6.0]
    assert observer.evidence.ranks == 2


def test_a_step_has_the_pairs_of_the_groups_that_it_was_trained_with() -> None:
    observer = RunObserver(world.recipe(**ROOM))
    for group, context in ((0, 200), (0, 100), (1, 60)):
        play(observer, group, 1.0)
        observer.saw(replace(ENDED, group_id=group, context_tokens=context))
    row = GroupRecord(0, "ready", 0.0, 1.0, 0, 1, 0.5, "")
    observer.saw(row)
    for step in (1, 2):
        observer.saw(sample_run.step_record(step, 10.0 * step, started_at=0.5))
    observer.saw(replace(row, state="trained"))
    observer.saw(replace(row, group_id=2, state="trained", step=2))  # none of it has ended
    observer.saw(replace(row, group_id=1, state="dropped", step=2))
    assert [step.pairs for step in observer.evidence.steps] == [(200**2 + 100**2) / 2, 0.0]


def test_a_change_of_tools_counts_by_how_far_it_is_beyond_its_standard_error() -> None:
    observer = RunObserver(world.recipe(**ROOM))
    play(observer, 0, 2.0)
    observer.saw(replace(ENDED, group_id=0))
    for turn, queued_at in enumerate((0.0, 5.0)):  # four seconds of a tool
        observer.saw(
            replace(TURN, group_id=1, turn=turn, queued_at=queued_at, ended_at=queued_at + 1.0)
        )
    mean, then = (4 * 2.0 + 4.0) / 5, 2.0
    variance = (4 * (2.0 / mean - 1) ** 2 + (4.0 / mean - 1) ** 2) / 5
    error, change = variance * (1 / 5 + 1 / 4), log(mean / then)
    assert observer.workload is not None
    sample, _ = observer.workload.samples
    told = 8.0 * exp(change**3 / (change**2 + error))
    assert sample.tool_s == pytest.approx(told)
    assert 8.0 < told < 8.0 * mean / then


def test_a_run_that_goes_on_has_nothing_in_play_and_no_slot_on_its_way() -> None:
    observer = RunObserver(world.recipe(training={"max_staleness": 0}))
    observer.saw(record_of_plan(0, START, 0.0, "start", None))
    observer.saw(replace(ENDED, state="running", ended_at=None))
    observer.saw(TURN)
    observer.saw(replace(moved("a/1", "[]"), state="drain", ended_at=None))
    observer.saw(record_of_plan(1, START, 100.0, "start", None))
    observer.saw(replace(TURN, turn=1, prompt_tokens=150))
    assert observer.evidence.turns[-1].fresh == 150
    for step, began in ((1, 99.0), (2, 110.0), (3, 120.0)):
        observer.saw(sample_run.step_record(step, began + 5.0, started_at=began))
    assert [step.in_play_s for step in observer.measured] == [0.0, 0.0]
    assert [step.seconds for step in observer.evidence.steps] == [5.0, 5.0]
