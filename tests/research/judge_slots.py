"""Slots for a judge: what the planner gives it, beside the best numbers that stay.

    python -m tests.research.judge_slots --asks 1,2,4 --steps 48 --seeds 3

16 A800 of one slot each play a shipped trace in virtual time, and every trajectory ends by asking a
judge for so many seconds of one of its servers. Of each circumstance the same groups are played
under

    stays      the best of the static plans tried: so many slots that train, so many of the judge
    libra      libra's planner, which begins with one judge and a third of the other slots training
    kept       the plan that it begins with, which nothing changes

Printed are seconds a step, and the difference in throughput to the best static plan in per cent,
paired by seed, ± 95 %. Limit: one server answers one request at a time (``sim.models``).
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from libra_cli.app.costs import recipe_planner
from libra_cli.bench.results import interval
from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import initial_plan, plan_with, slots_of
from libra_cli.core.planning.planner import DecisionMaker
from libra_cli.core.records import PlanRecord
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.core.types import Plan, Seconds, SlotId
from libra_cli.plugins.finding import find
from libra_cli.sim.drift import NO_DRIFT
from libra_cli.sim.priced_scene import priced_scene, server_law
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.recording import Recording
from libra_cli.sim.traces import load_trace
from libra_cli.sim.world import World

PROFILE, TRACE = "a800-qwen3-14b", "tau2"
LONGEST = 20_000
TRAINING, JUDGES = (4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7)
"""Slots that train, and servers of the judge, of the static plans that are tried."""
FINALISTS = 4
"""Static plans, the best of the first seed, that all seeds play."""


def recipe(steps: int, bound: int, groups: int = 16) -> Recipe:
    """16 slots, of which one has a judge; 15 may do anything."""
    return Recipe.model_validate(
        {
            "run": {"steps": steps},
            "nodes": [
                {"host": "a", "gpus": 8, "slots": 8, "pool": [*["auto"] * 7, "models"]},
                {"host": "b", "gpus": 8, "slots": 8, "pool": "auto"},
            ],
            "model": {"path": "/simulated", "max_len": LONGEST},
            "environment": {"name": "m:E", "args": {"judge": {"served": "judge"}}},
            "models": [{"name": "judge", "path": "/judge", "max_slots": max(JUDGES)}],
            "rollout": {
                "group_size": 8,
                "max_turns": 1000,
                "max_turn_tokens": LONGEST - 1,
                "buckets": [{"max_num_seqs": 128}],
            },
            "training": {
                "groups_per_step": groups,
                "max_staleness": bound,
                "micro_batch_tokens": LONGEST,
            },
        }
    )


def static_plan(made: Recipe, training: int, judges: int) -> Plan:
    """The first slots train, the last ones are the judge's."""
    slots = slots_of(made)
    served: Mapping[SlotId, str] = {slot.id: "judge" for slot in slots[len(slots) - (judges - 1) :]}
    left = tuple(slot for slot in slots if slot.id not in served)
    train = frozenset(slot.id for slot in left[:training])
    return replace(plan_with(made, left, train, "static"), models=tuple(served.items()))


def world(
    made: Recipe, plan: Plan, asks: Seconds, seed: int, planner: DecisionMaker | None = None
) -> World:
    """A simulated run that begins with a plan, and keeps it without a ``planner``."""
    profile = load_profile(PROFILE)
    scene = priced_scene(profile, guess_of=lambda bucket: server_law(profile, bucket))(
        recipe=made, plan=plan, slots=slots_of(made), asks={"judge": asks}
    )
    trace = load_trace(TRACE)
    groups = NO_DRIFT.groups(
        trace, str(seed), size=8, number=made.run.steps * made.training.groups_per_step
    )
    policy = find(POLICIES, made.scheduler.policy)()
    cut = (tuple(one.cut(LONGEST) for one in group) for group in groups)
    return World(scene, policy, cut, planner=planner)


def static_run(made: Recipe, plan: Plan, asks: Seconds, seed: int) -> Recording:
    """Simulate a run that keeps its plan."""
    return world(made, plan, asks, seed).run()


def decided_run(made: Recipe, asks: Seconds, seed: int) -> Recording:
    """Simulate a run of libra's planner, which begins as the recipe says."""
    profile = load_profile(PROFILE)
    planner = recipe_planner(made, lambda plan, evidence: profile, elastic=True)
    return world(made, initial_plan(made), asks, seed, planner).run()


def step_s(tape: Recording) -> Seconds:
    return tape.ended_at / len(tape.steps)


def compared(asks: Seconds, steps: int, seeds: int, bound: int) -> dict[str, Any]:
    """All runs of one circumstance: seconds a step by plan and seed."""
    made = recipe(steps, bound)
    plans = {(t, j): static_plan(made, t, j) for t in TRAINING for j in JUDGES if t + j < 15}
    first = {key: step_s(static_run(made, plan, asks, 0)) for key, plan in plans.items()}
    stays = {
        key: [first[key], *(step_s(static_run(made, plans[key], asks, s)) for s in range(1, seeds))]
        for key in sorted(first, key=first.__getitem__)[:FINALISTS]
    }
    best = min(stays, key=lambda key: fmean(stays[key]))
    tapes = [decided_run(made, asks, seed) for seed in range(seeds)]
    begins = initial_plan(made)
    return {
        "best": f"{best[0]} that train and {best[1]} of the judge",
        "stays": stays[best],
        "libra": [step_s(tape) for tape in tapes],
        "kept": [step_s(static_run(made, begins, asks, seed)) for seed in range(seeds)],
        "moves": [len(tape.moves) for tape in tapes],
        "judges": [1 + len(max(tape.plans.values(), key=_number).models) for tape in tapes],
    }


def _number(plan: PlanRecord) -> int:
    return plan.plan


def main() -> None:
    """Print what the module says. Raises SystemExit for arguments that cannot be read."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--asks", default="1,2,4")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bound", type=int, default=1)
    given, write = parser.parse_args(), sys.stdout.write
    for asks in map(float, given.asks.split(",")):
        told = compared(asks, given.steps, given.seeds, given.bound)
        write(f"a judge of {asks:g} s a trajectory: of those that stay {told['best']} is best\n")
        for name in ("stays", "libra", "kept"):
            write(f"  {name:6} {fmean(told[name]):8.1f} s a step\n")
        for name in ("libra", "kept"):
            pairs = zip(told["stays"], told[name], strict=True)
            gains = [100 * (a / b - 1) for a, b in pairs]
            write(f"  {name} / stays {fmean(gains):+.1f} %, 95 % {interval(gains)}\n")
        write(f"  moves {told['moves']}, judges at the end {told['judges']}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
