"""Evaluations in a whole machine: when they begin, what they are of, and whom they leave alone."""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from libra_cli.core import events as e
from libra_cli.core.actions import AdvanceEpisode, Generate, StartEpisode
from libra_cli.core.evaluation import ledger
from libra_cli.core.evaluation.estimates import evaluation_metrics
from libra_cli.core.evaluation.groups import EvaluatedTask, evaluated_task
from libra_cli.core.evaluation.ledger import (
    ESTIMATES,
    MAX_FAILED,
    EvaluationLedger,
    EvaluationPlan,
)
from libra_cli.core.records import (
    EvaluationRecord,
    GroupRecord,
    NoteRecord,
    TrajectoryRecord,
    VersionRecord,
)
from libra_cli.core.rollout.groups import new_trajectory
from libra_cli.core.run.evaluating import STALLED_S
from libra_cli.core.run.state import Resume
from libra_cli.core.scheduling.request_scheduler import EVALUATION_SHARE
from libra_cli.core.types import TrajectoryId, WeightVersion, is_evaluation
from tests.world import Faults, World, recipe

EVALUATION: dict[str, Any] = {"num_tasks": 3, "samples": 2, "every": 2}


def played(evaluation: Any = None, seed: int = 0, **rest: Any) -> World:
    changes = rest.pop("changes", {})
    settings = recipe(evaluation=evaluation or EVALUATION, **changes)
    return World(Random(seed), recipe=settings, **rest).run()


def newest(world: World) -> list[EvaluationRecord]:
    rows = [row for row in world.records if isinstance(row, EvaluationRecord)]
    return list({row.evaluation: row for row in rows}.values())


def test_ids_tell_the_evaluation_and_the_task_and_fit_in_a_number_of_json() -> None:
    task = EvaluatedTask(evaluation=40_000, entry=255, task=999_999)
    assert evaluated_task(task.group) == task
    assert is_evaluation(task.group)
    assert task.group < 2**53
    assert not is_evaluation(10**9)


@pytest.mark.parametrize("seed", range(4))
def test_every_evaluation_of_a_run_finishes_with_all_its_trajectories(seed: int) -> None:
    world = played(seed=seed)
    rows = newest(world)
    assert [row.state for row in rows] == ["finished"] * len(rows)
    assert {row.finished for row in rows} == {6}
    assert rows[0].step == 0
    assert rows[-1].step == 5  # the last version, by at_end
    assert rows[-1].version_mean == 5.0


def test_nothing_evaluated_is_ever_trained_on_or_told_of_training() -> None:
    world = played(seed=1)
    assert not any(is_evaluation(group) for group, _ in world.trained)
    assert not any(is_evaluation(sample.trajectory.id.group) for sample in world.samples)
    groups = [row.group_id for row in world.records if isinstance(row, GroupRecord)]
    assert not any(map(is_evaluation, groups))


def test_the_planner_sees_the_same_run_with_and_without_evaluations() -> None:
    world = played(seed=2)
    evaluated = [
        row
        for row in world.records
        if isinstance(row, TrajectoryRecord) and is_evaluation(row.group_id)
    ]
    assert evaluated
    trained = played({**EVALUATION, "every": 0, "at_start": False, "at_end": False}, seed=2)
    for one in (world, trained):
        lengths = one.machine._watch._observer.workload
        finished = [
            row
            for row in one.records
            if isinstance(row, TrajectoryRecord)
            and row.state == "finished"
            and not is_evaluation(row.group_id)
        ]
        assert lengths is not None
        assert len(lengths.samples) == len(finished)


def test_a_run_ends_after_the_evaluation_of_its_last_version() -> None:
    world = played({"num_tasks": 4, "samples": 1, "every": 0, "at_start": False}, seed=3)
    (row,) = newest(world)
    assert (row.step, row.state, row.finished) == (5, "finished", 4)


def test_without_at_start_at_end_and_every_nothing_is_evaluated() -> None:
    assert newest(played({"every": 0, "at_start": False, "at_end": False})) == []


def test_two_evaluations_are_named_apart_and_both_played() -> None:
    world = played([EVALUATION, {"num_tasks": 2, "samples": 1, "every": 0}], seed=4)
    assert {row.name for row in newest(world)} == {"held-out", "held-out-2"}
    of_second = [row for row in newest(world) if row.name == "held-out-2"]
    assert [row.finished for row in of_second] == [2] * len(of_second)


