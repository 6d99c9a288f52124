"""Rewards and advantages by turn, from the environment to the trainer and the rows of a step."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from json import loads
from random import Random
from typing import Any

import pytest

from libra_cli.config.errors import PluginError
from libra_cli.config.training import TrainingSpec
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.advantages.estimates import advantage_metrics
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate
from libra_cli.core.records import CreditRecord
from libra_cli.core.rollout.groups import Group
from libra_cli.core.rollout.rows import credit_record
from libra_cli.core.rollout.staleness import hold
from libra_cli.core.types import LogRatios, Trajectory, TrajectoryId, TurnReward, VersionSpan
from tests.world import Faults, World, algorithm, recipe

BROKEN = Faults(server_dies=0.005, trainer_dies=0.02, environment_breaks=0.05, forked=0.2)


class Rewarding(World):
    """Every turn on the way earns a quarter, which is in the last reward; batches are kept."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.given: list[a.TrainSample] = []
        self.earned: Counter[TrajectoryId] = Counter()
        super().__init__(*given, **more)

    def later(self, event: Any, *times: float, **more: Any) -> None:
        if isinstance(event, e.EpisodeAdvanced) and not event.done:
            self.earned[event.trajectory] += 1
            event = replace(event, turn_reward=0.25)
        elif isinstance(event, e.EpisodeAdvanced):
            earned = 0.25 * self.earned[event.trajectory]
            event = replace(event, reward=(event.reward or 0.0) + earned)
        elif isinstance(event, e.StepDone):
            event = replace(event, log_ratios=told_of(self.given))
        super().later(event, *times, **more)

    def _check_batch(self, samples: Any) -> None:
        super()._check_batch(samples)
        self.given += samples


def told_of(samples: Sequence[a.TrainSample]) -> LogRatios:
    """Of every generated token a value that says whose it is."""
    branches, values = array("q"), array("H")
    for sample in samples:
        who, tokens = sample.trajectory.id, sample.tokens
        number = sample.trajectory.number if sample.branch is None else sample.branch
        count = sum(tokens.loss_mask)
        branches.extend([who.group, who.member, number, count])
        values.extend([(7 * who.group + who.member + 31 * number) % 999] * count)
    return LogRatios(branches, values)


def rewarding(seed: int, faults: Faults = BROKEN, **training: Any) -> Rewarding:
    given = recipe(training={"advantage": "turn", "scale_rewards": "none", **training})
    world = Rewarding(Random(seed), recipe=given, faults=faults)
    world.run()
    return world


@pytest.mark.parametrize("seed", range(3))
def test_rewards_by_turn_add_up_and_cover_every_generated_token(seed: int):
    world = rewarding(seed)
    assert world.given
    for sample in world.given:
        trajectory = sample.trajectory
        turns = trajectory.turn_rewards
        assert len(turns) == trajectory.turns
        assert sum(one.reward for one in turns) == pytest.approx(trajectory.reward)
        assert {one.reward for one in turns[:-1]} <= {0.25}
        branches = trajectory.branches
        for number, branch in enumerate(branches):
            mine = [one for one in turns if one.branch == number]
            spoken = {place for one in mine for place in range(one.start, one.end)}
            assert spoken == {place for place, mask in enumerate(branch.loss_mask) if mask}


@pytest.mark.parametrize("seed", range(3))
def test_a_step_writes_what_it_was_trained_with(seed: int):
    world = rewarding(seed)
    rows = {(row.group_id, row.member): row for row in world.rows(CreditRecord)}
    last = {(one.trajectory.id.group, one.trajectory.id.member): one for one in world.given}
    for who, sample in last.items():
        row, trajectory = rows[who], sample.trajectory
        numbers = [*sorted(trajectory.others), trajectory.number]
        mine = numbers.index(trajectory.number if sample.branch is None else sample.branch)
        assert loads(row.advantages_json)[mine] == [list(change) for change in sample.advantages]
        turns = [[numbers[n], *told] for n, *told in loads(row.turns_json)]
        wanted = [[t.branch, t.start, t.end, t.reward] for t in trajectory.turn_rewards]
        assert turns == wanted


