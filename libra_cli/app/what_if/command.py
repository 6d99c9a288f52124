"""``libra bench run``: a run as it was measured, as it is simulated, and what would have been."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from pydantic import ValidationError

from libra_cli.app.costs import OWN_PRICES, recipe_planner, shipped_for, shipped_of
from libra_cli.app.idle_servers import PlannedRun
from libra_cli.app.what_if.certificate import or_reason, regret_of
from libra_cli.app.what_if.plans import sized, staying_plans, words_of
from libra_cli.app.what_if.reading import WhatIfError, known_of
from libra_cli.app.what_if.trials import SEEDS, Trials, with_seeds
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.profile import Profile
from libra_cli.core.records import RegretRecord
from libra_cli.core.types import Pool
from libra_cli.report.status.what_if import (
    FORMAT,
    CensoredPart,
    CorrectionsPart,
    FidelityPart,
    WhatIfResult,
    WhatIfRow,
)
from libra_cli.runtime.store.reader import Reader
from libra_cli.sim.rerun import Rerun, RunConditions, error_of, step_error_of

REWARD = "the reward is not predicted: it depends on what is learned, and here nothing is"


@dataclass(frozen=True, slots=True)
class Changes:
    """What is asked for, as typed; empty or None: as it was. ``staleness`` is that of a recipe."""

    gpus: int | None = None
    bound: int | None = None
    gpu: str = ""
    rule: str = ""
    staleness: str | Mapping[str, object] = ""
    planner: str = ""

    def each(self) -> Iterator[tuple[str, Changes]]:
        """Every change alone, with its name, and all of them together if there are several."""
        alone = {
            f"--gpus {self.gpus}": Changes(gpus=self.gpus),
            f"--bound {self.bound}": Changes(bound=self.bound),
            f"--gpu {self.gpu}": Changes(gpu=self.gpu),
            f"--rule {self.rule}": Changes(rule=self.rule, staleness=self.staleness),
            f"--planner {self.planner}": Changes(planner=self.planner),
        }
        asked = {name: one for name, one in alone.items() if one != Changes()}
        yield from asked.items()
        if len(asked) > 1:
            yield "all of these", self


def what_if(run_dir: Path, changes: Changes, progress: Callable[[str], None]) -> WhatIfResult:
    """Play a run again as it was, and with each of the changes.

    Raises:
        LibraError: it cannot be played again, or a change means nothing for it.
    """
    progress(f"reading {run_dir.name}")
    with Reader(run_dir) as reader:
        known = known_of(reader)
    trials = Trials(known)
    progress("correcting its prices")
    others = {name: changed(trials, one) for name, one in changes.each()}
    before = _told("as it was", trials.each_was(SEEDS), progress)
    rows = [_measured(trials), _row("simulated", trials.as_it_was, before)]
    for name, given in others.items():
        after = _told(name, trials.play_all(with_seeds(given, SEEDS)), progress)
        rows.append(_changed_row(trials, name, given, after))
    progress("plans that stay")
    regret, rivals = or_reason(lambda: regret_of(trials))
    for rival in rivals:
        given = replace(trials.as_it_was, plans=(rival.plan,))
        rows.append(_changed_row(trials, "a plan that stays", given, rival.played))
    return _result(trials, rows, regret)


def _told(name: str, played: Iterator[Rerun], progress: Callable[[str], None]) -> list[Rerun]:
    """Take in all simulations, with word of each."""
    found: list[Rerun] = []
    progress(f"{name}: {SEEDS} times")
    for one in played:
        found.append(one)
        progress(f"{name}: {len(found)} of {SEEDS}")
    return found


# -- what is changed -------------------------------------------------------------------------------


def changed(trials: Trials, asked: Changes) -> RunConditions:
    """The run's conditions with what is asked for.

    Raises:
        WhatIfError: it means nothing for this run.
        LibraError: no plan can run so.
    """
    known, given = trials.known, trials.as_it_was
    given = replace(given, recipe=_recipe(given, asked))
    if asked.gpu:
        given = replace(given, profile=_on_gpu(trials, asked.gpu))
    if asked.gpus or asked.gpu:
        samples = known.observation.workload.samples
        given = replace(given, plans=tuple(staying_plans(given, samples, 1)))
    if asked.planner == "fixed" or not _may_move(given):
        if asked.planner == "libra":
            raise WhatIfError(
                f"{known.run.name} has no slot that may change sides, so its planner moves none",
                hint="pool: hybrid in the recipe frees a slot",
            )
        return given.staying if asked.planner or len(given.plans) == 1 else given
    profile = given.profile
    source = (lambda plan, evidence: profile) if asked.gpu else known.source
    planner = recipe_planner(given.recipe, source, elastic=True)
    return replace(given.staying, planner=planner)


def _recipe(given: RunConditions, asked: Changes) -> Recipe:
    """The run's recipe with other keys."""
    told = given.recipe.model_dump(mode="json")
    told["planner"]["kind"] = asked.planner or told["planner"]["kind"]
    if asked.bound is not None:
        told["training"]["max_staleness"] = asked.bound
    if asked.staleness:
        told["training"]["staleness"] = asked.staleness
    try:
        return Recipe.model_validate(sized(told, asked.gpus) if asked.gpus else told)
    except ValidationError as error:
        raise WhatIfError(
            f"the run's recipe cannot have that: {error.errors()[0]['msg']}",
            hint="libra help staleness says what goes with what",
        ) from error


