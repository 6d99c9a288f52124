"""What there is to decide about: a recipe and a recorded workload, or a run as far as it has
come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from libra_cli.app.costs import costs_of_run, profile_of_recipe, recipe_planner
from libra_cli.app.rebalance.replay import gpu_names, observation_of_run
from libra_cli.config.recipe import Recipe
from libra_cli.core.cluster.placement import initial_plan, slots_of
from libra_cli.core.costs.profile import Profile
from libra_cli.core.costs.workload import TrajectorySample
from libra_cli.core.observation import Observation
from libra_cli.core.observer import workload_of
from libra_cli.core.planning.planner import Planner
from libra_cli.report.status.run_state import LIVE
from libra_cli.report.status.summary import summary
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import recipe_of
from libra_cli.sim.traces import RecordedEpisode, Trace, load_trace


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


def case_of_recipe(path: Path, trace: str, profile: str | None) -> Case:
    """A recipe and a recorded workload.

    Raises:
        LibraError: the recipe or the trace is wrong, or there are no prices for its hosts.
    """
    recipe = load_recipe(path)
    recorded = load_trace(trace)
    prices = profile_of_recipe(recipe, path, profile)
    samples, cut = _samples(recorded, recipe.model.max_len)
    notes = [f"{recorded.name} has no {lack}" for lack in recorded.lacks if lack == "tool times"]
    if cut:
        notes.append(
            f"{cut:,} of {len(samples):,} trajectories of the trace are longer than model.max_len "
            f"{recipe.model.max_len:,} and are cut there, as a run would"
        )
    notes.append("to begin with another plan, give each slot its side in the recipe: nodes[].pool")
    return Case(
        of="recipe",
        name=str(path),
        state="not started",
        recipe=recipe,
        observation=Observation(
            step=0,
            plan=initial_plan(recipe),
            slots=slots_of(recipe),
            workload=workload_of(recipe, samples),
        ),
        planner=recipe_planner(recipe, lambda plan, evidence: prices, elastic=False),
        profile=prices,
        source="given",
        told_from=f"{len(samples):,} trajectories of {recorded.name}",
        notes=tuple(notes),
    )


def _samples(trace: Trace, max_len: int) -> tuple[tuple[TrajectorySample, ...], int]:
    samples = [_sample(episode) for episode in trace.episodes]
    kept = [_cut(sample, max_len) for sample in samples]
    cut = sum(before is not after for before, after in zip(samples, kept, strict=True))
    return tuple(kept), cut


def _sample(episode: RecordedEpisode) -> TrajectorySample:
    return TrajectorySample(
        prompt=episode.prompt,
        generated=episode.generated,
        observed=episode.context - episode.prompt - episode.generated,
        turns=len(episode.turns),
        tool_s=sum(turn.tool_s for turn in episode.turns),
    )


def _cut(sample: TrajectorySample, max_len: int) -> TrajectorySample:
    """The same at most ``max_len`` tokens long, as if it grew evenly."""
    if sample.context <= max_len:
        return sample
    prompt = min(sample.prompt, max_len - 1)
    share = (max_len - prompt) / (sample.context - sample.prompt)
    generated = min(max(1, int(sample.generated * share)), max_len - prompt)
    return replace(
        sample,
        prompt=prompt,
        generated=generated,
        observed=max_len - prompt - generated,
        turns=max(1, round(sample.turns * share)),
        tool_s=sample.tool_s * share,
    )


# -- a run ---------------------------------------------------------------------------------------


def case_of_run(run_dir: Path, profile: str | None) -> Case:
    """A run, live or ended, as far as it has come.

    Raises:
        LibraError: there is no such run, it has not come far enough, or the profile is not its own.
    """
    with Reader(run_dir) as reader:
        recipe = recipe_of(run_dir)
        seen = summary(reader, now=time.time())["run"]
        live = seen["state"] in LIVE
        observation = observation_of_run(reader, recipe, live=live)
        choice = costs_of_run(recipe, gpu_names(reader, recipe), profile)
    prices = choice.source(observation.plan, observation.evidence)
    return Case(
        of="run",
        name=seen["id"],
        state=seen["state"],
        recipe=recipe,
        observation=observation,
        planner=recipe_planner(recipe, lambda plan, evidence: prices, elastic=live),
        profile=prices,
        source=choice.origin,
        told_from=f"the last {len(observation.workload.samples):,} that finished",
        notes=(*choice.notes, *_notes_of(recipe, observation, live=live)),
    )


def _notes_of(recipe: Recipe, observation: Observation, *, live: bool) -> Sequence[str]:
    notes = []
    if not observation.measured:
        notes.append("no step but the first has ended under this plan: nothing to compare with")
    if recipe.training.max_staleness == 0:
        notes.append(
            "training.max_staleness is 0, so the halves take turns: a step takes both together, "
            "and a plan is chosen as if they overlapped"
        )
    if not live:
        notes.append("the run has ended: payback counts as if it ran again from the start")
    return notes
