"""What a step says of the environments that its trajectories were played in."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from libra_cli.core import events as e
from libra_cli.core.rollout.environment_metrics import environment_metrics
from libra_cli.core.types import Trajectory, TrajectoryId
from tests.world import World


def played(environment="", *, reward=0.0, turns=1, **metrics):
    return Trajectory(
        TrajectoryId(0, 0), environment=environment, reward=reward, turns=turns, metrics=metrics
    )


def test_an_environment_that_names_nothing_adds_nothing():
    assert environment_metrics([played(reward=1.0)]) == {}


def test_a_number_is_averaged_over_the_trajectories_that_have_it():
    members = [played(right=1.0, format=1.0), played(right=0.0), played()]
    assert environment_metrics(members) == {"env/right": 0.5, "env/format": 1.0}


def test_each_of_several_environments_has_its_reward_its_turns_and_its_share():
    members = [
        played("maths", reward=1.0, turns=2, right=1.0),
        played("maths", reward=0.0, turns=4, right=0.0),
        played("games", reward=0.5, turns=1),
    ]
    assert environment_metrics(members) == {
        "env/maths/reward": 0.5,
        "env/maths/turns": 3.0,
        "env/maths/share": 2 / 3,
        "env/maths/truncated": 0.0,
        "env/maths/frac_zero_std": 0.0,
        "env/maths/right": 0.5,
        "env/games/reward": 0.5,
        "env/games/turns": 1.0,
        "env/games/share": 1 / 3,
        "env/games/truncated": 0.0,
        "env/games/frac_zero_std": 1.0,
    }


class Mixed(World):
    """Even groups play one environment, odd ones another; both name what share is right."""

    def later(self, event, *times, **more):
        if isinstance(event, e.EpisodeStarted):
            event = replace(event, environment=("maths", "games")[event.trajectory.group % 2])
        elif isinstance(event, e.EpisodeAdvanced) and event.done:
            event = replace(event, metrics={"right": event.reward or 0.0})
        super().later(event, *times, **more)


@pytest.mark.parametrize("seed", range(3))
def test_the_steps_and_trajectories_of_a_run_tell_their_environments(seed):
    world = Mixed(Random(seed)).run()
    for step in world.steps:
        told = {name: value or 0.0 for name, value in step.metrics.items() if name[:4] == "env/"}
        played = [name for name in ("maths", "games") if f"env/{name}/share" in told]
        assert played
        assert sum(told[f"env/{name}/share"] for name in played) == pytest.approx(1.0)
        rewards = [told[f"env/{name}/share"] * told[f"env/{name}/reward"] for name in played]
        assert sum(rewards) == pytest.approx(step.reward)
        assert all(told[f"env/{n}/right"] == told[f"env/{n}/reward"] for n in played)
    finished = [row for row in world.trajectories if row.state == "finished"]
    assert finished
    assert all(row.environment == ("maths", "games")[row.group_id % 2] for row in finished)
    assert all(row.metrics == {"right": row.reward} for row in finished)
