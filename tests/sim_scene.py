"""A small simulated cluster for tests: three shapes of servers, a trainer, made-up trajectories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.evidence import Recalibration
from libra_cli.core.observation import Observation
from libra_cli.core.planning.planner import Decision, DecisionMaker
from libra_cli.core.planning.recalibration import RecalibratedSearch
from libra_cli.core.planning.search import Times
from libra_cli.core.scheduling.policy import SchedulingPolicy
from libra_cli.core.types import Bucket, Plan, Pool, Slot, ToolOutcome
from libra_cli.runtime.store.journal import Journal
from libra_cli.sim.config import SimConfig
from libra_cli.sim.traces import RecordedEpisode, Trace, Turn
from libra_cli.sim.world import World

BUCKETS = {
    1: Bucket("TP1", 1, 8, 400),
    2: Bucket("TP2", 2, 8, 1200),
    4: Bucket("TP4", 4, 8, 20_000),
}
COSTS = {
    degree: ServerCost(
        tensor_parallel=degree,
        step_s=0.02 / degree**0.7,
        sequence_s=5e-5 / degree**0.6,
        kv_token_s=1e-7 / degree,
        prefill_token_s=1e-4 / degree,
        prefill_pair_s=0.0,
        kv_tokens=12_000 * degree,
    )
    for degree in (1, 2, 4)
}


def made_up(seed: int, number: int = 60) -> Trace:
    """Trajectories of three tools; errors make them longer, and some tasks are long."""
    random = Random(seed)
    episodes = []
    for index in range(number):
        hard = random.random()
        turns = [
            _turn(random, hard) for _ in range(1 + int(random.expovariate(1 / (2 + 8 * hard))))
        ]
        prompt = random.randint(50, 400)
        episodes.append(RecordedEpisode(f"task-{index // 3}", prompt, tuple(turns[:30]), hard))
    return Trace("made-up", tuple(episodes))


def _turn(random: Random, hard: float) -> Turn:
    outcome = ToolOutcome.ERROR if random.random() < hard else ToolOutcome.OK
    generated = 1 + int(random.expovariate(1 / 60))
    tool = random.choice(("search", "edit", "run"))
    return Turn(generated, random.randint(0, 200), tool, outcome, random.uniform(0.0, 3.0))


def recipe(**training: Any) -> Recipe:
    """Four groups of four a step."""
    return Recipe.model_validate(
        {
            "run": {"steps": training.pop("steps", 3)},
            "nodes": [{"host": "simulated"}],
            "model": {"path": "/simulated", "max_len": 20_000},
            "rollout": {"group_size": 4, "max_turns": 1000, "max_turn_tokens": 19_999},
            "training": {
                "groups_per_step": 4,
                "max_staleness": 2,
                "micro_batch_tokens": 20_000,
                **training,
            },
            "planner": {"plan_interval": 1},
        }
    )


def scene(degrees: tuple[int, ...] = (1, 1, 2, 4), **training: Any) -> SimConfig:
    """One hybrid server of each of these degrees, and eight GPUs that train."""
    slots, servers, gpu = [], [], 0
    for degree in degrees:
        slot = Slot(f"node/{gpu}", "node", tuple(range(gpu, gpu + degree)), Pool.HYBRID)
        slots.append(slot)
        servers.append((slot.id, BUCKETS[degree]))
        gpu += degree
    slots.append(Slot("node/train", "node", tuple(range(gpu, gpu + 8)), Pool.TRAIN))
    return SimConfig(
        recipe=recipe(**training),
        plan=Plan(tuple(servers), ("node/train",)),
        slots=tuple(slots),
        cost_of=lambda bucket: COSTS[bucket.tensor_parallel],
        guess_of=lambda bucket: COSTS[bucket.tensor_parallel],
        train_s=lambda samples, gpus: 40.0 / gpus * len(samples) / 16,
        start_s=lambda bucket: 2.0,
        sync_s=0.5,
        to_training_s=1.0,
    )


@dataclass(frozen=True)
class Scripted:
    """A planner that wants one plan after one step, and is asked after every one."""

    plan: Plan
    slots: tuple[Slot, ...]
    after_step: int = 2

    def decide(self, now: Observation) -> Decision:
        times = Times(1.0, 1.0)
        search: Any = None
        found = RecalibratedSearch(None, times, Recalibration(), search, search)
        chosen = self.plan if now.step == self.after_step else None
        why_not = "" if chosen else "not yet"
        return Decision(
            chosen, self.plan, self.slots, (), times, times, 0.0, 1.0, (), why_not, found
        )


def world(
    policy: SchedulingPolicy,
    groups: Iterator[tuple[RecordedEpisode, ...]],
    *,
    here: SimConfig | None = None,
    planner: DecisionMaker | None = None,
) -> World:
    """A world in which the machine checks itself after every event."""
    made = World(here or scene(), policy, groups, planner=planner)
    handle = made.machine.handle

    def checked(event: e.Event, *, now: float) -> Any:
        actions = handle(event, now=now)
        made.machine.scheduler.check()
        made.machine.servers.check()
        return actions

    made.machine.handle = checked  # type: ignore[method-assign]
    return made


def run_into(run_dir: Path, world: World) -> None:
    """Run a simulated world whose records go into a database."""
    with Journal(run_dir) as journal:
        handle = world.machine.handle

        def kept(event: e.Event, *, now: float) -> list[a.Action]:
            actions = handle(event, now=now)
            for action in actions:
                if isinstance(action, a.Save):
                    journal.save(action.record)
            return actions

        world.machine.handle = kept  # type: ignore[method-assign]
        world.run()
