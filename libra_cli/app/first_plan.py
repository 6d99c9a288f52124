"""The plan that a run begins with: the planner's, wherever the recipe leaves a choice.

    prices   planner.profile; else the shipped ones of the model and the hosts' GPUs
    work     planner.trace; else planner.lengths; else a guess from the recipe's limits

Without prices it is the recipe's own split, ``cluster.placement``. Which GPUs the hosts have is
known once they are reached, and before that only what the recipe says. Every plan has the reasons
for it, and where its prices and its work come from.

Guarantee: the trainer's first rank is on the node that the recipe alone gives, so nothing that was
prepared on the hosts depends on prices. Limit: as good as these; the first steps correct it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from libra_cli.app.costs import recipe_planner, require_hosts, shipped_for, shipped_of
from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.expected import guessed_lengths, samples_around
from libra_cli.core.costs.profile import Profile
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.observation import Observation
from libra_cli.core.observed.step_work import limits_of, workload_of
from libra_cli.core.planning.planner import FirstPlan
from libra_cli.core.planning.recipe_placement import fixed_slots
from libra_cli.core.types import Plan, Pool, Slot
from libra_cli.core.workload import TrajectorySample
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import RecordedEpisode, load_trace

Placed: TypeAlias = tuple[Plan, tuple[Slot, ...]]
"""A plan, and the slots that it knows."""


@dataclass(frozen=True, slots=True)
class KnownPrices:
    """The prices of a recipe before it has run, or none; ``told`` says where they come from.

    ``asked_for``: the recipe names them, so a plan that they forbid is an error.
    """

    profile: Profile | None
    told: str
    asked_for: bool = False


def first_plan(recipe: Recipe, gpus: frozenset[str] | None = None) -> Placed:
    """Return the plan of ``explained_first_plan`` and its slots, without the reasons."""
    found = explained_first_plan(recipe, gpus)
    return found.plan, found.slots


def explained_first_plan(recipe: Recipe, gpus: frozenset[str] | None = None) -> FirstPlan:
    """What to begin with, and why; ``gpus`` are those of the hosts, once they are known.

    Raises:
        LibraError: the recipe names prices that are not for these GPUs, or with which nothing runs.
    """
    own, slots = initial_plan(recipe), slots_of(recipe)
    fixed = recipe.planner.kind == "fixed" and not recipe.has_open_nodes
    if fixed or not any(slot.pool is Pool.HYBRID for slot in slots):
        return FirstPlan(own, slots)
    prices = _prices(recipe, gpus)
    if prices.profile is None:
        return FirstPlan(replace(own, reasons=(prices.told, *own.reasons)), slots)
    samples, work = expected_work(recipe)
    try:
        found = _planned(recipe, own, slots, prices.profile, samples)
    except LibraError as error:
        if prices.asked_for:
            raise
        why = f"{prices.told}, but by them no plan runs ({error})"
        return FirstPlan(replace(own, reasons=(why, *own.reasons)), slots)
    plan = replace(found.plan, reasons=(prices.told, f"work: {work}", *found.plan.reasons))
    return replace(found, plan=plan)


def _planned(
    recipe: Recipe,
    own: Plan,
    slots: tuple[Slot, ...],
    profile: Profile,
    samples: tuple[TrajectorySample, ...],
) -> FirstPlan:
    """What the planner would have, from nothing."""
    planner = recipe_planner(recipe, lambda plan, evidence: profile, elastic=False)
    planner = replace(planner, begins=True)
    head = own.train[0]
    open_nodes = recipe.has_open_nodes
    seen = Observation(
        step=0,
        plan=own,
        slots=slots if open_nodes else fixed_slots(slots, {}, head),
        workload=workload_of(recipe, samples),
    )
    decision = planner.decide(seen)
    plan = decision.proposed
    if not open_nodes:
        train = (head, *(slot for slot in plan.train if slot != head))
        plan = replace(plan, train=train)
    explained = decision.explanation.of_first_plan() if decision.explanation else None
    shapes = explained.shapes if explained else ""
    reasons = (f"predicted: {decision.after}", *filter(None, [shapes]), *plan.reasons)
    known = decision.slots if open_nodes else slots
    return FirstPlan(replace(plan, reasons=reasons), known, explained)


# -- where the numbers come from -------------------------------------------------------------------


def _prices(recipe: Recipe, gpus: frozenset[str] | None) -> KnownPrices:
    named = recipe.planner.profile
    if named is not None:
        profile = load_profile(named)
        if gpus is not None:
            require_hosts(profile, gpus, recipe)
        return KnownPrices(profile, f"prices: {profile.name}, as planner.profile says", True)
    if gpus is None and any(node.gpus for node in recipe.nodes):
        fitting = ", ".join(shipped_of(recipe))
        known = f"; planner.profile can name them: {fitting}" if fitting else ""
        return KnownPrices(None, f"no prices before the hosts are asked for their GPUs{known}")
    shipped = shipped_for(recipe, gpus or frozenset())
    if shipped is None:
        where = ", ".join(sorted(gpus or ())) or "CPUs"
        return KnownPrices(None, f"no prices of this model on {where} but those the run will show")
    return KnownPrices(shipped, f"prices: {shipped.name}, shipped for this model and these GPUs")


def expected_work(recipe: Recipe) -> tuple[tuple[TrajectorySample, ...], str]:
    """Trajectories that stand for the run's, and where they come from.

    Raises:
        LibraError: the recipe names a trace that cannot be read.
    """
    spec = recipe.planner
    if spec.trace is not None:
        trace = load_trace(spec.trace)
        samples, _ = recorded_samples(trace.episodes, recipe.model.max_len)
        return samples, f"{len(samples):,} trajectories of {trace.name} (planner.trace)"
    lengths = spec.lengths or guessed_lengths(limits_of(recipe))
    origin = "planner.lengths" if spec.lengths else "a guess from the limits of rollout"
    told = f"about {lengths.generated:,.0f} generated tokens in {lengths.turns} turns"
    return samples_around(lengths), f"{told} ({origin})"


def recorded_samples(
    episodes: Sequence[RecordedEpisode], max_len: int
) -> tuple[tuple[TrajectorySample, ...], int]:
    """Recorded trajectories as the planner counts them, and how many were cut at ``max_len``."""
    shorter = sum(episode.context > max_len for episode in episodes)
    return tuple(episode.sample(max_len) for episode in episodes), shorter
