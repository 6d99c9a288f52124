"""A run is played again as it was; what did not finish goes on, and nothing is lost silently."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from libra_cli.app.what_if.reading import played_run
from libra_cli.core.launch.placement import plan_with, slots_of
from libra_cli.core.records import GroupRecord
from libra_cli.core.types import ToolOutcome
from libra_cli.runtime.store.reader import Reader
from libra_cli.sim.played_run import (
    NEAR_STEPS,
    AdoptedPlan,
    Censored,
    Pace,
    PlayedGroups,
    PlayedRun,
)
from libra_cli.sim.rerun import Rerun, RunConditions, error_of, rerun, step_error_of
from tests import simulated_run
from tests.simulated_run import PROFILE


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PlayedRun:
    recipe = simulated_run.recipe(8)
    run_dir = simulated_run.write(tmp_path_factory.mktemp("a-run"), recipe)
    with Reader(run_dir) as reader:
        return played_run(reader)


def again(run: PlayedRun, profile=PROFILE, **changes) -> Rerun:
    given = RunConditions(run.recipe, profile, run.plans, len(run.steps))
    return rerun(replace(given, **changes), PlayedGroups(run).played())


def test_a_run_is_played_again_as_it_was(run: PlayedRun) -> None:
    played, measured = again(run).pace, Pace.of(run.steps)
    assert len(played.steps_s) == 7
    assert error_of(played, measured) == pytest.approx(0, abs=0.02)
    assert step_error_of(played, measured) < 0.1
    assert played.train_mean_s == pytest.approx(measured.train_mean_s, rel=0.02)
    assert played.idle_training == pytest.approx(measured.idle_training, abs=0.03)


def test_prices_twice_as_high_are_told_by_a_positive_error(run: PlayedRun) -> None:
    measured = Pace.of(run.steps)
    assert error_of(again(run, PROFILE.scaled(2)).pace, measured) > 0.4
    assert error_of(again(run, PROFILE.scaled(0.5)).pace, measured) < -0.2


def test_times_of_the_run_are_not_looked_at(run: PlayedRun) -> None:
    turns = tuple(replace(row, started_at=1e6, ended_at=2e6, queued_at=5e5) for row in run.turns)
    assert again(replace(run, turns=turns)) == again(run)


def test_a_trajectory_is_that_of_the_journal(run: PlayedRun) -> None:
    first = next(PlayedGroups(run).played())[0]
    rows = [row for row in run.turns if (row.group_id, row.member) == (0, 0)]
    (told,) = [one for one in run.trajectories if (one.group_id, one.member) == (0, 0)]
    assert first.prompt == rows[0].prompt_tokens
    assert [turn.generated for turn in first.turns] == [row.generated_tokens for row in rows]
    assert first.context == told.context_tokens
    assert first.turns[0].tool_s == 0.0001
    assert first.turns[0].outcome is ToolOutcome.OK
    assert first.reward == told.reward


# -- what did not finish ---------------------------------------------------------------------------


def cut(run: PlayedRun, group: int, member: int, turns: int) -> PlayedRun:
    """The run, of which a trajectory was still under way after so many turns."""
    who = (group, member)
    return replace(
        run,
        trajectories=tuple(
            replace(one, state="running", ended_at=None)
            if (one.group_id, one.member) == who
            else one
            for one in run.trajectories
        ),
        turns=tuple(
            row for row in run.turns if (row.group_id, row.member) != who or row.turn < turns
        ),
    )


def test_a_trajectory_under_way_goes_on_like_one_that_was_longer(run: PlayedRun) -> None:
    whole = PlayedGroups(run)
    before = whole.groups[2][1]
    other = cut(run, 2, 1, 1)
    groups = PlayedGroups(other)
    now = groups.groups[2][1]
    assert now.turns[0].generated == before.turns[0].generated
    assert now.generated > before.turns[0].generated
    lengths = {one.generated for group in whole.groups for one in group}
    assert now.generated in lengths
    more = groups.censored(other).number - whole.censored(run).number
    assert (more, groups.finished) == (1, whole.finished - 1)


def test_the_longest_of_all_ends_where_it_was_and_is_counted(run: PlayedRun) -> None:
    longest = max(run.turns, key=lambda row: row.prompt_tokens)
    huge = tuple(
        replace(row, generated_tokens=400)
        if (row.group_id, row.member) == (longest.group_id, longest.member) and row.turn == 0
        else row
        for row in run.turns
    )
    other = cut(replace(run, turns=huge), longest.group_id, longest.member, 1)
    groups = PlayedGroups(other)
    assert groups.censored(other).without_longer == 1
    assert groups.groups[longest.group_id][longest.member].generated == 400


def test_a_run_of_which_all_has_finished_has_nothing_censored(run: PlayedRun) -> None:
    done = tuple(one for one in run.trajectories if one.state == "finished")
    whole = replace(run, trajectories=done)
    assert PlayedGroups(whole).censored(whole) == Censored(0, 0)


def test_groups_are_drawn_again_near_their_place(run: PlayedRun) -> None:
    groups = PlayedGroups(run)
    number = len(groups.groups)
    assert list(islice(groups.played(), number)) == groups.groups
    near = NEAR_STEPS * run.recipe.training.groups_per_step
    place = {id(group): at for at, group in enumerate(groups.groups)}
    drawn = list(islice(groups.played(1), number + 40))
    assert drawn == list(islice(groups.played(1), number + 40))
    assert drawn[:number] != groups.groups
    for at, group in enumerate(drawn):
        assert abs(min(at, number - 1) - place[id(group)]) <= near


# -- plans -----------------------------------------------------------------------------------------


def test_plans_are_adopted_after_the_steps_at_which_they_were(run: PlayedRun) -> None:
    recipe = simulated_run.recipe(8, pool=("rollout", "hybrid", "train"))
    slots = slots_of(recipe)
    one = plan_with(recipe, slots, frozenset({"local/2"}), "one trains")
    two = plan_with(
        recipe, slots, frozenset({"local/2"}), "two train", gradient=frozenset({"local/1"})
    )
    plans = (AdoptedPlan(0, one, slots), AdoptedPlan(3, two, slots))
    quick = replace(PROFILE, moves=replace(PROFILE.moves, to_training_s=0.01, to_rollout_s=0.01))
    assert again(run, quick, recipe=recipe, plans=plans).moves == 1
    assert again(run, quick, recipe=recipe, plans=plans[:1]).moves == 0


def test_ranks_that_share_cores_slow_one_another(run: PlayedRun) -> None:
    recipe = simulated_run.recipe(8, pool=("rollout", "train", "train"))
    slots = slots_of(recipe)
    two = AdoptedPlan(0, plan_with(recipe, slots, frozenset({"local/1", "local/2"}), "two"), slots)
    around = replace(PROFILE.surroundings, training_slowdown=1.0)
    alone = replace(PROFILE, surroundings=around)
    crowded = replace(PROFILE, surroundings=replace(around, rank_slowdown=0.5))
    fixed_s = PROFILE.training.step_s
    before = again(run, alone, recipe=recipe, plans=(two,)).pace.train_mean_s
    after = again(run, crowded, recipe=recipe, plans=(two,)).pace.train_mean_s
    assert after - fixed_s == pytest.approx(1.5 * (before - fixed_s), rel=0.15)
    assert again(run, crowded).pace == again(run, alone).pace


def test_every_third_step_of_a_run_is_all_of_it_thinner(tmp_path: Path) -> None:
    recipe = simulated_run.recipe(20)
    with Reader(simulated_run.write(tmp_path, recipe)) as reader:
        whole, third = played_run(reader), played_run(reader, every=3)
        trained = {row.group_id: row.step for row in reader.rows(GroupRecord)}
    assert {trained[row.group_id] for row in third.turns} == {2, 5, 8, 11, 14, 17, 20}
    assert third.played_steps == 7
    assert len(Pace.of(third.steps, every=3).steps_s) == 6
    assert 3 * len(third.turns) == pytest.approx(len(whole.turns), rel=0.15)


def test_a_step_in_which_a_run_was_interrupted_does_not_count(run: PlayedRun) -> None:
    at = run.steps[3].ended_at + 1e-6
    whole, rest = Pace.of(run.steps), Pace.of(run.steps, [at])
    assert len(rest.steps_s) == len(whole.steps_s) - 1
    assert rest.total_s == pytest.approx(whole.total_s - whole.steps_s[3])
