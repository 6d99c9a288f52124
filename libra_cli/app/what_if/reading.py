"""What a simulation needs of a run directory: what was played, and what things cost."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from libra_cli.app.costs import OWN_PRICES, costs_of_run, recipe_planner
from libra_cli.app.rebalance.observation import gpu_names, observation_of_run
from libra_cli.app.what_if.hindsight import hindsight
from libra_cli.config.errors import InputError
from libra_cli.config.training import StalenessSpec
from libra_cli.core.costs.profile import Contention, Profile, shared_part
from libra_cli.core.observation import Observation
from libra_cli.core.planning.controller import plan_of_record
from libra_cli.core.planning.planner import CostSource
from libra_cli.core.records import (
    DecisionRecord,
    GroupRecord,
    PlanRecord,
    SlotRecord,
    StepRecord,
    SyncRecord,
    TurnRecord,
)
from libra_cli.core.types import Plan, Seconds, Slot
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.replay import slots_of_plan
from libra_cli.runtime.store.run_directory import recipe_of
from libra_cli.sim.played_run import AdoptedPlan, PlayedRun, chosen

LEAST_STEPS = 4
"""Steps of a run that say anything about the time of a step."""
LEAST_SHARE = 0.5
"""Share of the groups of the steps that must be there with their turns. Chosen."""


class WhatIfError(InputError):
    """A run that cannot be played again, or a change of it that means nothing."""


@dataclass(frozen=True, slots=True)
class Known:
    """A run as it is played again: what it played, its prices, and what its planner saw last.

    ``source`` is where its planner takes prices from, and ``origin`` says so; ``extremes`` are the
    prices between which the run cannot tell (``costs.hindsight``), none where they are given;
    ``idle_rollout`` and ``moves`` were measured.
    """

    run_dir: Path
    run: PlayedRun
    profile: Profile
    extremes: tuple[Profile, ...]
    source: CostSource
    origin: str
    observation: Observation
    state: str
    idle_rollout: float | None
    moves: int
    notes: tuple[str, ...]

    def priced(self, profile: Profile) -> Profile:
        """Return these prices as the recipe of the run trains."""
        planner = recipe_planner(self.run.recipe, lambda plan, evidence: profile, elastic=False)
        seen = self.observation
        found = planner.costs(seen.plan, seen.evidence)
        return replace(found, surroundings=profile.surroundings)


def known_of(reader: Reader, *, every: int = 1) -> Known:
    """Read a run, of whose steps every ``every``-th is to be played again.

    Raises:
        WhatIfError: it cannot be simulated, since its plans gave frozen models slots.
        LibraError: it cannot be played again; says why, and what can be done.
    """
    if any(row.models for row in reader.plans()):
        raise WhatIfError(
            "its plans gave frozen models slots, and what these are asked is not simulated there",
            hint="libra rebalance RUN_DIR --dry-run says what the planner would do now",
        )
    run, told = _at_one_bound(played_run(reader, every=every), reader)
    recipe = run.recipe
    observation = observation_of_run(reader, recipe, live=False)
    choice = costs_of_run(recipe, gpu_names(reader, recipe))
    profile = choice.source(observation.plan, observation.evidence)
    profile = replace(profile, surroundings=surroundings_of(run.turns, reader.syncs()))
    extremes: tuple[Profile, ...] = ()
    if choice.origin == OWN_PRICES:
        plans = [*(one.plan for one in run.plans), observation.plan]
        profile, *others = hindsight(
            reader, recipe.nodes, profile, plans, shared_part(recipe.training)
        )
        extremes = tuple(others)
    known = Known(
        run_dir=reader.run_dir,
        run=run,
        profile=profile,
        extremes=extremes,
        source=choice.source,
        origin=choice.origin,
        observation=observation,
        state=reader.run().state,
        idle_rollout=_idle_rollout(reader.slots()),
        moves=sum(move.state == "done" for move in reader.moves()),
        notes=(*choice.notes, *told),
    )
    return replace(
        known,
        profile=known.priced(known.profile),
        extremes=tuple(map(known.priced, known.extremes)),
    )


def usual_bound(
    first: int, decisions: Sequence[DecisionRecord], steps: Sequence[StepRecord]
) -> int:
    """Return the staleness bound that a run had at the ends of most of its steps, in versions.

    ``first`` is the one that it began with; ``decisions`` are in order.
    """
    chosen = [(row.at, row.bound) for row in decisions if row.bound is not None]
    times, bounds = [at for at, _ in chosen], [first, *(bound for _, bound in chosen)]
    found = Counter(bounds[bisect_left(times, step.ended_at)] for step in steps)
    return found.most_common(1)[0][0]


def _at_one_bound(run: PlayedRun, reader: Reader) -> tuple[PlayedRun, tuple[str, ...]]:
    """Return the run with its usual staleness bound, and a note on that, where it chose it."""
    training = run.recipe.training
    if not training.staleness.is_chosen:
        return run, ()
    decisions = reader.rows(DecisionRecord)
    bound = usual_bound(training.max_staleness, decisions, run.steps)
    update = {"max_staleness": bound, "staleness": StalenessSpec()}
    fixed = run.recipe.model_copy(update={"training": training.model_copy(update=update)})
    note = f"the run chose its staleness bound: it is played at {bound}, which most steps had"
    return replace(run, recipe=fixed), (note,)


def _idle_rollout(slots: Sequence[SlotRecord]) -> float | None:
    """The share of their time that servers had no request, by the slots' own seconds."""
    servers = [slot for slot in slots if not slot.is_frozen]
    serving_s = sum(slot.serving_s for slot in servers)
    return max(0.0, 1 - sum(slot.busy_s for slot in servers) / serving_s) if serving_s else None


