"""On nodes without slots a run changes its split and shapes under way, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from libra_cli.app.costs import live_planner
from libra_cli.app.first_plan import first_plan
from libra_cli.app.rebalance.observation import observation_of_run
from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.planning.planner import roles_of
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.core.types import Plan, Trajectory, node_of
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.plugins.finding import find
from libra_cli.report.status.summary import summary
from libra_cli.runtime.store.reader import Reader
from libra_cli.sim.config import SimConfig
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import RecordedEpisode, Turn
from libra_cli.sim.world import World
from tests.sim_scene import run_into

PROFILE = load_profile("a800-qwen3-8b")
A800 = frozenset({"NVIDIA A800-SXM4-80GB"})
GROUPS, SIZE = 8, 8


def recipe_of(*sizes: int, lengths: dict[str, Any], steps: int) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"steps": steps},
            "nodes": [{"host": f"gpu-{n}", "gpus": size} for n, size in enumerate(sizes, 1)],
            "model": {"path": "/models/Qwen3-8B", "max_len": 16_384},
            "rollout": {"group_size": SIZE, "max_turns": 99, "max_turn_tokens": 16_000},
            "training": {"groups_per_step": GROUPS, "micro_batch_tokens": 16_384},
            "planner": {"lengths": lengths, "plan_interval": 3},
        }
    )


def episodes(
    switch_at: int, first: tuple[int, int], then: tuple[int, int]
) -> Iterator[tuple[RecordedEpisode, ...]]:
    """Groups of trajectories of three turns, of another prompt and length from one group on."""
    for number in count():
        prompt, generated = first if number < switch_at else then
        yield tuple(
            RecordedEpisode(
                f"task-{number}",
                prompt,
                tuple(Turn(generated // 3 + 20 * member, 50, "t", None, 1.0) for _ in range(3)),
                0.5,
            )
            for member in range(SIZE)
        )


def train_s(samples: tuple[a.TrainSample, ...], gpus: int) -> float:
    done = tuple(_sample(sample.trajectory) for sample in samples)
    return PROFILE.training.seconds(max(1, gpus), Workload(done, len(done)))


def _sample(trajectory: Trajectory) -> TrajectorySample:
    generated = max(1, trajectory.generated)
    return TrajectorySample(len(trajectory.token_ids) - trajectory.generated, generated)


def world_of(recipe: Recipe, groups: Iterator[tuple[RecordedEpisode, ...]]) -> World:
    plan, slots = first_plan(recipe, A800)
    scene = SimConfig(
        recipe=recipe,
        plan=plan,
        slots=slots,
        cost_of=lambda bucket: PROFILE.servers[bucket.tensor_parallel],
        guess_of=lambda bucket: PROFILE.servers[bucket.tensor_parallel],
        train_s=train_s,
        start_s=lambda bucket: PROFILE.moves.start(bucket.tensor_parallel),
        to_training_s=PROFILE.moves.to_training_s,
        resize_s=PROFILE.moves.resize_s,
    )
    world = World(scene, find(POLICIES, "libra")(), groups, planner=live_planner(recipe, A800))
    handle = world.machine.handle

    def checked(event: e.Event, *, now: float) -> list[a.Action]:
        actions = handle(event, now=now)
        world.machine.reconciler.check()
        world.machine.servers.check()
        return actions

    world.machine.handle = checked  # type: ignore[method-assign]
    return world


def split(plan: Plan) -> dict[int, int]:
    """Servers by their number of GPUs."""
    return dict(Counter(bucket.tensor_parallel for _, bucket in plan.servers))


def check_nothing_is_lost(world: World, steps: int) -> None:
    assert [row.step for row in world.recording.steps] == list(range(1, steps + 1))
    assert all(row.state == "done" for row in world.recording.moves.values())
    played = {(row.group_id, row.member) for row in world.recording.trajectories}
    assert len(played) >= steps * GROUPS * SIZE
    generated = sum(row.generated_tokens for row in world.recording.trajectories)
    assert generated >= sum(row.generated_tokens for row in world.recording.steps)


def test_a_run_changes_split_and_shapes_under_way_and_loses_nothing() -> None:
    """Told of short trajectories it meets long ones: other servers, other workers, one base."""
    recipe = recipe_of(4, 4, 4, lengths={"generated": 300, "turns": 3, "tool_s": 1.0}, steps=12)
    world = world_of(recipe, episodes(5 * GROUPS, (200, 300), (200, 9000)))
    first = world.scene.plan
    world.run()
    last = world.machine.plan
    assert split(last) != split(first)
    assert last.train == first.train
    assert world.recording.moves
    check_nothing_is_lost(world, 12)


def test_a_trainer_that_holds_too_much_is_made_smaller_by_a_restart() -> None:
    """Told of long prompts it meets long answers: the base group gives GPUs to servers."""
    recipe = recipe_of(8, lengths={"generated": 60, "prompt": 8000, "turns": 3}, steps=12)
    world = world_of(recipe, episodes(4 * GROUPS, (8000, 60), (300, 5000)))
    first = world.scene.plan
    world.run()
    last = world.machine.plan
    assert last.train != first.train
    assert node_of(last.train[0]) == node_of(first.train[0])
    assert sum(d * n for d, n in split(last).items()) > sum(d * n for d, n in split(first).items())
    assert world.machine.training.slots == last.train
    check_nothing_is_lost(world, 12)


def test_what_is_written_down_shows_a_dry_run_the_slots_of_the_plan(tmp_path: Path) -> None:
    recipe = recipe_of(4, 4, 4, lengths={"generated": 300, "turns": 3, "tool_s": 1.0}, steps=8)
    world = world_of(recipe, episodes(4 * GROUPS, (200, 300), (200, 300)))
    run_into(tmp_path, world)
    with Reader(tmp_path) as reader:
        seen = observation_of_run(reader, recipe, live=True)
        told = summary(reader, now=world.now)
    assert {slot.id for slot in seen.slots} == set(roles_of(world.machine.plan))
    assert seen.plan.servers == world.machine.plan.servers
    planner = live_planner(recipe, A800)
    assert planner.decide(seen).plan is None, "it has just decided on this one"
    assert told.run.state == "finished"
