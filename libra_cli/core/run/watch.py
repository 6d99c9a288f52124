"""What a run learns from its own rows: what a planner may know, what goes wrong, and what its
checkpoints are worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from libra_cli.core.actions import Action, Save
from libra_cli.core.evidence import Recalibration
from libra_cli.core.notices import Result
from libra_cli.core.observation import Observation
from libra_cli.core.records import Record, StepRecord
from libra_cli.core.rollout.groups import GroupState
from libra_cli.core.run import evaluating
from libra_cli.core.run.asked_now import asked_now
from libra_cli.core.run.assembly import RunParts
from libra_cli.core.run.observer import RunObserver
from libra_cli.core.types import Seconds
from libra_cli.core.warnings.gaps import expected_gap
from libra_cli.core.warnings.rules import RuleBounds
from libra_cli.core.warnings.watch import LearningWatch


class RunWatch:
    """Passes every row to the observer, warns after each step, and asks for a better plan."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._observer = RunObserver(parts.recipe)
        recipe = parts.recipe
        on_gpus = any(node.gpus for node in recipe.nodes)
        gap = expected_gap(recipe.model, recipe.rollout, on_gpus=on_gpus)
        self._warnings = LearningWatch(RuleBounds(recipe.training.max_grad_norm, gap))

    def remember(self, records: Sequence[Record]) -> None:
        """Take in the rows that a run wrote before it goes on."""
        training = self._parts.training
        for record in records:
            self._observer.saw(record)
            self._warnings.remember(record)
            if isinstance(record, StepRecord) and record.step <= training.step:
                training.checkpoints.learn_reward(record.step, record.reward)

    def see(self, actions: Iterable[Action]) -> None:
        """Pass rows to the observer, and scores of checkpoints to the trainer."""
        for action in actions:
            if isinstance(action, Save):
                self._observer.saw(action.record)
                evaluating.saw(self._parts, action.record)

    def step_taken(self, row: StepRecord, *, now: Seconds) -> Iterator[Result]:
        """Warn of what goes wrong after a step, and see whether to ask the planner."""
        yield from map(Save, self._warnings.saw(row, now=now))
        if self._parts.run.going:
            signs = self._observer.signs
            yield from self._parts.controller.on_step_done(row, self._ready_share, signs)

    def look(self, *, now: Seconds) -> list[Result]:
        """Ask the planner, if that is due by now."""
        controller, observer = self._parts.controller, self._observer
        training = self._parts.training
        if self._parts.scheduler.training_over:
            return controller.look(self.observe)
        late = training.life.up and observer.is_late(training.free_since, now=now)
        observer.early.overdue = late
        due = observer.first_ended and controller.glance(
            observer.first_ended, self._first_error, overdue=late, now=now
        )
        observer.early.overdue = late and bool(
            due
        )  # whoever orders a look is told all that is known
        looks = controller.look(self.observe)
        observer.early.overdue = False
        return looks

    @property
    def _recalibration(self) -> Recalibration | None:
        """Return how prices are corrected before the newest steps are: as today's plan was chosen,
        and where a step is overdue, so that none are measured, as at the newest look."""
        controller = self._parts.controller
        return controller.corrected if self._observer.early.overdue else controller.recalibration

    def _first_error(self) -> float:
        self._observer.asked_now = asked_now(self._parts)
        return self._observer.first_error

    @property
    def _ready_share(self) -> float:
        """The share of the groups begun and not trained that wait for training."""
        ledger = self._parts.ledger
        ready, played = ledger.count(GroupState.READY), ledger.count(GroupState.OPEN)
        return ready / max(1, ready + played)

    def observe(self) -> Observation | None:
        """Return the planner's observation of the run now; None
        before a trajectory has finished.
        """
        self._observer.asked_now = asked_now(self._parts)
        workload, measured = self._observer.workload, self._observer.measured
        if workload is None:
            return None
        parts, starved = self._parts, bool(measured) and measured[-1].starved
        if not workload.models:
            workload = replace(workload, models=self._observer.first_demands(workload))
        return Observation(
            step=parts.training.step,
            plan=parts.controller.plan,
            slots=parts.controller.slots,
            pins=tuple(parts.controller.held.items()),
            workload=workload,
            measured=measured,
            lengths=self._observer.lengths,
            evidence=self._observer.evidence,
            recalibration=self._recalibration,
            rollout_idle=0.0 if starved else self._ready_share,
            queue=len(parts.scheduler) / max(1, parts.scheduler.queues.seats),
            steps_left=parts.recipe.run.steps - parts.training.step,
            predictions=self._observer.predictions,
            sync_s=self._observer.sync_s,
            staleness=self._observer.staleness,
            gone=parts.servers.nodes_given_up,
        )
