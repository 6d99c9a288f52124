"""The simulated outside: nothing lost, the same every time, plans that change."""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import get_args

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.reconcile.reconciler import GRACE_S
from libra_cli.core.records import StepRecord
from libra_cli.core.scheduling.policy import POLICIES, make_policy
from libra_cli.core.types import Plan, Pool, Slot, TrajectoryId
from libra_cli.sim.world import _PERFORM, World
from tests import sim_scene

TRACE = sim_scene.made_up(2)


def run(policy: str = "libra", seed: int = 0, **more: object) -> World:
    groups = TRACE.groups(Random(seed), 4)
    world = sim_scene.world(make_policy(policy), groups, **more)  # type: ignore[arg-type]
    world.run()
    return world


@pytest.mark.parametrize("policy", POLICIES.shipped)
def test_every_step_trains_a_full_batch_and_no_trajectory_twice(policy: str) -> None:
    world = run(policy)
    assert [step.step for step in world.tape.steps] == [1, 2, 3]
    ended = Counter((t.group_id, t.member, t.attempt) for t in world.tape.trajectories)
    assert max(ended.values()) == 1
    for row in world.tape.trajectories:
        who = TrajectoryId(row.group_id, row.member, row.attempt)
        assert row.generated_tokens == world.episode(who).generated


def test_the_same_seed_gives_the_same_run() -> None:
    first, second, other = run(seed=3), run(seed=3), run(seed=4)
    assert first.tape.turns == second.tape.turns
    assert first.tape.turns != other.tape.turns


def test_no_group_is_played_again_for_its_age() -> None:
    """Training waits for a group that a step is the last one for, and trajectories begin only
    where the newest version is: so nothing that is played is thrown away."""
    world = run(here=sim_scene.scene(steps=8, max_staleness=1))
    assert all(t.attempt == 0 for t in world.tape.trajectories)
    assert all(step.staleness_max <= 1 for step in world.tape.steps)


def test_servers_move_while_the_others_go_on() -> None:
    scene = sim_scene.scene(steps=6)
    (first, second, *rest), train = scene.plan.servers, scene.slots[-1]
    big = Slot("node/0x2", "node", (0, 1), Pool.ROLLOUT)
    plan = Plan(((big.id, sim_scene.BUCKETS[2]), *rest), scene.plan.train)
    kept = [slot for slot in scene.slots if slot.id not in (first[0], second[0])]

    def replan(world: World, step: StepRecord) -> e.PlanChosen | None:
        return e.PlanChosen(plan, (big, *kept)) if step.step == 2 else None

    world = run(here=scene, replan=replan)
    assert train in kept
    spans = world.spans()
    drained = [span for span in spans if span[1] == "draining"]
    assert {span[0] for span in drained} <= {first[0], second[0]}
    served = next(span for span in spans if span[0] == big.id and span[1] == "serving")
    gone = max(span[3] for span in spans if span[0] in (first[0], second[0]) and span[1] != "idle")
    assert served[2] >= gone + scene.start_s(sim_scene.BUCKETS[2])
    for slot, _ in rest:
        assert [span[1] for span in spans if span[0] == slot].count("serving") == 1
    assert all(t.attempt == 0 for t in world.tape.trajectories), "and nothing is lost"


def test_turns_longer_than_a_drain_go_on_elsewhere_with_what_they_had() -> None:
    quick = sim_scene.scene(steps=6)
    scene = replace(quick, cost_of=lambda bucket: replace(quick.cost_of(bucket), step_s=1.0))
    *rest, (leaving, _) = scene.plan.servers
    left = tuple(slot for slot in scene.slots if slot.id != leaving)
    plan = Plan(tuple(rest), scene.plan.train)

    def replan(world: World, step: StepRecord) -> e.PlanChosen | None:
        return e.PlanChosen(plan, left) if step.step == 2 else None

    world = run(here=scene, replan=replan)
    ((_, _, began, ended),) = [span for span in world.spans() if span[:2] == (leaving, "draining")]
    assert ended - began == pytest.approx(GRACE_S, rel=0.1), "and the abort takes a step"
    # One turn, begun on one server and ended on another.
    assert any(row.started_at < began and row.ended_at > ended for row in world.tape.turns)
    gone = [row for row in world.tape.turns if row.slot == leaving]
    assert max(row.ended_at for row in gone) <= ended
    for row in world.tape.trajectories:
        who = TrajectoryId(row.group_id, row.member, row.attempt)
        assert row.generated_tokens == world.episode(who).generated


def test_every_action_is_simulated_or_not_for_a_fixed_plan_of_servers() -> None:
    missing = set(get_args(a.Action)) - set(_PERFORM)
    workers = {a.StartWorker, a.SyncWorker, a.StopWorker}
    assert missing == workers | {a.Accumulate, a.Propose, a.AnswerOrder}


def test_more_training_gpus_make_a_step_shorter_and_they_join_late() -> None:
    scene = sim_scene.scene(steps=6)
    (first, *rest) = scene.plan.servers
    wide = Slot("train/0", "train", (0, *scene.slots[-1].gpus), Pool.TRAIN)
    slots = (*(slot for slot in scene.slots[:-1] if slot.id != first[0]), wide)
    plan = Plan(tuple(rest), scene.plan.train)

    def replan(world: World, step: StepRecord) -> e.PlanChosen | None:
        return e.PlanChosen(plan, slots) if step.step == 2 else None

    took = [end - start for start, end in run(here=scene, replan=replan).tape.trained]
    assert took[0] == pytest.approx(40 / 8)
    assert took[-1] == pytest.approx(40 / 9)