def _on_gpu(trials: Trials, gpu: str) -> Profile:
    """The shipped prices of the run's model on another GPU, with the run's own surroundings."""
    known = trials.known
    shipped = shipped_for(known.run.recipe, frozenset({gpu}))
    if shipped is None:
        names = ", ".join(shipped_of(known.run.recipe)) or "none for this model"
        raise WhatIfError(
            f"no prices of {known.profile.model} on {gpu} come with libra; there are: {names}",
            hint="libra bench --calibrate RECIPE measures them, on a host with that GPU",
        )
    priced = known.priced(replace(shipped, surroundings=known.profile.surroundings))
    return priced if known.origin == OWN_PRICES else priced.recalibrated(trials.correction)


def _may_move(given: RunConditions) -> bool:
    free = any(slot.pool is Pool.HYBRID for slot in given.plans[0].slots)
    recipe = given.recipe
    return free and recipe.planner.kind == "libra" and recipe.training.shares_steps


# -- what is told ----------------------------------------------------------------------------------


def _result(trials: Trials, rows: list[WhatIfRow], regret: RegretRecord) -> WhatIfResult:
    known, measured, before = trials.known, trials.measured, trials.was(0)
    cut = trials.groups.censored(known.run)
    return WhatIfResult(
        format=FORMAT,
        run=known.run.name,
        state=known.state,
        steps=len(measured.steps_s),
        seeds=SEEDS,
        prices=known.profile.name,
        corrections=CorrectionsPart(trials.correction.rollout, trials.correction.training),
        fidelity=FidelityPart(
            error_of(before.pace, measured), step_error_of(before.pace, measured)
        ),
        censored=CensoredPart(cut.number, cut.without_longer),
        rows=rows,
        regret=regret,
        notes=[REWARD, *known.notes, *_idle_servers(trials)],
    )


def _idle_servers(trials: Trials) -> tuple[str, ...]:
    """What servers would have earned on the trainer's GPUs, under the plan of the run's end."""
    seen, given = trials.known.observation, trials.as_it_was
    return PlannedRun(given.recipe, seen.plan, seen.slots).advice(given.profile, seen.workload)


def _measured(trials: Trials) -> WhatIfRow:
    pace = trials.measured
    return WhatIfRow(
        name="measured",
        plan=_plans_in_words(trials.as_it_was),
        step_s=pace.step_s,
        total_s=pace.total_s,
        tokens_per_s=pace.tokens_per_s,
        idle_rollout=trials.known.idle_rollout,
        idle_training=pace.idle_training,
        moves=trials.known.moves,
    )


def _row(name: str, given: RunConditions, played: Sequence[Rerun]) -> WhatIfRow:
    """The means over the seeds."""
    paces = [one.pace for one in played]
    return WhatIfRow(
        name=name,
        plan=_plans_in_words(given),
        step_s=fmean(pace.step_s for pace in paces),
        total_s=fmean(pace.total_s for pace in paces),
        tokens_per_s=fmean(pace.tokens_per_s for pace in paces),
        idle_rollout=fmean(one.idle_rollout for one in played),
        idle_training=fmean(pace.idle_training for pace in paces),
        moves=round(fmean(one.moves for one in played)),
    )


def _changed_row(
    trials: Trials, name: str, given: RunConditions, after: Sequence[Rerun]
) -> WhatIfRow:
    less = trials.saved(given, after)
    return replace(_row(name, given, after), change=-less.mean, change_ci=less.half)


def _plans_in_words(given: RunConditions) -> str:
    """The first plan, and what becomes of it."""
    first = words_of(given.plans[0].plan, given.plans[0].slots)
    if given.planner is not None:
        return f"{first} at first"
    return f"{first}, then {len(given.plans) - 1} others" if len(given.plans) > 1 else first