@pytest.mark.parametrize("seed", range(6))
def test_evaluations_survive_servers_trainers_and_environments_that_break(seed: int) -> None:
    faults = Faults(
        server_dies=0.01, turn_fails=0.03, environment_breaks=0.05, trainer_dies=0.004,
        sync_fails=0.02, node_lost=0.005, written_later=0.3,
    )  # fmt: skip
    world = played(seed=seed, faults=faults)
    for row in newest(world):
        assert row.state in ("finished", "cut")
        if row.state == "finished":
            assert row.finished + row.failed == 6


def test_an_environment_that_always_breaks_fails_the_evaluation_and_not_the_run() -> None:
    class Broken(World):
        def _do_start_episode(self, action: StartEpisode) -> None:
            self.faults.environment_breaks = float(is_evaluation(action.trajectory.group))
            super()._do_start_episode(action)
            self.faults.environment_breaks = 0.0

    world = Broken(Random(6), recipe=recipe(evaluation=EVALUATION)).run()
    assert world.end is not None
    assert world.end.state == "finished"
    for row in newest(world):
        assert (row.state, row.finished, row.failed) == ("finished", 0, 6)
        assert row.metrics == {}


class NeverAnswers(World):
    """The environment of evaluations says nothing after their first turns."""

    def _do_advance_episode(self, action: AdvanceEpisode) -> None:
        if not is_evaluation(action.trajectory.group):
            super()._do_advance_episode(action)


def notes(world: World) -> list[NoteRecord]:
    return [row for row in world.records if isinstance(row, NoteRecord)]


def test_an_evaluation_that_stands_still_is_cut_and_holds_up_no_end() -> None:
    world = NeverAnswers(Random(7), recipe=recipe(evaluation=EVALUATION)).run()
    assert world.end is not None
    assert world.end.state == "finished"
    (row,) = newest(world)
    assert (row.step, row.state, row.finished) == (0, "cut", 0)
    (note,) = notes(world)
    assert (note.kind, note.subject) == ("evaluation", "held-out")
    assert f"no turn of it came back for {STALLED_S:.0f} s" in note.text
    dropped = [
        row.state
        for row in world.trajectories
        if is_evaluation(row.group_id) and row.state != "running"
    ]
    assert dropped == ["dropped"] * len(dropped)


def test_the_end_waits_for_evaluations_as_long_as_their_turns_come_back() -> None:
    class Slow(World):
        def _do_advance_episode(self, action: AdvanceEpisode) -> None:
            if not is_evaluation(action.trajectory.group):
                return super()._do_advance_episode(action)
            done = e.EpisodeAdvanced(action.trajectory, array("i"), (), done=True, reward=1.0)
            return self.later(done, 0.8 * STALLED_S, 0.9 * STALLED_S)

    once = {"num_tasks": 20, "samples": 2, "every": 0, "at_start": False}
    world = Slow(Random(7), recipe=recipe(evaluation=once)).run()
    (row,) = newest(world)
    assert (row.state, row.finished) == ("finished", 40)
    assert row.ended_at is not None
    assert row.ended_at - row.started_at > 2 * STALLED_S
    assert notes(world) == []


def test_an_evaluation_whose_environment_always_breaks_is_cut_before_all_was_tried() -> None:
    class Broken(World):
        def _do_start_episode(self, action: StartEpisode) -> None:
            self.faults.environment_breaks = float(is_evaluation(action.trajectory.group))
            super()._do_start_episode(action)
            self.faults.environment_breaks = 0.0

    many = {**EVALUATION, "num_tasks": 100}
    world = Broken(Random(6), recipe=recipe(evaluation=many)).run()
    assert world.end is not None
    assert world.end.state == "finished"
    first, *_ = newest(world)
    assert (first.state, first.finished, first.failed) == ("cut", 0, MAX_FAILED)
    assert any("trajectories failed in a row" in note.text for note in notes(world))


def test_a_run_whose_last_server_dies_at_the_last_evaluation_has_finished() -> None:
    class Dying(World):
        def _do_generate(self, action: Generate) -> None:
            super()._do_generate(action)
            if self.machine.scheduler.training_over:
                self.faults.start_fails = self.faults.server_dies = 1.0

    at_end = {"num_tasks": 8, "every": 0, "at_start": False}
    world = Dying(Random(5), recipe=recipe(evaluation=at_end)).run()
    assert world.end is not None
    assert (world.end.state, world.end.error) == ("finished", "")
    (row,) = newest(world)
    assert row.state == "cut"
    assert "no server is left" in notes(world)[-1].text