@pytest.mark.parametrize("seed", range(3))
def test_a_step_writes_what_the_trainer_says_of_each_branch(seed: int):
    world = rewarding(seed)
    rows = {(row.group_id, row.member): row for row in world.rows(CreditRecord)}
    several = 0
    for who, row in rows.items():
        (trajectory,) = {
            id(s.trajectory): s.trajectory for s in world.given if of(s) == who
        }.values()
        numbers = [*sorted(trajectory.others), trajectory.number]
        assert len(row.log_ratios) == len(numbers)
        several += len(numbers) > 1
        for number, found in zip(numbers, row.log_ratios, strict=True):
            branch = trajectory.others.get(number, trajectory)
            mark = (7 * who[0] + who[1] + 31 * number) % 999
            assert array("H", found).tolist() == [mark] * sum(branch.loss_mask)
    assert several


def of(sample: a.TrainSample) -> tuple[int, int]:
    return sample.trajectory.id.group, sample.trajectory.id.member


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({(7, 1, 0): b"abcd"}, (b"abcd",)),
        ({(7, 1, 0): b"ab"}, ()),
        ({(7, 1, 1): b"abcd", (7, 0, 0): b"abcd"}, ()),
        ({}, ()),
    ],
)
def test_log_ratios_of_other_tokens_than_were_generated_are_not_kept(
    values: dict[tuple[int, int, int], bytes], kept: tuple[bytes, ...]
):
    trajectory = Trajectory(TrajectoryId(7, 1, 2), spans=[VersionSpan(3, 4, 6)])
    assert credit_record(trajectory, 5, {0: [(4, 1.0)]}, values).log_ratios == kept


def test_groups_of_a_batch_that_are_sent_alone_are_compared_with_the_whole_batch():
    whole = algorithm(advantage="reinforce++")
    groups = [grown(number, float(number)) for number in range(2)]
    found = whole.advantages(groups)
    assert sorted(values[0] for values in found.values()) == pytest.approx(
        [-0.97, -0.97, 0.97, 0.97], abs=0.01
    )
    alone = whole.advantages(groups[:1])
    assert set(alone.values()) == {(0.0,)}


def grown(number: int, reward: float, turns: int = 1) -> Group:
    members = [Trajectory(TrajectoryId(number, n)) for n in range(2)]
    for member in members:
        member.reward, member.turns, member.generated = reward, turns, 5
    return Group(number, members, started_at=0.0, started_version=0, rule=hold(1))


def too_few(groups: list[ComparedGroup], training: TrainingSpec) -> Estimate:
    return [[(0.0,)] for _ in groups]


def not_finite(groups: list[ComparedGroup], training: TrainingSpec) -> Estimate:
    return [[(float("nan"),) for _ in group.members] for group in groups]


def by_other_turns(groups: list[ComparedGroup], training: TrainingSpec) -> Estimate:
    return [[(0.0, 1.0, 2.0) for _ in group.members] for group in groups]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("too_few", "advantages for all members of all groups"),
        ("not_finite", r"returned \(nan,\) for trajectory 0.0.0"),
        ("by_other_turns", "3 advantages for trajectory 0.0.0 of 0 turns"),
    ],
)
def test_what_an_estimator_may_not_return_is_refused_by_its_name(name: str, reason: str):
    wrong = algorithm(advantage=f"{__name__}:{name}")
    with pytest.raises(PluginError, match=f"{name}' .*{reason}"):
        wrong.advantages([grown(0, 1.0)])


def test_the_deviation_of_advantages_by_turn_is_weighed_by_their_tokens():
    turns = [TurnReward(0, 10, 30), TurnReward(0, 40, 50)]
    by_turn = Trajectory(id=TrajectoryId(0, 0), turn_rewards=turns)
    whole = Trajectory(id=TrajectoryId(0, 1), generated=10)
    group = Group(0, [by_turn, whole], 0.0, 0, hold(1))
    told = advantage_metrics([group], {by_turn.id: (1.0, -1.0), whole.id: (-1.0,)})
    # Twenty tokens have 1, and twenty -1.
    assert told == {"advantage_std": 1.0, "share_without_signal": 0.0}
