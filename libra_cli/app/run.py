"""``libra run``: a recipe from its first host to its report, and one that was stopped again."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from libra_cli.app.costs import live_planner
from libra_cli.app.export import card_of
from libra_cli.app.first_plan import explained_first_plan
from libra_cli.app.resume import (
    FirstPlanOf,
    continued,
    last_checkpoint,
    plan_to_go_on_with,
    refuse_while_alive,
)
from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import LibraError, StateError
from libra_cli.config.recipe import Recipe
from libra_cli.config.secrets import known_secrets, masker
from libra_cli.core.costs.architecture import PUBLISHED, architecture_of
from libra_cli.core.launch.dry_run import HostPlan, dry_run
from libra_cli.core.launch.memory_table import memory_table
from libra_cli.core.records import Record, RunRecord
from libra_cli.core.types import Plan, Slot
from libra_cli.envs.registry import ENVIRONMENTS
from libra_cli.report.html.run_report import write_report
from libra_cli.runtime.adoption.run_log import ReplayedRun, replay
from libra_cli.runtime.agents.runners import find_function
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.demonstrations.reader import check_demonstrations
from libra_cli.runtime.episodes.places import EnvironmentFactory
from libra_cli.runtime.monitors.dispatch import Monitors
from libra_cli.runtime.monitors.protocol import MonitoredRun
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.session import LastCheckpoint, Session
from libra_cli.runtime.store.controller_process import process_started
from libra_cli.runtime.store.event_log import EVENTS
from libra_cli.runtime.store.follower import NOTE
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.run_directory import keep_recipe
from libra_cli.runtime.supervision.controller_log import controller_log
from libra_cli.runtime.supervision.quotations import masked_errors
from libra_cli.runtime.tasks.digests import keep_tasks
from libra_cli.runtime.tasks.mixture import Tasks


@dataclass(frozen=True, slots=True)
class DryRun:
    """What ``libra run --dry-run`` tells."""

    plan: Plan
    hosts: tuple[HostPlan, ...]
    memory: tuple[str, ...]
    """What the memory of each kind of process goes to, in lines."""
    tasks: tuple[str, ...]
    """How many tasks were read for each environment that has files of them, in lines."""


def plan_of(recipe_path: Path, resume: Path | None = None) -> tuple[Recipe, DryRun]:
    """``libra run --dry-run``: what would be started where, to ``resume`` a run or to begin one.

    Starts nothing and asks no host.

    Raises:
        RecipeError: every problem of the recipe at once.
        LibraError: nothing runs by the prices that the recipe names, there is no such run, or a
            file of tasks is damaged.
    """
    recipe = load_recipe(recipe_path)
    tasks = tuple(
        f"{label}: {len(Tasks(environment.tasks))} tasks from "
        + ", ".join(source.path for source in environment.tasks)
        for label, environment in zip(recipe.environment_labels, recipe.environment, strict=True)
        if environment.tasks
    )
    if recipe.demonstrations:
        tasks = (_told_demonstrations(recipe),)
    found = _begin_with(recipe, resume)(None)
    placed = (found.plan, found.slots)
    hosts = dry_run(recipe, placed=placed)
    return recipe, DryRun(found.plan, hosts, _memory_of(recipe, *placed), tasks)


def _told_demonstrations(recipe: Recipe) -> str:
    rows, steps = len(Tasks(recipe.demonstrations)), recipe.run.steps
    batch = recipe.trajectories_per_step
    return (
        f"demonstrations: {rows:,} conversations from "
        f"{', '.join(source.path for source in recipe.demonstrations)}; {steps:,} steps of {batch} "
        f"are {steps * batch / rows:.1f} epochs"
    )


def _memory_of(recipe: Recipe, plan: Plan, slots: tuple[Slot, ...]) -> tuple[str, ...]:
    if recipe.model.path is None:
        return ()
    file = Path(recipe.model.path).expanduser() / "config.json"
    name = Path(recipe.model.path).name
    try:
        shape = architecture_of(json.loads(file.read_bytes()), str(file))
        source = f"by {file}"
    except (OSError, ValueError, LibraError) as error:
        problem = (
            "is not on this machine" if isinstance(error, OSError) else f"says too little: {error}"
        )
        if name not in PUBLISHED:
            return (f"what memory goes to is not known: {file} {problem}",)
        shape = PUBLISHED[name]
        source = f"{file} {problem}; by what is published of {name}"
    said = f"{source}: {shape.parameters / 1e9:.1f} billion parameters"
    shape = shape.with_adapter(recipe.training.lora)
    if shape.adapter is not None:
        said += f", of an adapter {shape.adapter / 1e6:.1f} million, which are trained"
    return (said, *memory_table(recipe, plan, slots, shape))


def run(
    recipe: Recipe,
    recipe_path: Path,
    run_dir: Path,
    *,
    resume: bool,
    watch: Callable[[Record], None],
    note: Callable[[str], None],
) -> Path | None:
    """``libra run``: everything, to the end. Returns the report, if there was anything to report.

    Raises:
        LibraError: what a user can act on.
    """
    mask = masker(known_secrets(recipe))

    def told(text: str) -> None:
        note(mask(text))

    with masked_errors(mask):
        return _run(recipe, recipe_path, run_dir, mask, resume=resume, watch=watch, note=told)


def _run(
    recipe: Recipe,
    recipe_path: Path,
    run_dir: Path,
    mask: Callable[[str], str],
    *,
    resume: bool,
    watch: Callable[[Record], None],
    note: Callable[[str], None],
) -> Path | None:
    run_dir = run_dir.absolute()
    first = _first_row(recipe, recipe_path, run_dir)
    if resume:
        refuse_while_alive(run_dir)
        first = continued(first, recipe, run_dir)
    begin_with = _begin_with(recipe, run_dir if resume else None)
    check_parts(recipe)  # before any host is asked for anything
    monitored = MonitoredRun(run_dir.name, run_dir, recipe.model_dump(mode="json"), note)
    monitors = Monitors(recipe.run.monitors, monitored, samples=recipe.run.samples)

    def saved(record: Record) -> None:
        watch(record)
        monitors.on(record)

    with (
        controller_log(run_dir, note=note, mask=mask),
        Journal(
            run_dir, on_error=lambda error: note(f"{error}; {error.hint}"), mask=mask
        ) as journal,
        monitors,
    ):
        keep_recipe(recipe, run_dir)
        keep_tasks(recipe, run_dir)

        def noted(text: str) -> None:
            note(text)
            journal.event(time.time(), NOTE, {"text": mask(text)})

        secrets = RunSecrets.of(run_dir)
        goes_on = where_to_go_on(recipe, run_dir, secrets, noted) if resume else None
        session = Session(
            recipe,
            run_dir,
            journal,
            first,
            secrets=secrets,
            first_plan=begin_with,
            plan_with=partial(live_planner, recipe),
            card_of=partial(card_of, run_dir),
            watch=saved,
            note=noted,
        )
        last = asyncio.run(session.run(goes_on))
    if last.state == "failed":
        raise LibraError(
            f"the run failed: {last.error}",
            hint=f"libra status {run_dir}; libra logs NODE PROCESS shows a process's own words",
        )
    return write_report(run_dir, tolerance=recipe.weight_sync.tolerance, now=time.time())


def where_to_go_on(
    recipe: Recipe, run_dir: Path, secrets: RunSecrets, note: Callable[[str], None]
) -> LastCheckpoint | ReplayedRun:
    """Where its controller was killed, if that can be told, or the last checkpoint.

    Raises:
        StateError: there is neither.
    """
    if (run_dir / EVENTS).exists():
        try:
            return replay(run_dir, recipe, secrets.token)
        except StateError as error:
            note(f"goes on from the last checkpoint, not where its controller was killed: {error}")
    return last_checkpoint(run_dir)


def check_parts(recipe: Recipe) -> None:
    """Find the environments and the agent that a recipe names; each environment is made once.

    Raises:
        LibraError: one cannot be imported, or does not fit what the recipe gives it.
    """
    if recipe.demonstrations:
        check_demonstrations(recipe.demonstrations)
        return
    evaluated = [one.environment for one in recipe.evaluation if one.environment is not None]
    for environment in (*recipe.environment, *evaluated):
        _try(environment)
    if recipe.agent is not None and recipe.agent.function is not None:
        find_function(recipe.agent)


def _try(environment: EnvironmentSpec) -> None:
    if environment.workers is None:
        EnvironmentFactory(environment).make()
    else:  # not in this process, which it might hold up, fill or end
        ENVIRONMENTS.check(environment.name)


def _begin_with(recipe: Recipe, resume: Path | None) -> FirstPlanOf:
    if resume is not None:
        return plan_to_go_on_with(recipe, resume)
    return partial(explained_first_plan, recipe)


def _first_row(recipe: Recipe, recipe_path: Path, run_dir: Path) -> RunRecord:
    return RunRecord(
        id=run_dir.name,
        recipe=str(recipe_path),
        state="starting",
        started_at=time.time(),
        ended_at=None,
        target_steps=recipe.run.steps,
        step=0,
        version=0,
        waiting="everyone waits for the hosts",
        error="",
        controller_pid=os.getpid(),
        controller_started=process_started(os.getpid()) or 0.0,
    )
