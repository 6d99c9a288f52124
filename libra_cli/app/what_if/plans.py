"""The plans that a run could have had: one that stays for each split of its slots, or of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from libra_cli.app.costs import recipe_planner
from libra_cli.config.frozen_models import POOL
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.observation import Observation
from libra_cli.core.observed.step_work import workload_of
from libra_cli.core.planning.planner import Candidate
from libra_cli.core.planning.search import Search
from libra_cli.core.types import Plan, Slot
from libra_cli.core.workload import TrajectorySample
from libra_cli.sim.played_run import AdoptedPlan
from libra_cli.sim.rerun import RunConditions


def staying_plans(
    given: RunConditions, samples: Sequence[TrajectorySample], most: int
) -> list[AdoptedPlan]:
    """The plans that the recipe allows from the first step on, of which no two are alike; of more
    than ``most`` those that the prices say are best, for work like these trajectories.

    Raises:
        NothingFits: none can run.
    """
    found: dict[object, Candidate] = {}
    for one in _candidates(given, samples):
        alike = tuple(one.layout.servers.items()), one.layout.training_gpus
        if one.times.step_s < float("inf"):
            found.setdefault(alike, one)
    best = sorted(found.values(), key=lambda one: one.times.step_s)[:most]
    return [AdoptedPlan(0, *one.place()) for one in best]


def _candidates(given: RunConditions, samples: Sequence[TrajectorySample]) -> Iterator[Candidate]:
    recipe, profile = given.recipe, given.profile
    planner = recipe_planner(recipe, lambda plan, evidence: profile, elastic=False)
    now = Observation(
        step=0,
        plan=initial_plan(recipe),
        slots=slots_of(recipe),
        workload=workload_of(recipe, tuple(samples)),
    )
    search = Search(profile, now.workload, planner.space.gpus, planner.settings)
    yield from planner.space.candidates(search, now)


def words_of(plan: Plan, slots: Sequence[Slot]) -> str:
    """How many slots of a recipe do what, or GPUs: ``rollout=2, train=1``."""
    sizes = {slot.id: slot for slot in slots}

    def number(names: Sequence[str]) -> int:
        return sum(sizes[name].num_devices if sizes[name].gpus else 1 for name in names)

    shapes = Counter(bucket.tensor_parallel for _, bucket in plan.servers)
    large = ", ".join(f"{many} x TP {degree}" for degree, many in shapes.items())
    parts = [f"rollout={number(list(dict(plan.servers)))}"]
    if set(shapes) != {1}:
        parts[0] += f" ({large})"
    parts.append(f"train={number(plan.train)}")
    if plan.gradient:
        parts.append(f"gradient={number(plan.gradient)}")
    return ", ".join(parts)


def sized(recipe: dict[str, Any], gpus: int) -> dict[str, Any]:
    """The recipe, as it is written, on so many GPUs, in nodes as large as its largest; without any,
    on so many slots of one host. All of them are the planner's to divide: what serves frozen models
    is beside them."""
    largest = max(node["gpus"] for node in recipe["nodes"])
    frozen = sum(model["slots"] for model in recipe["models"])
    pools = [*["auto"] * gpus, *[POOL] * frozen]
    nodes: list[dict[str, Any]] = [{"host": "local", "slots": len(pools), "pool": pools}]
    if largest:
        sizes = [min(largest, gpus - at) for at in range(0, gpus, largest)]
        nodes = [{"host": f"node-{at}", "gpus": size} for at, size in enumerate(sizes)]
    if largest and frozen:
        nodes.append({"host": POOL, "gpus": frozen, "slots": frozen, "pool": POOL})
    buckets = recipe["rollout"]["buckets"]
    free = buckets and [{**bucket, "slots": None} for bucket in buckets]
    return recipe | {"nodes": nodes, "rollout": recipe["rollout"] | {"buckets": free}}


def in_force(plans: Sequence[AdoptedPlan]) -> AdoptedPlan:
    """The first of the plans, from the beginning on."""
    return replace(plans[0], after_step=0)
