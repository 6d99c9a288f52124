"""A run directory that a simulation has written: every record of the machine, in virtual time.

Its servers and its trainer cost exactly what ``PROFILE`` says, so what a replay makes of the
database can be compared with what is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.profile import (
    Contention,
    MemoryModel,
    MoveCost,
    Profile,
    TrainingCost,
)
from libra_cli.core.costs.server import ServerCost, guessed_cost
from libra_cli.core.launch.placement import plan_with, slots_of
from libra_cli.core.records import Record, RunRecord, TrajectoryRecord
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.core.types import SlotId, ToolOutcome
from libra_cli.plugins.finding import find
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.run_directory import keep_recipe
from libra_cli.sim.priced_scene import priced_scene
from libra_cli.sim.recording import Recording
from libra_cli.sim.traces import RecordedEpisode, Turn
from libra_cli.sim.world import World

PROFILE = Profile(
    name="cpu-tiny",
    gpu="CPU",
    model="tiny",
    servers={
        1: ServerCost(
            tensor_parallel=1,
            step_s=0.002,
            sequence_s=3e-4,
            kv_token_s=1e-7,
            prefill_token_s=1e-5,
            prefill_pair_s=0.0,
            kv_tokens=100_000,
            request_s=1e-3,
        )
    },
    training=TrainingCost(
        token_s=9e-5,
        pair_s=1e-7,
        step_s=0.05,
        facts=MemoryModel(5e5, 3, 128, 268, 1536.0, 11.0),
        node_bandwidth=1e11,
        network_bandwidth=1e10,
    ),
    moves=MoveCost(10.0, 30.0, 10.0, {1: 30.0}),
    overhead_s=0.0,
    provenance={"measured": "made up"},
    surroundings=Contention(
        sync_s=0.06, stall_s=0.04, turn_s=0.001, serving_slowdown=1.4, training_slowdown=1.1
    ),
)


def recipe(
    steps: int = 6, *, pool: tuple[str, ...] = ("rollout", "train"), **training: Any
) -> Recipe:
    """A recipe of one host with a slot for each pool."""
    return Recipe.model_validate(
        {
            "run": {"steps": steps},
            "nodes": [{"host": "local", "slots": len(pool), "pool": list(pool)}],
            "model": {"path": "/m", "max_len": 512},
            "rollout": {
                "group_size": 4,
                "max_turns": 24,
                "max_turn_tokens": 16,
                "buckets": [{"name": "all", "max_num_seqs": 16}],
            },
            "training": {"groups_per_step": 4, "checkpoint_every": 100, **training},
        }
    )


def some_groups(seed: int = 3) -> Iterator[tuple[RecordedEpisode, ...]]:
    """Groups of four trajectories for ever, of one to eight turns."""
    random, group = Random(seed), 0
    while True:
        yield tuple(
            RecordedEpisode(
                str(group),
                25,
                tuple(
                    Turn(random.randint(1, 16), random.randint(1, 9), "get", ToolOutcome.OK, 1e-4)
                    for _ in range(random.randint(1, 8))
                ),
                float(random.random() < 0.5),
            )
            for _ in range(4)
        )
        group += 1


def drifting_groups(early: int, seed: int = 3) -> Iterator[tuple[RecordedEpisode, ...]]:
    """Groups for ever, the ``early`` first ones of long conversations, and then of long prompts."""
    random = Random(seed)
    for group in count():
        turns, prompt = (10, 25) if group < early else (2, 300)
        yield tuple(
            RecordedEpisode(
                str(group),
                prompt,
                tuple(
                    Turn(random.randint(8, 16), 4, "get", ToolOutcome.OK, 1e-4)
                    for _ in range(random.randint(turns - 1, turns + 1))
                ),
                float(random.random() < 0.5),
            )
            for _ in range(4)
        )


def write(
    run_dir: Path,
    of: Recipe,
    *,
    profile: Profile = PROFILE,
    train: tuple[SlotId, ...] = (),
    groups: Iterator[tuple[RecordedEpisode, ...]] | None = None,
) -> Path:
    """Simulate a run in which the slots of ``train`` train from start to end, and keep it."""
    slots = slots_of(of)
    plan = plan_with(of, slots, frozenset(train or (slots[-1].id,)), "as the test says")
    fixed = of.model_copy(update={"planner": of.planner.model_copy(update={"kind": "fixed"})})
    scene = priced_scene(profile, guess_of=guessed_cost)(recipe=fixed, plan=plan, slots=slots)
    world = World(scene, find(POLICIES, "libra")(), groups or some_groups())
    with Journal(run_dir) as journal:
        world.recording = _Kept(journal)
        world.run()
        ended = world.now
        row = RunRecord(
            "a-run", "a.yaml", "finished", 0.0, ended, of.run.steps, of.run.steps, 0, "", "", 1, 0.0
        )
        journal.save(row)
    keep_recipe(of, run_dir)
    return run_dir


class _Kept(Recording):
    """A recording whose records are written to a database too."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def keep(self, record: Record, now: float) -> None:
        super().keep(record, now)
        if isinstance(record, RunRecord):
            return
        if isinstance(record, TrajectoryRecord):
            record = replace(record, tokens=())  # which are only counted
        self._journal.save(record)