def test_a_run_that_is_stopped_cuts_its_evaluations() -> None:
    world = played(seed=8, faults=Faults(stop_asked=0.02))
    assert world.end is not None
    assert world.end.state == "stopped"
    assert not world.machine.parts.evaluations.running


def test_a_run_that_goes_on_numbers_on_and_repeats_nothing_that_is_finished() -> None:
    first = played(seed=9, changes={"run": {"steps": 4}})
    path, position = next(
        (path, ledger) for path, ledger in reversed(first.ledgers.items()) if ledger["step"] == 4
    )
    resume = Resume(path, position, 1, tuple(first.records))
    again = World(
        Random(9), recipe=recipe(evaluation=EVALUATION), resume=resume, ledgers=first.ledgers
    ).run()
    told = newest(again)
    assert told[0].evaluation > max(row.evaluation for row in newest(first))
    assert [row.step for row in told] == [5]


def test_evaluations_take_no_more_than_their_share_of_the_seats_while_there_is_training() -> None:
    inside: set[TrajectoryId] = set()
    most = 0

    class Counted(World):
        def _do_generate(self, action: Generate) -> None:
            nonlocal most
            super()._do_generate(action)
            seats = self.machine.scheduler
            inside.clear()
            inside.update(who for who in seats._inside if is_evaluation(who.group))
            if not seats.training_over:
                per_server = max(1, int(EVALUATION_SHARE * 3))
                most = max(most, len(inside))
                assert len(inside) <= per_server * len(seats.queues.all) + 4

    Counted(Random(10), recipe=recipe(evaluation={"num_tasks": 20, "every": 1})).run()
    assert 0 < most <= 4


def plan(**changes: Any) -> EvaluationPlan:
    base = EvaluationPlan("a", 1, 1, success=1.0, every=5, at_start=True, at_end=True)
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("step", "due"), [(0, 0), (4, 0), (5, 5), (9, 5), (10, 10), (17, 15), (18, 18)]
)
def test_due_is_the_newest_of_the_steps_that_are_passed(step: int, due: int) -> None:
    assert plan().newest_due(step, target=18) == due


def test_due_is_nothing_before_the_first() -> None:
    assert plan(at_start=False).newest_due(4, target=18) is None
    assert plan(every=0, at_end=False).newest_due(18, target=18) == 0


def test_checkpoints_are_told_which_steps_go_on_being_evaluated() -> None:
    settings = recipe(evaluation={"num_tasks": 40, "samples": 2, "every": 2})
    world = World(Random(3), recipe=settings).run()
    told = [ledger["evaluating"] for ledger in world.ledgers.values()]
    assert any(told), "none was in play when a checkpoint was written"
    assert all(len(steps) <= 1 for steps in told)
    assert world.machine.training.checkpoints.evaluating == frozenset()
    last = world.machine.training.checkpoints.evaluated
    assert last is not None
    assert last.keys() == {row.step for row in newest(world)}


def test_a_run_goes_on_without_the_evaluations_that_it_began_with() -> None:
    first = played(seed=9, changes={"run": {"steps": 4}})
    path, position = next(reversed(first.ledgers.items()))
    resume = Resume(path, position, 1, tuple(first.records))
    again = World(Random(9), recipe=recipe(), resume=resume, ledgers=first.ledgers).run()
    assert again.end is not None
    assert again.end.state == "finished"
    assert newest(again) == []


def killed(seed: int) -> tuple[World, Resume]:
    """A run whose controller is killed in an evaluation that follows a checkpoint and others."""
    world = World(Random(seed), recipe=recipe(evaluation=EVALUATION))
    for events in range(1, 5000):
        world.play(events)
        rows = newest(world)
        scored = any(row.score is not None for row in rows)
        if world.machine.training.checkpoints.step > 0 and scored and rows[-1].state == "running":
            break
    path = world.machine.training.checkpoints.path
    return world, Resume(path, world.ledgers[path], 1, tuple(world.records))


def test_what_a_killed_controller_evaluated_is_cut_when_the_run_goes_on() -> None:
    first, resume = killed(seed=11)
    running = [row for row in newest(first) if row.state == "running"]
    assert running
    settings = recipe(evaluation=EVALUATION)
    again = World(Random(11), recipe=settings, resume=resume, ledgers=first.ledgers).run()
    told = {row.evaluation: row for row in newest(again)}
    for row in running:
        assert (told[row.evaluation].state, told[row.evaluation].finished) == ("cut", row.finished)
    assert newest(again)[-1].state == "finished"


