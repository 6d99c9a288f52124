"""The observation of a run, made again from its database, as its machine made it while it went on.

The records are put back in the order they were written (``runtime.store.replay``) and shown to the
same ``RunObserver`` that the machine shows them to.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_cli.config.errors import WrongRun
from libra_cli.config.recipe import Recipe
from libra_cli.core.evidence import Recalibration
from libra_cli.core.launch.placement import initial_plan
from libra_cli.core.observation import Observation
from libra_cli.core.planning.controller import plan_of_record
from libra_cli.core.reconcile.desired_state import DesiredState
from libra_cli.core.records import DecisionRecord, PlanRecord
from libra_cli.core.run.observer import RunObserver
from libra_cli.core.run.state import Phase
from libra_cli.core.types import Plan, Role, Slot, SlotId
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.replay import records_in_order, slots_of_plan


def observation_of_run(reader: Reader, recipe: Recipe, *, live: bool) -> Observation:
    """What the planner of a run may know now, or at its end.

    An ended run is judged as if it began again: all its steps are to come, on all its hosts, of
    which steps without some are no measure.

    Raises:
        WrongRun: no trajectory has finished yet.
    """
    observer = RunObserver(recipe)
    for record in records_in_order(reader):
        observer.saw(record)
    workload = observer.workload
    if workload is None:
        raise WrongRun(
            f"{reader.run_dir}: no trajectory has finished yet, so its work is not known",
            hint="try again later, or: libra rebalance RECIPE.yaml --dry-run --trace FILE",
        )
    plans, run = reader.plans(), reader.run()
    plan = plan_of_record(plans[-1]) if plans else initial_plan(recipe)
    slots = slots_of_plan(reader, recipe, plan)
    gone = _given_up(reader) if live and run.state == Phase.RUNNING else frozenset[str]()
    return Observation(
        step=run.step,
        plan=plan,
        slots=slots,
        pins=_as_they_are(plan, [slot for slot in slots if slot.node in gone]),
        workload=workload,
        measured=observer.measured if live or not observer.lacks_slots else (),
        lengths=observer.lengths,
        evidence=observer.evidence,
        recalibration=_recalibration(plans, reader.rows(DecisionRecord)),
        steps_left=recipe.run.steps - run.step if live else recipe.run.steps,
        predictions=observer.predictions,
        sync_s=observer.sync_s,
        staleness=observer.staleness,
        gone=gone,
    )


def _given_up(reader: Reader) -> frozenset[str]:
    """The nodes of a run under way that are given up and not ready again."""
    return frozenset(row.node for row in reader.nodes() if row.state in ("failed", "connecting"))


def _as_they_are(plan: Plan, slots: Sequence[Slot]) -> tuple[tuple[SlotId, Role], ...]:
    """Return those of the slots that do something by the plan, pinned to that."""
    wanted = DesiredState(plan, slots)
    roles = ((slot.id, wanted.role_of(slot.id)) for slot in slots)
    return tuple((slot, role) for slot, role in roles if role is not Role.IDLE)


def _recalibration(
    plans: Sequence[PlanRecord], decisions: Sequence[DecisionRecord]
) -> Recalibration | None:
    """The recalibration by the last decision that moved slots, or changed the staleness bound,
    since the run began, or went on."""
    began, at = max(((row.plan, row.at) for row in plans if row.cause == "start"), default=(0, 0.0))
    changed = [row for row in decisions if row.at >= at and _changes(row, began)]
    if not changed:
        return None
    return Recalibration(changed[-1].rollout_factor, changed[-1].training_factor)


def _changes(row: DecisionRecord, began: int) -> bool:
    """Whether a decision changed something under which steps are measured."""
    choice = row.explanation.bound if row.explanation else None
    return (row.plan is not None and row.plan > began) or bool(choice and choice.changes)


def gpu_names(reader: Reader, recipe: Recipe) -> frozenset[str]:
    """Names of the GPUs that the run uses, as its hosts gave them."""
    names: set[str] = set()
    for node in reader.nodes():
        used = next((spec.gpus for spec in recipe.nodes if spec.name == node.node), 0)
        names |= {gpu["name"] for gpu in node.facts.get("gpus", ()) if gpu["index"] < used}
    return frozenset(names)
