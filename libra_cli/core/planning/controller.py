"""When a run looks for a better plan, what becomes of one, and what it turned out to be worth.

When to look is for ``planning.triggers`` to say; never while slots move. Where training did not
wait, the staleness bound held rollout back, the more so the more groups lie ready: their share of
all begun and not trained stands for rollout's waiting. What the planner then admits
is carried out.

A user's order comes before the planner: pins hold slots against both.

Every plan is kept with its prediction. Observed are the mean seconds of up to ``WINDOW`` steps
before it was chosen, and of the ``WINDOW`` steps after the last of its moves; steps while slots
moved count for neither. Every decision is kept too, also one to stay, with its explanation: what it
is observed to have come to is the mean of the steps until the next decision, ``WINDOW`` at most.
Limit: what else has changed meanwhile (lengths drift) is in that comparison too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from json import dumps
from statistics import fmean
from typing import Any, ClassVar

from libra_cli.config.recipe import Recipe
from libra_cli.core.actions import AnswerOrder, Propose, Save
from libra_cli.core.events import PlanChosen, PlanEvent, PlanKept, PlanOrdered
from libra_cli.core.evidence import Recalibration
from libra_cli.core.explanation import STEPS, Explanation
from libra_cli.core.notices import BoundChosen, Result
from libra_cli.core.observation import STARVED, Observation
from libra_cli.core.planning.triggers import ReplanTriggers
from libra_cli.core.reconcile.manual_plan import OrderRefused, ordered_plan
from libra_cli.core.reconcile.model_orders import ordered_models
from libra_cli.core.reconcile.reconciler import Reconciler
from libra_cli.core.reconcile.shape_orders import reshaped_plan
from libra_cli.core.records import DecisionRecord, PlanRecord, StepRecord
from libra_cli.core.token_worth import settling
from libra_cli.core.types import Bucket, Plan, Pool, Prediction, Role, Seconds, Slot, SlotId

WINDOW = STEPS
UNTIMED_GAIN = 1.25
"""How many times as long a step has to be, by prediction, for a move before one was timed: two
predictions are 8 % off each in the mean, and a plan is better from 5 % on. Chosen."""


class PlanController:
    """Decides when to plan again, adopts plans, and records what each one was worth."""

    events: ClassVar[Any] = PlanEvent
    actions: ClassVar[Any] = Propose | AnswerOrder

    def __init__(self, recipe: Recipe, reconciler: Reconciler, plan: Plan) -> None:
        self._recipe = recipe
        self._reconciler = reconciler
        self.plan = plan
        self.pins: dict[SlotId, Role] = {}
        self._number = 0
        #: The newest plan's row.
        self._row = record_of_plan(0, plan, 0.0, "start", None)
        #: Seconds of the last steps under the newest plan in which no slot moved.
        self._periods: deque[Seconds] = deque(maxlen=WINDOW)
        #: Whether all slots were where the plan has them when the last step ended.
        self._arrived = True
        #: Whether a step was done: the first one's time is that of filling the run.
        self._has_stepped = False
        #: The staleness bound under which groups are opened.
        self.bound = recipe.training.max_staleness
        self._triggers = ReplanTriggers(recipe.planner.plan_interval, 1.0 + self.bound)
        #: Mean lengths of the last two steps.
        self._lengths: deque[float] = deque(maxlen=2)
        #: Why a planner is to be asked at the end of this event, and who ordered it.
        self._due: tuple[str, str] | None = None
        #: A planner's answer is awaited.
        self._awaiting = False
        #: Whether no step had been timed of the work that it was asked about.
        self._untimed = False
        #: What the planner was last asked for, and after which step.
        self._asked: tuple[str, int] = ("", 0)
        #: Under which today's plan was chosen.
        self.recalibration: Recalibration | None = None
        #: By the newest look at measured steps.
        self.corrected: Recalibration | None = None
        #: The newest decision while it is not known what came, and the steps since.
        self._decision: DecisionRecord | None = None
        self._came: list[Seconds] = []
        #: Whether the run is being wound down, so that no slot moves any more.
        self._ending = False

    def handle(self, event: PlanEvent, *, now: Seconds) -> list[Result]:
        """Return what follows from the planner's answer, or from a user's order."""
        if isinstance(event, PlanKept):
            return self.kept(event, now=now)
        if self._ending:
            return self._answer(event.order, accepted=False, text="the run is ending")
        if isinstance(event, PlanChosen):
            return self.chosen(event, now=now)
        return self.ordered(event, now=now)

    def wants(self, action: Propose | AnswerOrder) -> bool:
        """Whether the end of the action is still waited for: always."""
        return True

    def wind_down(self) -> None:
        """Move no slot from now on, whoever orders it."""
        self._ending = True

    def number_on(self, last: int) -> None:
        """A run goes on whose newest plan had this number."""
        self._number = last + 1
        self._row = replace(self._row, plan=self._number)

    def go_on(self, decisions: Sequence[DecisionRecord]) -> list[Result]:
        """Keep the staleness bound that a run had which goes on, if it is still to be chosen."""
        chosen = [row.bound for row in decisions if row.bound is not None]
        allowed = self._recipe.training.bounds
        return self._open_under(chosen[-1]) if chosen and chosen[-1] in allowed else []

    def _open_under(self, bound: int) -> list[Result]:
        """Open groups under this staleness bound from now on; those under way keep theirs."""
        if bound == self.bound:
            return []
        self._triggers.overlaps(1.0 + bound, after=settling(self.bound, bound))
        self.bound = bound
        return [BoundChosen(bound)]

    def begin(self, explanation: Explanation | None, *, step: int, now: Seconds) -> list[Result]:
        """Return the first plan's row, and the decision for it if a planner has made it."""
        self._row = replace(self._row, at=now)
        if explanation is None:
            return [Save(self._row)]
        told = explanation.to_json()
        row = DecisionRecord(now, step, "the run begins", self._number, "", 1.0, 1.0, told)
        self._decision = row
        return [Save(self._row), Save(row)]

    def on_plan_repaired(self) -> list[Result]:
        """Take the plan that moves which failed have left, and update its row."""
        self.plan = self._reconciler.plan(self.plan.reasons)
        told = record_of_plan(self._number, self.plan, 0.0, "", None)
        self._row = replace(
            self._row,
            servers_json=told.servers_json,
            train_json=told.train_json,
            gradient_json=told.gradient_json,
            models_json=told.models_json,
        )
        return [Save(self._row)]

    # -- looking --------------------------------------------------------------------------------

    def on_step_done(
        self, step: StepRecord, ready: float, signs: Mapping[str, float]
    ) -> list[Result]:
        """A step is done, and ``ready`` of the groups that are not trained wait for training;
        ``signs`` are what trajectories are like but for their lengths."""
        period, has_stepped = step.period_s, self._has_stepped
        self._has_stepped = True
        if not has_stepped or period <= 0:
            return []
        waited = step.waited_s / period
        idle = {"training": waited, "rollout": ready if waited < STARVED else 0.0}
        self._lengths.append(step.mean_length)
        may = self._may_look and not self._busy
        work = {"mean length": fmean(self._lengths), **signs}
        why = self._triggers.due(idle, work, may=may)
        if why:
            self._due = (why, "")
        return self._observe(period)

    def glance(
        self, ended: int, error: Callable[[], float], *, overdue: bool, now: Seconds
    ) -> bool:
        """See whether the first trajectories tell enough to look before a step has been timed, or
        those since the newest step where the next one is ``overdue``; return whether they do.

        ``ended`` of them have finished, which tell the mean turns with a standard ``error`` (a
        share).
        """
        may = self._may_move if overdue else self._may_look
        if self._due is not None or self._ending or self._busy or not may:
            return False
        why = self._triggers.glance(ended, error, overdue=overdue, now=now)
        self._due = (why, "") if why else None
        return bool(why)

    def look(self, observe: Callable[[], Observation | None]) -> list[Result]:
        """Ask the planner, if that is due; once an event, when all that it tells is known."""
        if self._due is None:
            return []
        (why, order), self._due = self._due, None
        seen = observe()
        if seen is not None and not order and not self._may_move:
            seen = replace(seen, pins=tuple(self._as_they_are(self.slots).items()))
        if seen is None:
            text = "no move: no trajectory has finished yet, so the work is not known"
            return self._answer(order, accepted=True, text=text)
        self._untimed = not order and self._triggers.by_clock
        if not self._untimed:
            self._triggers.rest()
        self._awaiting, self._asked = True, (why, seen.step)
        return [Propose(why, seen, order)]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots into which the nodes are divided now."""
        return self._reconciler.slots

    @property
    def _may_look(self) -> bool:
        return self._may_move or self._recipe.training.staleness.is_chosen

    @property
    def held(self) -> dict[SlotId, Role]:
        """The slots that a user pins, and those of nodes that are given up, which stay as they
        are."""
        return self._held(self.pins)

    def _held(self, pins: Mapping[SlotId, Role]) -> dict[SlotId, Role]:
        return {**self._as_they_are(self._reconciler.given_up), **pins}

    def _as_they_are(self, slots: Sequence[Slot]) -> dict[SlotId, Role]:
        """Return those of the slots that do something, pinned to that."""
        roles = {slot.id: self._reconciler.role_of(slot.id) for slot in slots}
        return {slot: role for slot, role in roles.items() if role is not Role.IDLE}

    @property
    def _may_move(self) -> bool:
        free = any(slot.pool is Pool.HYBRID or slot.is_joined for slot in self.slots)
        recipe = self._recipe
        fixed = recipe.planner.kind == "fixed" or not recipe.training.shares_steps
        return free and not fixed

    @property
    def _busy(self) -> bool:
        return self._awaiting or bool(self._reconciler.moves)

    # -- what comes of it -----------------------------------------------------------------------

    def chosen(self, event: PlanChosen, *, now: Seconds) -> list[Result]:
        """Carry out the better plan that the planner has chosen, or say why not."""
        objection = self._objection(event)
        if objection is not None:
            accepted, text = objection
            told = self._decided(event, None, text, now)
            return told + self._answer(event.order, accepted=accepted, text=text)
        told = self._decided(event, self._number + 1, "", now, event.explanation)
        told += self._bounded(event)
        cause = "order" if event.order else "planner"
        actions = self._adopt(event.plan, event.slots, cause, event.prediction, now)
        return told + actions + self._answer(event.order, accepted=True, text=_words(event.plan))

    def _objection(self, event: PlanChosen) -> tuple[bool, str] | None:
        """Return why a plan is not adopted, and whether an order for it counts as carried out.

        Until a step of the work has been timed prices are as they were given, or as other work has
        shown them, and only a plan that is better by more than these can be wrong is adopted.
        """
        plan, told = event.plan, event.explanation
        if _wanted_of(plan) == _wanted_of(self._reconciler.plan(())):
            return True, "the plan is today's already"
        held = [slot for slot, role in self.pins.items() if _role(plan, slot) is not role]
        if held:
            return False, f"the plan moves slots that are pinned: {', '.join(sorted(held))}"
        if refusal := self._reconciler.cannot_have(plan, event.slots):
            return False, refusal
        if self._untimed and told and told.today.step_s < UNTIMED_GAIN * told.chosen.step_s:
            return True, "it is too little better to be sure before a step of this work is timed"
        return None

    def kept(self, event: PlanKept, *, now: Seconds) -> list[Result]:
        """The planner has looked, and today's plan stays."""
        told = self._decided(event, None, event.why_not, now, event.explanation)
        told += self._bounded(event)
        return told + self._answer(event.order, accepted=True, text=f"no move: {event.why_not}")

    def _bounded(self, event: PlanChosen | PlanKept) -> list[Result]:
        """Have the staleness bound that came with a decision that is carried out."""
        choice = event.explanation.bound if event.explanation else None
        return self._open_under(choice.chosen.bound) if choice else []

    def _decided(
        self,
        event: PlanChosen | PlanKept,
        plan: int | None,
        why_not: str,
        now: Seconds,
        explanation: Explanation | None = None,
    ) -> list[Result]:
        """Write down what the planner has answered, and what comes of it.

        The recalibration under which a plan was chosen is remembered as long as it lasts. Of a plan
        that was refused no ``explanation`` is passed.
        """
        told = self._close()
        self._awaiting = False
        found = event.recalibration or Recalibration()
        choice = explanation.bound if explanation else None
        if plan is not None or (choice and choice.changes):
            self.recalibration = found
        self.corrected = event.recalibration or self.corrected
        bound = choice.chosen.bound if choice else self.bound
        why, step = self._asked
        row = DecisionRecord(
            at=now,
            step=step,
            why=why,
            plan=plan,
            why_not=why_not,
            rollout_factor=found.rollout,
            training_factor=found.training,
            explanation_json=explanation.to_json() if explanation else "{}",
            bound=bound if self._recipe.training.staleness.is_chosen else None,
        )
        self._decision = row if explanation else None
        return [*told, Save(row)]

    def ordered(self, event: PlanOrdered, *, now: Seconds) -> list[Result]:
        """A user orders a split, holds slots, or wants a look now."""
        if self._busy:
            under_way = (
                ", ".join(sorted(self._reconciler.moves)) or "none yet, but the planner looks"
            )
            text = f"slots are moving ({under_way}); order again when they have arrived"
            return self._answer(event.order, accepted=False, text=text)
        pins = dict(self.pins)
        for slot, role in event.pins:
            pins.pop(slot, None)
            if role is not None:
                pins[slot] = role
        if not (event.to or event.pins or event.shapes or event.models):
            self._due = ("asked for", event.order)
            return []
        try:
            plan, slots = self._plan(event, pins)
        except OrderRefused as error:
            return self._answer(event.order, accepted=False, text=str(error))
        self.pins = pins
        same = _wanted_of(plan) == _wanted_of(self._reconciler.plan(()))
        if same:
            return self._answer(event.order, accepted=True, text="nothing has to move")
        actions = [*self._close(), *self._adopt(plan, slots, "order", None, now)]
        return actions + self._answer(event.order, accepted=True, text=_words(plan))

    def _plan(self, event: PlanOrdered, pins: dict[SlotId, Role]) -> tuple[Plan, tuple[Slot, ...]]:
        slots, today = self.slots, self._reconciler.plan(())
        if event.shapes:
            plan, slots = reshaped_plan(self._recipe, slots, today, event.shapes, self.pins)
        else:
            plan = self._split(event, slots, today, pins)
        if refusal := self._reconciler.cannot_have(plan, slots):
            raise OrderRefused(refusal)
        return plan, slots

    def _split(
        self,
        event: PlanOrdered,
        slots: tuple[Slot, ...],
        today: Plan,
        pins: Mapping[SlotId, Role],
    ) -> Plan:
        """Return the plan of an order that says how many slots do what, or holds some."""
        known = {slot.id for slot in slots}
        unknown = sorted({slot for slot, _ in event.pins} - known)
        if unknown:
            names = ", ".join(sorted(known))
            raise OrderRefused(f"there is no slot {unknown[0]}; the run has {names}")
        for slot, role in event.pins:
            if role is not None and (model := dict(today.models).get(slot)):
                raise OrderRefused(f"slot {slot} serves {model}; --to {model}=N takes it back")
        roles = {slot: self._reconciler.role_of(slot) for slot in known}
        held = self._held(pins)
        models = ordered_models(self._recipe.models, slots, today, dict(event.models), held)
        left = [slot for slot in slots if slot.id not in models]
        plan = ordered_plan(self._recipe, left, roles, today.train, dict(event.to), held)
        return replace(plan, models=tuple(models.items()))

    def _answer(self, order: str, *, accepted: bool, text: str) -> list[Result]:
        return [AnswerOrder(order, accepted, text)] if order else []

    def _adopt(
        self,
        plan: Plan,
        slots: tuple[Slot, ...],
        cause: str,
        promise: Prediction | None,
        now: Seconds,
    ) -> list[Result]:
        self.plan, self._number = plan, self._number + 1
        row = record_of_plan(self._number, plan, now, cause, promise)
        self._row = replace(row, observed_before_s=_mean(self._periods))
        self._periods.clear()
        self._arrived = False
        self._triggers.rest()
        return [Save(self._row), *self._reconciler.adopt(plan, slots, self._number, now=now)]

    # -- what it was worth ----------------------------------------------------------------------

    def _observe(self, period: Seconds) -> list[Result]:
        arrived, self._arrived = self._arrived, not self._reconciler.moves
        if not (arrived and self._arrived):  # nor does the step count in which the last one arrived
            return []
        self._periods.append(period)
        return [*self._came_after_decision(period), *self._came_after_plan()]

    def _came_after_decision(self, period: Seconds) -> list[Result]:
        self._came.append(period)
        return self._close() if len(self._came) == WINDOW else []

    def _close(self) -> list[Result]:
        """Save the mean step time seen under the newest decision, which is now final."""
        decision, self._decision = self._decision, None
        came, self._came = self._came, []
        if decision is None or not came:
            return []
        return [Save(replace(decision, observed_s=fmean(came), observed_steps=len(came)))]

    def _came_after_plan(self) -> list[Result]:
        first = self._row.cause != "start" and self._row.observed_after_s is None
        if not first or len(self._periods) < WINDOW:
            return []
        self._row = replace(self._row, observed_after_s=_mean(self._periods))
        return [Save(self._row)]