def test_a_run_goes_on_with_a_recipe_that_evaluates_nothing_any_more() -> None:
    first, resume = killed(seed=12)
    again = World(Random(12), recipe=recipe(), resume=resume, ledgers=first.ledgers).run()
    assert again.end is not None
    assert again.end.state == "finished"
    assert again.machine.training.checkpoints.evaluated is None


def test_weights_that_a_trainer_went_back_behind_are_evaluated_again_when_the_run_goes_on() -> None:
    first = played(seed=9, changes={"run": {"steps": 4}})
    path, position = next(
        (path, ledger) for path, ledger in reversed(first.ledgers.items()) if ledger["step"] == 4
    )
    assert newest(first)[-1].step == 4
    back = VersionRecord(version=2, trainer_incarnation=2, published_at=1.0, bytes=1)
    settings = recipe(evaluation=EVALUATION, run={"steps": 4})
    evaluated: list[list[int]] = []
    for told in ((), (back,)):
        resume = Resume(path, position, 2, (*first.records, *told))
        again = World(Random(9), recipe=settings, resume=resume, ledgers=first.ledgers).run()
        evaluated.append([row.step for row in newest(again)])
        assert sorted(again.machine.training.checkpoints.evaluated or ()) == [0, 2, 4]
    assert evaluated == [[], [4]]


def test_a_large_evaluation_is_estimated_now_and_then_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    estimated: list[int] = []
    estimate = evaluation_metrics

    def counted(tasks: Any, **rest: Any) -> dict[str, float]:
        estimated.append(sum(map(len, tasks)))
        return estimate(tasks, **rest)

    monkeypatch.setattr(ledger, "evaluation_metrics", counted)
    large = EvaluationLedger([plan(num_tasks=250, samples=4)], 1, new_trajectory)
    list(large.begin_due(WeightVersion(1, 0), target=9, now=0.0))
    rows = []
    while (trajectory := large.next_trajectory(0.0)) is not None:
        rows.append(large.finish(trajectory, float(trajectory.id.member == 0), now=1.0))
    assert len(estimated) <= ESTIMATES + 4
    assert estimated[-1] == 1000
    assert (rows[-1].state, rows[-1].finished, rows[-1].metrics["pass@1"]) == (
        "finished",
        1000,
        0.25,
    )
    assert rows[499].metrics["pass@1"] == pytest.approx(0.25, abs=0.01)


def begun(retries: int = 1, **changes: Any) -> EvaluationLedger:
    """One evaluation, whose trajectories are begun one by one."""
    made = EvaluationLedger([plan(**changes)], retries, new_trajectory)
    list(made.begin_due(WeightVersion(1, 0), target=9, now=0.0))
    return made


def test_a_broken_trajectory_is_played_again_as_often_as_the_recipe_says() -> None:
    made = begun(retries=2)
    one = made.next_trajectory(0.0)
    assert one is not None
    for attempt in (1, 2):
        one = made.begin_again(one.id, now=0.0, counts=True)
        assert one is not None
        assert one.id.attempt == attempt
    again = made.begin_again(one.id, now=0.0, counts=False)
    assert again is not None, "what was no fault of its own does not count"
    assert made.begin_again(again.id, now=0.0, counts=True) is None


def test_an_evaluation_is_hopeless_by_failures_since_one_came_to_its_end() -> None:
    made = begun(num_tasks=3 * MAX_FAILED)
    for number in range(2 * MAX_FAILED - 1):
        one = made.next_trajectory(0.0)
        assert one is not None
        if number == MAX_FAILED - 1:
            made.finish(one, 1.0, now=0.0)
        else:
            made.give_up(one.id, now=0.0)
        assert made.hopeless(one.id) is None
    last = made.next_trajectory(0.0)
    assert last is not None
    made.give_up(last.id, now=0.0)
    assert made.hopeless(last.id) is not None


def test_a_step_that_a_trainer_went_back_behind_is_evaluated_again() -> None:
    made = EvaluationLedger([plan(at_start=False)], 1, new_trajectory)

    def evaluated(incarnation: int, step: int) -> bool:
        rows = list(made.begin_due(WeightVersion(incarnation, step), target=99, now=0.0))
        while (one := made.next_trajectory(0.0)) is not None:
            made.finish(one, 1.0, now=0.0)
        return bool(rows)

    assert [evaluated(1, step) for step in (4, 5, 6)] == [False, True, False]
    assert [evaluated(2, step) for step in (3, 4, 5, 6)] == [False, False, True, False]