def played_run(reader: Reader, *, every: int = 1) -> PlayedRun:
    """What a run played, by its database; the groups of each ``every``-th step alone.

    Raises:
        WhatIfError: too little of it, or nothing that was played.
    """
    name, again = reader.run_dir.name, f"libra status {reader.run_dir}"
    recipe, steps = recipe_of(reader.run_dir), reader.steps()
    if recipe.training.needs.offline:
        raise WhatIfError(f"{name} imitates conversations: nothing is played", hint=again)
    if len(steps) < LEAST_STEPS:
        raise WhatIfError(
            f"{name} has taken {len(steps)} steps, and a run is played again from {LEAST_STEPS} on",
            hint=again,
        )
    taken = chosen(steps, every)
    trajectories, played = reader.played_in(_groups(reader, taken) if every > 1 else None)
    groups, wanted = {row.group_id for row in played}, recipe.training.groups_per_step * len(taken)
    if len(groups) < LEAST_SHARE * wanted:
        raise WhatIfError(
            f"{name} has the turns of {len(groups)} groups, and its {len(taken)} steps trained "
            f"{wanted}: too few to play them again",
            hint="libra bench plan --trace FILE plays trajectories of a file",
        )
    plans = tuple(_plans(reader, lambda plan: slots_of_plan(reader, recipe, plan)))
    rows = tuple(steps), tuple(trajectories), tuple(played), plans
    return PlayedRun(name, recipe, *rows, _resumed(reader.plans()), every)


def _groups(reader: Reader, taken: Sequence[StepRecord]) -> list[int]:
    """The groups that these steps trained, and those without a step that began just before them."""
    steps = {step.step for step in taken}
    found, waiting = list[int](), list[int]()
    for row in reader.rows(GroupRecord):
        waiting.append(row.group_id)
        if row.step is not None:
            found += waiting if row.step in steps else []
            waiting.clear()
    return found


def _plans(reader: Reader, slots_of: Callable[[Plan], tuple[Slot, ...]]) -> list[AdoptedPlan]:
    """The plans of the run, the first of them in force from its beginning."""
    ended = [step.ended_at for step in reader.steps()]
    plans = []
    for row in reader.plans():
        plan, step = plan_of_record(row), sum(at <= row.at for at in ended)
        plans.append(AdoptedPlan(step, plan, slots_of(plan)))
    last = max((at for at, one in enumerate(plans) if one.after_step == 0), default=0)
    return plans[last:]


def _resumed(plans: Sequence[PlanRecord]) -> tuple[float, ...]:
    """When the run went on after it had stopped."""
    return tuple(row.at for row in plans[1:] if row.cause == "start")


def surroundings_of(turns: Sequence[TurnRecord], syncs: Sequence[SyncRecord]) -> Contention:
    """What a run shows of its delays beside engines and trainer; nothing where it shows none."""
    loaded = [row for row in syncs if row.verified and row.version > 0]
    return Contention(
        sync_s=_mean([max(0.0, row.verified_at - row.published_at) for row in loaded]),
        stall_s=_mean([row.load_s for row in loaded]),
        turn_s=_mean(list(_between(turns))),
    )


def _between(turns: Sequence[TurnRecord]) -> list[Seconds]:
    """Seconds from a turn's end until the next one is asked for, without those of tools."""
    found, before = [], None
    for row in turns:
        who = row.group_id, row.member, row.attempt
        if before is not None and who == (before.group_id, before.member, before.attempt):
            tools = sum(call.latency_s for call in before.tools)
            found.append(max(0.0, row.queued_at - before.ended_at - tools))
        before = row
    return found


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