def record_of_plan(
    number: int, plan: Plan, now: Seconds, cause: str, promise: Prediction | None
) -> PlanRecord:
    """Return the row of a plan; ``now`` is in seconds since the epoch."""
    return PlanRecord(
        plan=number,
        at=now,
        servers_json=dumps([[slot, *astuple(bucket)] for slot, bucket in plan.servers]),
        train_json=dumps(plan.train),
        reasons_json=dumps(plan.reasons),
        gradient_json=dumps(plan.gradient),
        models_json=dumps(plan.models),
        cause=cause,
        predicted_before_s=promise.before_s if promise else None,
        predicted_after_s=promise.after_s if promise else None,
        cost_s=promise.cost_s if promise else None,
    )


def plan_of_record(row: PlanRecord) -> Plan:
    """Return the plan that a row of the database describes."""
    servers = tuple((one.slot, Bucket(*astuple(one)[1:])) for one in row.servers)
    return Plan(servers, row.train, row.reasons, row.gradient, row.models)


def _wanted_of(plan: Plan) -> tuple[object, ...]:
    return dict(plan.servers), plan.train, frozenset(plan.gradient), dict(plan.models)


def _role(plan: Plan, slot: SlotId) -> Role:
    if slot in dict(plan.servers):
        return Role.ROLLOUT
    if slot in plan.gradient:
        return Role.GRADIENT
    if slot in dict(plan.models):
        return Role.MODEL
    return Role.TRAIN if slot in plan.train else Role.IDLE


def _words(plan: Plan) -> str:
    counts = (len(plan.servers), len(plan.gradient), len(plan.train))
    told = "moving to rollout={}, gradient={}, train={}".format(*counts)
    models = Counter(name for _, name in plan.models)
    return ", ".join([told, *(f"{number} more for {name}" for name, number in models.items())])


def _mean(values: deque[Seconds]) -> Seconds | None:
    return fmean(values) if values else None
