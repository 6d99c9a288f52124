"""What a run wrote, in the order it was written, for a ``RunObserver`` to see again.

A database keeps the newest row of every key, so rows that changed are told as they were: a
trajectory that ran, a move that was queued. Those that carry a checkpoint come without it, which is
written later.

Limit: of groups, trajectories and turns only those since ``RECENT_STEPS`` steps; an observer looks
no further back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TypeAlias

from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.joined_slots import slots_in
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.observed.trained_steps import RECENT_STEPS
from libra_cli.core.records import (
    DecisionRecord,
    GroupRecord,
    MoveRecord,
    PlanRecord,
    Record,
    SlotRecord,
    SyncRecord,
    TrajectoryRecord,
    TurnRecord,
    VersionRecord,
)
from libra_cli.core.types import Plan, Pool, Slot
from libra_cli.runtime.store.reader import Reader

Entry: TypeAlias = tuple[float, int, Record]
"""When a record was written, its place among those of that time, and the record."""
_MEMBER = "group_id, member, attempt"


def records_in_order(reader: Reader) -> list[Record]:
    """What an observer of the run has to see to know what its own knew."""
    return [record for _, _, record in sorted(_entries(reader), key=lambda entry: entry[:2])]


def slots_of_plan(reader: Reader, recipe: Recipe, plan: Plan) -> tuple[Slot, ...]:
    """The recipe's slots, some of them joined; those of the plan where nodes are open."""
    if not recipe.has_open_nodes:
        return slots_in(plan, slots_of(recipe))
    known = {slot.id: slot for slot in slots_of(recipe)}
    for row in reader.rows(SlotRecord):
        known[row.slot] = Slot(row.slot, row.node, row.gpus, Pool(row.pool))
    return tuple(known[slot] for slot in (*dict(plan.servers), *plan.gradient, *plan.train))


def _entries(reader: Reader) -> Iterator[Entry]:
    steps = reader.steps()
    since = steps[-RECENT_STEPS].started_at if len(steps) > RECENT_STEPS else 0.0
    yield from _slots(reader)
    yield from _turns(reader, since)
    yield from _moves(reader)
    for version in reader.rows(VersionRecord):
        yield version.published_at, 6, version
    for sync in reader.rows(SyncRecord):
        yield sync.served_at, 6, sync
    for evaluation in reader.evaluations():
        yield evaluation.ended_at or evaluation.started_at, 6, evaluation
    for step in steps:
        yield step.ended_at, 7, replace(step, checkpoint="")
    trained = {step.step: step.ended_at for step in steps}
    for note in reader.notes():
        yield note.at, 9, note
    for group in reader.rows(GroupRecord, "started_at >= ?", (since,)):
        ended = group.ended_at or group.started_at
        yield ended if group.step is None else trained.get(group.step, ended), 8, group


def _turns(reader: Reader, since: float) -> Iterator[Entry]:
    """Trajectories that begin, play their turns and end."""
    for trajectory in reader.rows(TrajectoryRecord, "started_at >= ?", (since,)):
        yield trajectory.started_at, 2, replace(trajectory, state="running", ended_at=None)
        if trajectory.ended_at is not None:
            yield trajectory.ended_at, 4, trajectory
    theirs = f"({_MEMBER}) IN (SELECT {_MEMBER} FROM trajectories WHERE started_at >= ?)"
    for turn in reader.rows(TurnRecord, theirs, (since,)):
        yield turn.ended_at, 3, turn


def _moves(reader: Reader) -> Iterator[Entry]:
    """Plans, decisions, and the slots that began to move and arrived."""
    for plan in reader.rows(PlanRecord):
        yield plan.at, 0, plan
    for decision in reader.rows(DecisionRecord):
        yield decision.at, 0, decision
    for move in reader.rows(MoveRecord):
        yield move.started_at, 5, replace(move, state="queued", ended_at=None)
        if move.ended_at is not None:
            yield move.ended_at, 5, move


def _slots(reader: Reader) -> Iterator[Entry]:
    """The states that the slots went through, and their GPUs, which are those of today."""
    rows = {row.slot: row for row in reader.rows(SlotRecord)}
    for state in reader.slot_history():
        now = rows.get(state.slot)
        if now is not None:
            yield state.since, 1, replace(now, **asdict(state))
