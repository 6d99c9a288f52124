"""A curriculum: tasks that teach come more often, in an order that a run that goes on keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.records import GroupRecord
from libra_cli.core.run.state import Resume
from libra_cli.core.sampling.curriculum import Curriculum
from tests.world import Faults, World, recipe

FEWER = settings(max_examples=settings().max_examples // 10)


def played(curriculum, groups, reward_of):
    """The tasks of so many groups one after the other."""
    tasks = []
    for group in range(groups):
        task = curriculum.deal(group)
        curriculum.ended(group, [reward_of(task)])
        curriculum.forget(group)
        tasks.append(task)
    return tasks


def test_the_first_round_plays_every_task_once():
    assert played(Curriculum(5, 0.0, 1.0, 4), 5, lambda task: 1.0) == [0, 1, 2, 3, 4]


def test_a_task_that_is_too_easy_or_too_hard_is_played_in_every_fourth_round():
    success = [0.0, 0.5, 1.0, 0.25]
    tasks = played(Curriculum(4, 0.0, 1.0, 4), 4 + 2 * 3 + 4 + 2 * 3, success.__getitem__)
    assert tasks == [0, 1, 2, 3, *[1, 3] * 3, 0, 1, 2, 3, *[1, 3] * 3]


def test_the_bounds_are_excluded():
    tasks = played(Curriculum(3, 0.2, 0.8, 2), 6, [0.2, 0.8, 0.5].__getitem__)
    assert tasks == [0, 1, 2, 2, 0, 1]


def test_where_nothing_teaches_everything_is_played_in_turn():
    tasks = played(Curriculum(3, 0.0, 1.0, 4), 30, lambda task: 0.0)
    assert Counter(tasks) == {0: 10, 1: 10, 2: 10}


@given(
    success=st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=9),
    revisit=st.integers(2, 5),
)
def test_no_task_is_forgotten(success, revisit):
    pool = len(success)
    tasks = played(Curriculum(pool, 0.0, 1.0, revisit), pool * revisit * 3, success.__getitem__)
    rounds = Counter(tasks)
    assert set(rounds) == set(range(pool))
    if {0.3} < set(success):
        least = min(rounds[task] for task in range(pool) if success[task] == 0.3)
        assert all(rounds[task] <= least for task in range(pool) if success[task] != 0.3)


def test_success_is_the_mean_of_what_was_known_and_what_came():
    curriculum = Curriculum(1, 0.0, 1.0, 4)
    curriculum.deal(0)
    curriculum.ended(0, [1.0, 1.0])
    assert not curriculum.teaches(0)
    curriculum.deal(1)
    curriculum.ended(1, [0.0, 1.0])
    assert curriculum.success == {0: 0.75}
    assert curriculum.metrics() == {"tasks_played": 1, "tasks_in_band": 1}


def test_it_goes_on_from_its_position_as_if_nothing_had_been():
    first = Curriculum(7, 0.0, 1.0, 3)
    success = [0.0, 0.5, 1.0, 0.2, 0.0, 0.9, 1.0]
    played(first, 15, success.__getitem__)
    task = first.deal(99)
    second = Curriculum(7, 0.0, 1.0, 3)
    second.restore(first.position([99]))
    assert second.task_of == {99: task}
    assert played(second, 20, success.__getitem__) == played(first, 20, success.__getitem__)


class Tasked(World):
    """Even tasks are never solved. Knows the tasks that were begun, by group."""

    def __post_init__(self):
        super().__post_init__()
        self.tasks = {}

    def _do_start_episode(self, action):
        assert self.tasks.setdefault(action.trajectory.group, action.task) == action.task
        super()._do_start_episode(action)

    def later(self, event, *times, **more):
        if isinstance(event, e.EpisodeAdvanced) and event.done:
            even = self.tasks[event.trajectory.group] % 2 == 0
            event = replace(event, reward=float(not even and event.trajectory.member == 0))
        super().later(event, *times, **more)


def pooled(**rollout):
    return recipe(rollout={"curriculum": {"tasks": 4}, **rollout}, run={"steps": 12})


@FEWER
@given(seed=st.integers(0, 2**32), faults=st.sampled_from([{}, {"environment_breaks": 0.05}]))
def test_a_run_plays_the_tasks_that_teach_more_often(seed, faults):
    world = Tasked(Random(seed), Faults(**faults), recipe=pooled())
    world.run()
    assert world.end == a.End("finished", "")
    rounds = Counter(world.tasks.values())
    assert rounds[1] + rounds[3] > 2 * (rounds[0] + rounds[2])
    told = {row.group_id: row.task for row in world.rows(GroupRecord) if row.state == "trained"}
    assert told == {group: world.tasks[group] for group in told}
    assert world.steps[-1].batch["tasks_played"] == 4


@FEWER
@given(seed=st.integers(0, 2**32), sampling=st.booleans())
def test_a_group_that_is_played_again_after_a_resume_has_its_task(seed, sampling):
    first = Tasked(
        Random(seed),
        Faults(stop_asked=0.003, trainer_dies=0.002),
        recipe=pooled(dynamic_sampling=sampling),
    )
    first.run()
    if not first.ledgers:
        return
    path, position = list(first.ledgers.items())[-1]
    second = Tasked(
        Random(seed + 1),
        recipe=first.recipe,
        resume=Resume(path, position, records=first.records),
        ledgers={path: position},
    )
    second.run()
    again = [group for group in position["queue"] if group in second.tasks]
    assert [second.tasks[group] for group in again] == [first.tasks[group] for group in again]


def test_a_pool_of_tasks_that_an_environment_makes_must_be_given():
    with pytest.raises(ValidationError, match="'pointer-chase' makes its tasks without an end"):
        recipe(rollout={"curriculum": {}})


def test_bounds_with_nothing_between_them_are_refused():
    with pytest.raises(ValidationError, match="no task lies between them"):
        recipe(rollout={"curriculum": {"low": 0.5, "high": 0.4, "tasks": 9}})
