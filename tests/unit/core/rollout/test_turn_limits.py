"""How many tokens a turn may have, by the recipe and by the agent's wish."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.rollout.active import ActiveTrajectory, Limits
from libra_cli.core.types import Trajectory, TrajectoryId
from tests.elastic import Scene, scene


@pytest.mark.parametrize(
    ("wished", "context", "left"),
    [(None, 0, 16), (3, 0, 3), (99, 0, 16), (3, 98, 2), (None, 98, 2)],
)
def test_an_agent_may_shorten_a_turn_and_never_lengthen_it(
    wished: int | None, context: int, left: int
) -> None:
    trajectory = Trajectory(TrajectoryId(0, 0))
    trajectory.token_ids.extend(range(context))
    active = ActiveTrajectory(trajectory, turn_limit=wished)
    limits = Limits(max_turns=4, max_turn_tokens=16, max_len=100)
    assert active.left_to_generate(limits) == left


def test_the_machine_asks_a_server_for_as_much_as_the_agent_wished() -> None:
    world, held = scene(), list[e.EpisodeAdvanced]()

    def hold(event: e.Event) -> bool:
        """Hold back the first answer of an environment after which an episode goes on."""
        if held or not isinstance(event, e.EpisodeAdvanced) or event.done:
            return False
        held.append(event)
        return True

    world.silent = hold
    world.until(lambda: held)
    (answer,) = held
    asked = len(requests(world, answer.trajectory))
    world.give(replace(answer, turn_limit=1))
    world.until(lambda: len(requests(world, answer.trajectory)) > asked)
    assert requests(world, answer.trajectory)[-1].max_tokens == 1


def requests(world: Scene, trajectory: TrajectoryId) -> list[a.Generate]:
    return [one for one in world.did(a.Generate) if one.trajectory == trajectory]
