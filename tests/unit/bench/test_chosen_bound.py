"""``staleness: auto`` in a simulated run: the bound goes to where more is had for its time."""

from __future__ import annotations

from collections.abc import Mapping

from libra_cli.bench.jobs import Job, world_of
from libra_cli.core.token_worth import step_worth
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.world import World
from tests.sim_scene import made_up

PROFILE = load_profile("a800-qwen3-14b")
NAMELESS: Mapping[str, object] = {}


def played(bound: int, decay: float, *, staleness: str | Mapping[str, object] = NAMELESS) -> World:
    """Twenty steps on 16 GPUs, of which libra's planner decides."""
    made = Job(
        *(made_up(1), PROFILE, PROFILE, 16, "libra", "libra", 0),
        steps=20,
        groups_per_step=8,
        bound=bound,
        staleness=staleness,
        decay=decay,
    )
    world = world_of(made)
    world.run()
    return world


def taught_a_second(world: World) -> float:
    """Tokens of age 0 that those of all steps are worth, a second."""
    told = [step_worth(step.metrics) for step in world.recording.steps]
    worth = sum(one.tokens * one.worth for step in told if step for one in step.ages)
    return worth / world.recording.ended_at


def test_a_bound_of_0_that_makes_the_halves_take_turns_rises() -> None:
    chosen = played(0, 0.01, staleness="auto")
    assert chosen.machine.ledger.rule.bound > 0
    assert taught_a_second(chosen) > 1.1 * taught_a_second(played(0, 0.01))


def test_a_bound_whose_tokens_are_worth_nothing_falls_and_another_stays() -> None:
    chosen = played(4, 0.8, staleness="auto")
    assert chosen.machine.ledger.rule.bound < 4
    assert taught_a_second(chosen) > 1.1 * taught_a_second(played(4, 0.8))
    assert played(4, 0.8).machine.ledger.rule.bound == 4
