"""What there is to decide about: a recipe and its expected work, or a run as far as it has come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_cli.app.costs import costs_of_run, profile_of_recipe, recipe_planner
from libra_cli.app.first_plan import expected_work, first_plan, recorded_samples
from libra_cli.app.rebalance.observation import gpu_names, observation_of_run
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.profile import Profile
from libra_cli.core.observation import Observation
from libra_cli.core.observed.step_work import workload_of
from libra_cli.core.planning.planner import Planner
from libra_cli.core.run.observer import RunObserver
from libra_cli.core.workload import TrajectorySample
from libra_cli.report.status.run_state import LIVE
from libra_cli.report.status.summary import summary
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import recipe_of
from libra_cli.sim.traces import load_trace


@dataclass(frozen=True, slots=True)
class Case:
    """What there is to decide about, and who decides.

    ``of`` is ``run`` or ``recipe``. ``profile`` are the costs before they are recalibrated, and
    ``source`` says where they come from; ``told_from`` says whose trajectories stand for the work.
    """

    of: str
    name: str
    state: str
    recipe: Recipe
    observation: Observation
    planner: Planner
    profile: Profile
    source: str
    told_from: str
    notes: tuple[str, ...]


# -- a recipe, before anything has run -------------------------------------------------------------


def case_of_recipe(path: Path, trace: str | None, profile: str | None) -> Case:
    """A recipe, and a recorded workload or, without a trace, the work that the recipe expects.

    Raises:
        LibraError: the recipe or the trace is wrong, or there are no prices for its hosts.
    """
    recipe = load_recipe(path)
    prices = profile_of_recipe(recipe, path, profile)
    recorded = trace or recipe.planner.trace
    samples, told_from, notes = (
        _recorded(recorded, recipe.model.max_len) if recorded else (*expected_work(recipe), [])
    )
    if trace:
        notes.append("to begin with the plan for this trace, name it in the recipe: planner.trace")
    plan, slots = first_plan(recipe)
    return Case(
        of="recipe",
        name=str(path),
        state="not started",
        recipe=recipe,
        observation=Observation(
            step=0,
            plan=plan,
            slots=slots,
            workload=workload_of(recipe, samples),
            staleness=RunObserver(recipe).staleness,
        ),
        planner=recipe_planner(recipe, lambda plan, evidence: prices, elastic=False),
        profile=prices,
        source="given",
        told_from=told_from,
        notes=tuple(notes),
    )


def _recorded(name: str, max_len: int) -> tuple[tuple[TrajectorySample, ...], str, list[str]]:
    """Return the trajectories of a trace, whose they are, and what is to be known of them."""
    trace = load_trace(name)
    samples, cut = recorded_samples(trace.episodes, max_len)
    notes = [f"{trace.name} has no {lack}" for lack in trace.lacks if lack == "tool times"]
    if cut:
        notes.append(
            f"{cut:,} of {len(samples):,} trajectories of the trace are longer than model.max_len "
            f"{max_len:,} and are cut there, as a run would"
        )
    return samples, f"{len(samples):,} trajectories of {trace.name}", notes


# -- a run ---------------------------------------------------------------------------------------


def case_of_run(run_dir: Path, profile: str | None) -> Case:
    """A run, live or ended, as far as it has come.

    Raises:
        LibraError: there is no such run, it has not come far enough, or the profile is not its own.
    """
    with Reader(run_dir) as reader:
        recipe = recipe_of(run_dir)
        status = summary(reader, now=time.time())
        seen = status.run
        live = seen.state in LIVE
        observation = observation_of_run(reader, recipe, live=live)
        choice = costs_of_run(recipe, gpu_names(reader, recipe), profile)
    prices = choice.source(observation.plan, observation.evidence)
    notes = _notes_of(recipe, observation, live=live)
    return Case(
        of="run",
        name=seen.id,
        state=seen.state,
        recipe=recipe,
        observation=observation,
        planner=recipe_planner(recipe, lambda plan, evidence: prices, elastic=live),
        profile=prices,
        source=choice.origin,
        told_from=f"the last {len(observation.workload.samples):,} that finished",
        notes=(*filter(None, [status.playing.bottleneck]), *choice.notes, *notes),
    )


def _notes_of(recipe: Recipe, observation: Observation, *, live: bool) -> Sequence[str]:
    notes = []
    if not observation.measured:
        notes.append("no step but the first has ended under this plan: nothing to compare with")
    if recipe.training.max_staleness == 0:
        notes.append(
            "training.max_staleness is 0, so the halves take turns: a step takes both together"
        )
    if not live:
        notes.append("the run has ended: payback counts as if it ran again from the start")
    return notes
