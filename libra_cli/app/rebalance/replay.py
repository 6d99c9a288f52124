"""The observation of a run, made again from its database, as its machine made it while it went on.

The records are put back in the order they were written and shown to the same ``RunObserver`` that
the machine shows them to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from libra_cli.config.errors import StateError
from libra_cli.config.recipe import Recipe
from libra_cli.core.cluster.placement import initial_plan, slots_of
from libra_cli.core.costs.profile import Recalibration
from libra_cli.core.observation import Observation
from libra_cli.core.observer import RunObserver
from libra_cli.core.planning.controller import plan_of_record
from libra_cli.core.records import (
    DecisionRecord,
    GroupRecord,
    MoveRecord,
    PlanRecord,
    Record,
    SlotRecord,
    StepRecord,
    TrajectoryRecord,
    TurnRecord,
    VersionRecord,
)
from libra_cli.runtime.store.reader import Reader

Entry: TypeAlias = tuple[float, int, Record]
"""When a record was written, its place among those of that time, and the record."""


def observation_of_run(reader: Reader, recipe: Recipe, *, live: bool) -> Observation:
    """What the planner of a run may know now, or at its end.

    An ended run is judged as if it began again: all its steps are to come.

    Raises:
        StateError: no trajectory has finished yet.
    """
    observer = RunObserver(recipe)
    for _, _, record in sorted(_entries(reader), key=lambda entry: entry[:2]):
        observer.saw(record)
    workload = observer.workload
    if workload is None:
        raise StateError(
            f"{reader.run_dir}: no trajectory has finished yet, so its work is not known",
            hint="try again later, or: libra rebalance RECIPE.yaml --dry-run --trace FILE",
        )
    plans, step = reader.plans(), reader.run().step
    decisions = reader.rows(DecisionRecord)
    last = next((row for row in reversed(decisions) if row.plan is not None), None)
    return Observation(
        step=step,
        plan=plan_of_record(plans[-1]) if plans else initial_plan(recipe),
        slots=slots_of(recipe),
        workload=workload,
        measured=observer.measured,
        lengths=observer.lengths,
        evidence=observer.evidence,
        recalibration=Recalibration(last.rollout_factor, last.training_factor) if last else None,
        steps_left=recipe.run.steps - step if live else recipe.run.steps,
    )


def _entries(reader: Reader) -> Iterator[Entry]:
    yield from _slots(reader)
    yield from _turns(reader)
    yield from _moves(reader)
    for version in reader.rows(VersionRecord):
        yield version.published_at, 6, version
    trained: dict[int | None, float] = {}
    for step in reader.rows(StepRecord):
        trained[step.step] = step.ended_at
        yield step.ended_at, 7, replace(step, checkpoint="")
    for group in reader.rows(GroupRecord):
        yield trained.get(group.step, group.ended_at or group.started_at), 8, group


def _turns(reader: Reader) -> Iterator[Entry]:
    """Trajectories that begin, play their turns and end."""
    for trajectory in reader.rows(TrajectoryRecord):
        yield trajectory.started_at, 2, replace(trajectory, state="running", ended_at=None)
        if trajectory.ended_at is not None:
            yield trajectory.ended_at, 4, trajectory
    for turn in reader.rows(TurnRecord):
        yield turn.ended_at, 3, turn


def _moves(reader: Reader) -> Iterator[Entry]:
    """Plans, and the slots that began to move and arrived."""
    for plan in reader.rows(PlanRecord):
        yield plan.at, 0, plan
    for move in reader.rows(MoveRecord):
        yield move.started_at, 5, replace(move, state="queued", ended_at=None)
        if move.ended_at is not None:
            yield move.ended_at, 5, move


def _slots(reader: Reader) -> Iterator[Entry]:
    """The states that the slots went through, with the GPUs that they have."""
    rows = {row.slot: row for row in reader.rows(SlotRecord)}
    for state in reader.slot_history():
        now = rows.get(state.slot)
        if now is not None:
            yield state.since, 1, replace(now, state=state.state, since=state.since)


def gpu_names(reader: Reader, recipe: Recipe) -> frozenset[str]:
    """Names of the GPUs that the run uses, as its hosts gave them."""
    names: set[str] = set()
    for node in reader.nodes():
        used = next((spec.gpus for spec in recipe.nodes if spec.name == node.node), 0)
        facts = json.loads(node.facts_json or "{}")
        names |= {gpu["name"] for gpu in facts.get("gpus", ()) if gpu["index"] < used}
    return frozenset(names)
