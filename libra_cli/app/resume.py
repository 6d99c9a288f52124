"""``libra run --resume``: where a run that was stopped or killed goes on, and with what plan.

It goes on from its newest checkpoint that is whole on the hosts of its recipe, with the last plan
it had: its slots, joined or cut up as they were, each with its role. Where the plan cannot be had
again, as with other hosts, a plan is made anew as for a new run, and its first reason says why.
Which keys of the recipe may be others is said in ``config.on_resume``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from libra_cli.app.first_plan import explained_first_plan
from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import StateError, WrongRun
from libra_cli.config.frozen_models import FrozenModelSpec
from libra_cli.config.on_resume import RecipeChange, changes
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.planning.controller import plan_of_record
from libra_cli.core.planning.planner import FirstPlan
from libra_cli.core.records import PlanRecord, RunRecord
from libra_cli.envs.paths import by_name
from libra_cli.report.status.run_state import LIVE
from libra_cli.runtime.adoption.run_log import ReplayedRun, replay
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.new_run import LastCheckpoint
from libra_cli.runtime.store.controller_process import controller_alive
from libra_cli.runtime.store.event_log import EVENTS
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.replay import records_in_order, slots_of_plan
from libra_cli.runtime.store.run_directory import RECIPE, recipe_of
from libra_cli.runtime.tasks.digests import changed_tasks
from libra_cli.runtime.trainer.checkpoints import checkpoint_name

FirstPlanOf: TypeAlias = Callable[[frozenset[str] | None], FirstPlan]
"""What a run begins with on GPUs of these names; None: before its hosts are asked."""
GOES_ON = "goes on with plan"


def refuse_while_alive(run_dir: Path) -> None:
    """Two controllers of one run would be one too many.

    Raises:
        WrongRun: the run has one, or cannot be read.
    """
    with Reader(run_dir) as reader:
        if reader.run().state in LIVE and controller_alive(reader):
            raise WrongRun(
                f"{run_dir} is still running", hint=f"libra stop {run_dir}, then try again"
            )


def where_to_go_on(
    recipe: Recipe, run_dir: Path, secrets: RunSecrets, note: Callable[[str], None]
) -> LastCheckpoint | ReplayedRun:
    """Return the run where its controller was killed, if that can be told, or its last checkpoint.

    Raises:
        StateError: there is neither.
    """
    if (run_dir / EVENTS).exists():
        try:
            return replay(run_dir, recipe, secrets.token)
        except StateError as error:
            note(f"goes on from the last checkpoint, not where its controller was killed: {error}")
    return last_checkpoint(run_dir)


def last_checkpoint(run_dir: Path) -> LastCheckpoint:
    """Return what the run's own records say of its checkpoints.

    Raises:
        WrongRun: there can be none.
    """
    with Reader(run_dir) as reader:
        steps = reader.steps()
        incarnations = [version.trainer_incarnation for version in reader.versions()]
        records = records_in_order(reader)
    if not steps:
        raise WrongRun(
            f"{run_dir} has no checkpoint to go on from", hint="start it anew: libra run RECIPE"
        )
    saved = tuple(checkpoint_name(step.checkpoint) for step in steps if step.checkpoint)
    return LastCheckpoint(saved, max(incarnations, default=0), records)


def continued(
    first: RunRecord, recipe: Recipe, run_dir: Path
) -> tuple[RunRecord, tuple[RecipeChange, ...]]:
    """Return the row of a run that goes on, which keeps what the run has reached, and what is
    otherwise than it was and may be, also by a default of another libra.

    Raises:
        WrongRun: a key is another than it was that must not be, or the tasks are others.
    """
    before = recipe_of(run_dir)
    now = Recipe.model_validate_json(recipe.model_dump_json())  # secrets masked, as it was kept
    found = tuple(changes(_comparable(before), _comparable(now)))
    refused = [str(change) for change in found if change.why_not]
    # Where a key that says which tasks there are is another, their rows have nothing to say.
    refused = refused or changed_tasks(recipe, run_dir)
    if refused:
        seed = f" --seed {before.run.seed}" if before.run.seed != recipe.run.seed else ""
        raise WrongRun(
            "\n".join([f"{run_dir} cannot go on with this recipe:", *refused]),
            hint=f"as it was, it is in {run_dir / RECIPE}: libra run RECIPE --resume "
            f"{run_dir}{seed}; or begin a new run: libra run RECIPE",
        )
    with Reader(run_dir) as reader:
        row = reader.run()
    return replace(first, step=row.step, version=row.version, started_at=row.started_at), found


def _comparable(recipe: Recipe) -> Recipe:
    """Leave out what may be another in arguments of environments: the budgets of judges, as with a
    larger one a run that spent its own may go on, and where a directory lies."""

    def comparable(environment: EnvironmentSpec) -> EnvironmentSpec:
        args = by_name(environment.name, environment.args)
        if isinstance(judge := args.get("judge"), dict):
            args["judge"] = {key: value for key, value in judge.items() if key != "budget"}
        return environment.model_copy(update={"args": args})

    environments = tuple(comparable(environment) for environment in recipe.environment)
    return recipe.model_copy(update={"environment": environments})


def begin_with(recipe: Recipe, resume: Path | None) -> FirstPlanOf:
    """Return what makes the first plan of a run, or of one to ``resume`` in its directory.

    Raises:
        StateError: the run directory cannot be read.
    """
    if resume is not None:
        return plan_to_go_on_with(recipe, resume)
    return partial(explained_first_plan, recipe)


def plan_to_go_on_with(recipe: Recipe, run_dir: Path) -> FirstPlanOf:
    """What gives the first plan of a run that goes on.

    Raises:
        StateError: the run directory cannot be read.
    """
    with Reader(run_dir) as reader:
        rows = reader.plans()
        why = _why_anew(recipe_of(run_dir), recipe, rows)
        if why:
            return partial(_anew, recipe, why)
        try:
            kept = _kept(reader, recipe, rows[-1])
        except KeyError as slot:
            return partial(_anew, recipe, f"nothing tells what its slot {slot} was")
    return lambda gpus: kept


def _why_anew(before: Recipe, recipe: Recipe, plans: list[PlanRecord]) -> str:
    """Why the run's last plan is none for the recipe as it is now; empty if it is one."""
    if not plans:
        return "the run has none"
    said = {
        "nodes": (_shape(before.nodes), _shape(recipe.nodes)),
        "rollout.buckets": (before.rollout.buckets, recipe.rollout.buckets),
        "rollout.shapes": (before.rollout.shapes, recipe.rollout.shapes),
        "models": (_models(before.models), _models(recipe.models)),
        "training.backend": (before.training.backend, recipe.training.backend),
    }
    changed = [name for name, (then, now) in said.items() if then != now]
    return f"{' and '.join(changed)} changed since plan {plans[-1].plan}" if changed else ""


def _shape(nodes: Sequence[NodeSpec]) -> list[tuple[object, ...]]:
    """Return what a plan depends on of each host: its name, GPUs, slots, pool, and whether two
    slots share its GPU."""
    return [(node.name, node.gpus, node.slots, node.pool, node.share is None) for node in nodes]


def _models(models: Sequence[FrozenModelSpec]) -> list[tuple[str, int, int]]:
    """Return what a plan depends on of each frozen model."""
    return [(one.name, one.slots, one.most_slots) for one in models]


def _kept(reader: Reader, recipe: Recipe, row: PlanRecord) -> FirstPlan:
    plan = plan_of_record(row)
    reasons = (reason for reason in plan.reasons if not reason.startswith(GOES_ON))
    told = f"{GOES_ON} {row.plan}, the last before the run was resumed"
    return FirstPlan(replace(plan, reasons=(told, *reasons)), slots_of_plan(reader, recipe, plan))


def _anew(recipe: Recipe, why: str, gpus: frozenset[str] | None) -> FirstPlan:
    found = explained_first_plan(recipe, gpus)
    told = f"made anew, not the plan the run had before it was resumed: {why}"
    return replace(found, plan=replace(found.plan, reasons=(told, *found.plan.reasons)))
