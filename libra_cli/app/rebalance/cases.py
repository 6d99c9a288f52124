"""What there is to decide about: a recipe and a recorded workload, or a run as far as it has come.

Looked back at are as many steps as the planner of the simulator averages (``steps_to_average``),
and the trajectories that it takes for the work to come: a workload that drifts is soon another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from libra_cli.app.rebalance.prices import (
    plan_of_row,
    played_turns,
    profile_of_recipe,
    profile_of_run,
)
from libra_cli.bench.experiments import trace_path
from libra_cli.config.errors import StateError
from libra_cli.config.recipe import Recipe
from libra_cli.core.cluster.placement import initial_plan, slots_of
from libra_cli.core.costs.profile import Profile
from libra_cli.core.costs.workload import TrajectorySample, Workload
from libra_cli.core.planning.admission import Admission, horizon
from libra_cli.core.planning.recalibration import MeasuredStep, crowd
from libra_cli.core.planning.slot_placement import held
from libra_cli.core.planning.triggers import FILLING, steps_to_average
from libra_cli.core.records import StepRecord
from libra_cli.core.types import Plan, Role, Slot, SlotId
from libra_cli.report.status.run_state import LIVE
from libra_cli.report.status.summary import summary
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import recipe_of
from libra_cli.sim.traces import RecordedEpisode, Trace, load_trace

LEAST_SAMPLES = 256
"""Newest finished trajectories that stand for the work to come, where two steps have fewer."""


@dataclass(frozen=True, slots=True)
class Case:
    """What there is to decide about, from a run or from a recipe. ``live``: it can be moved."""

    of: str
    name: str
    state: str
    recipe: Recipe
    plan: Plan
    profile: Profile
    source: str
    workload: Workload
    told_from: str
    measured: tuple[MeasuredStep, ...]
    step: int | None
    admission: Admission
    notes: tuple[str, ...]
    live: bool = False
    pins: tuple[tuple[SlotId, Role], ...] = ()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """With what may not move fixed."""
        slots = slots_of(self.recipe)
        return held(slots, dict(self.pins), self.plan.train[0]) if self.live else slots


# -- a recipe, before anything has run -------------------------------------------------------------


def case_of_recipe(path: Path, trace: str, profile: str | None) -> Case:
    """A recipe and a recorded workload.

    Raises:
        LibraError: the recipe or the trace is wrong, or there are no prices for its hosts.
    """
    recipe = load_recipe(path)
    recorded = load_trace(trace_path(trace))
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
        plan=initial_plan(recipe),
        profile=prices,
        source="given",
        workload=_workload(recipe, samples),
        told_from=f"{len(samples):,} trajectories of {recorded.name}",
        measured=(),
        step=None,
        admission=Admission(),
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
        seen = summary(reader, now=time.time())
        samples = tuple(reader.played(max(LEAST_SAMPLES, 2 * recipe.trajectories_per_step)))
        if not samples:
            raise StateError(
                f"{run_dir}: no trajectory has finished yet, so its work is not known",
                hint="try again later, or: libra rebalance RECIPE.yaml --dry-run --trace FILE",
            )
        plan = _plan_of(reader, recipe)
        turns = played_turns(reader.recent_turns())
        prices, source, notes = profile_of_run(reader, recipe, plan, turns, profile)
        since = max((row.at for row in reader.plans()), default=0.0)
        steps = [
            step for step in reader.steps() if step.started_at >= since and step.step > FILLING
        ]
        lengths = [step.mean_length for step in reader.steps()]
        measured = tuple(_measured(reader, steps[-steps_to_average(_overlap(recipe)) :]))
    left = recipe.run.steps - seen["step"]
    live = seen["run"]["state"] in LIVE
    return Case(
        of="run",
        name=seen["run"]["id"],
        state=seen["run"]["state"],
        recipe=recipe,
        plan=plan,
        profile=prices,
        source=source,
        workload=_workload(recipe, samples),
        told_from=f"the last {len(samples):,} that finished",
        measured=measured,
        step=seen["step"],
        admission=Admission(horizon=horizon(lengths, left if live else recipe.run.steps)),
        notes=(*notes, *_notes_of(recipe, measured, live=live)),
        live=live,
    )


def _plan_of(reader: Reader, recipe: Recipe) -> Plan:
    plans = reader.plans()
    return plan_of_row(plans[-1]) if plans else initial_plan(recipe)


def _measured(reader: Reader, steps: Sequence[StepRecord]) -> Iterator[MeasuredStep]:
    began = steps[0].started_at - steps[0].waited_s if steps else 0.0
    for step in steps:
        in_play_s, beside = crowd(reader.in_play(began, step.ended_at), began, step.ended_at)
        yield MeasuredStep(
            step_s=step.ended_at - began,
            train_s=step.ended_at - step.started_at,
            waited_s=step.waited_s,
            in_play_s=in_play_s,
            beside=beside,
        )
        began = step.ended_at


def _notes_of(recipe: Recipe, measured: Sequence[MeasuredStep], *, live: bool) -> list[str]:
    notes = []
    if not measured:
        notes.append("no step but the first has ended under this plan: nothing to compare with")
    if recipe.training.max_staleness == 0:
        notes.append(
            "training.max_staleness is 0, so the halves take turns: a step takes both together, "
            "and a plan is chosen as if they overlapped"
        )
    if not live:
        notes.append("the run has ended: payback counts as if it ran again from the start")
    return notes


# -- both ----------------------------------------------------------------------------------------


def _workload(recipe: Recipe, samples: Sequence[TrajectorySample]) -> Workload:
    return Workload(tuple(samples), recipe.trajectories_per_step, _overlap(recipe))


def _overlap(recipe: Recipe) -> float:
    """Steps whose trajectories may be in flight together."""
    return 1.0 + recipe.training.max_staleness
