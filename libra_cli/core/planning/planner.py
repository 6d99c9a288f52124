"""The planner: one observation in, one decision out.

    costs        given, shipped or observed, times what measured steps say (``recalibration``)
    candidates   the placements that a ``PlacementSpace`` allows, each with its predicted times
    choice       the least ``step_s + cost_s / horizon``, with the seconds of the moves shared by
                 the steps that the plan is expected to last; within ``tolerance`` of that the one
                 that moves the least; to begin with one that loses least whatever lengths turn
                 out to be, with the larger servers (``search.least_regret``)
    verdict      whether its gain pays its moves (``admission``)
    explanation  what came second, what binds, and what the next steps take (``core.explanation``)

The same class decides in a live run, in the simulator and in ``libra rebalance --dry-run``. What
differs is the space: a recipe's slots (``recipe_placement``) or any servers on a number of GPUs
(``gpu_placement``).

Guarantee: equal observations give equal decisions; no move without a predicted gain that pays it
back. Limit: predictions; a drift faster than the window of trajectories is seen late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from statistics import fmean
from typing import Protocol, TypeAlias

from libra_cli.config.errors import LibraError
from libra_cli.core.actions import Propose
from libra_cli.core.bound_choice import PricedBound
from libra_cli.core.costs.profile import NothingFits, Profile
from libra_cli.core.events import PlanChosen, PlanKept
from libra_cli.core.evidence import CostEvidence, Recalibration
from libra_cli.core.explanation import (
    Binding,
    Constraint,
    Explanation,
    PlanOption,
    RunnerUp,
    predicted_step,
)
from libra_cli.core.observation import Observation, mean_step
from libra_cli.core.planning.admission import Admission, expected_change, horizon
from libra_cli.core.planning.bounds import chosen_bound, priced_bound, under
from libra_cli.core.planning.recalibration import RecalibratedSearch, recalibrated
from libra_cli.core.planning.search import (
    Layout,
    PlannerSettings,
    Search,
    Times,
    least_regret,
)
from libra_cli.core.rollout.staleness import unnamed
from libra_cli.core.token_worth import BoundEvidence
from libra_cli.core.types import Plan, Prediction, Seconds, Slot, SlotId
from libra_cli.core.workload import Workload

NEAR = "today's plan is within the tolerance of the best"

CostSource: TypeAlias = Callable[[Plan, CostEvidence], Profile]
"""The costs to plan with. Raises LibraError while there is too little evidence for them."""


@dataclass(frozen=True, slots=True)
class SlotMove:
    """A slot's change of role: the name of a bucket, ``train``, ``gradient`` or ``idle``.

    The slot does nothing for ``seconds`` meanwhile.
    """

    slot: SlotId
    before: str
    after: str
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement that could be had. ``distance`` orders candidates by how much they move;
    ``place`` says which slot does what."""

    layout: Layout
    times: Times
    distance: tuple[int, ...]
    place: Callable[[], tuple[Plan, tuple[Slot, ...]]]


class PlacementSpace(Protocol):
    """The placements that are allowed, and what moving between two of them costs."""

    @property
    def gpus(self) -> int:
        """The budget; a slot without GPUs counts as one."""

    def check(self, plan: Plan, profile: Profile) -> None:
        """Raise ProfileError if a shape of the plan has no costs."""

    def layout_of(self, plan: Plan, slots: Sequence[Slot]) -> Layout:
        """The plan as numbers of servers and ranks."""

    def candidates(self, search: Search, now: Observation) -> Iterable[Candidate]:
        """Return the placements that the planner may choose from.

        Raises:
            NothingFits: there is none.
        """

    def moves(
        self, now: Observation, then: Plan, slots: Sequence[Slot], profile: Profile
    ) -> tuple[SlotMove, ...]:
        """Return the moves of all slots whose role changes."""

    def cost_s(self, now: Observation, chosen: Candidate, then: Plan, search: Search) -> Seconds:
        """Return the cost of the moves, in seconds of the whole job."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan proposed, and whether to have it: ``plan`` is None to stay, and ``why_not`` says
    why.

    ``slots`` are those that the proposed plan knows. ``before`` and ``after`` are predicted seconds
    of a step under today's plan and the proposed one; ``cost_s`` is what the moves cost, in seconds
    of the whole job.
    """

    plan: Plan | None
    proposed: Plan
    slots: tuple[Slot, ...]
    moves: tuple[SlotMove, ...]
    before: Times
    after: Times
    cost_s: Seconds
    horizon: float
    reasons: tuple[str, ...]
    why_not: str
    found: RecalibratedSearch
    explanation: Explanation | None = None
    bounds: tuple[PricedBound, ...] = ()
    """The staleness bounds that could be chosen, ascending; none where the recipe fixes it."""

    @property
    def layout(self) -> str:
        """The placement that there is to be, or to stay, in words; empty if nobody explains it."""
        return self.explanation.chosen.layout if self.explanation else ""

    @property
    def seconds(self) -> Seconds:
        """Predicted seconds of a step from here on, with the moves shared by the horizon."""
        if self.plan is None:
            return self.before.step_s
        return self.after.step_s + self.cost_s / max(1.0, self.horizon)

    @property
    def payback_steps(self) -> float | None:
        """The steps after which the moves have paid; None if they never do."""
        gain_s = self.before.step_s - self.after.step_s
        return self.cost_s / gain_s if gain_s > 0 else None

    @property
    def recalibration(self) -> Recalibration:
        """The factors that the costs were multiplied by."""
        return self.found.recalibration


@dataclass(frozen=True, slots=True)
class FirstPlan:
    """The plan to begin with, the slots it knows, and why; no explanation without a planner."""

    plan: Plan
    slots: tuple[Slot, ...]
    explanation: Explanation | None = None


class DecisionMaker(Protocol):
    """Answers ``Propose``: the planner, or a baseline in the simulator."""

    def decide(self, now: Observation) -> Decision:
        """The plan to have from here on, or to stay. Raises LibraError if nothing can run."""


@dataclass(frozen=True, slots=True)
class Planner:
    """libra's own planner, by the law of this module."""

    space: PlacementSpace
    costs: CostSource
    settings: PlannerSettings = field(default_factory=PlannerSettings)
    admission: Admission = field(default_factory=Admission)
    begins: bool = False
    """Whether it chooses what a run begins with: the plan with the least regret, at any gain."""

    def decide(self, now: Observation) -> Decision:
        """Choose a placement and judge it; where the staleness bound is to be chosen, with it.

        Raises:
            NothingFits: no placement of the space can run; says which constraint fails first.
            ProfileError: a shape of today's plan has no costs.
            LibraError: there is too little evidence for the costs.
        """
        decision = self._decide(now)
        return decision if now.staleness is None else self._with_bound(now, now.staleness, decision)

    def _with_bound(self, now: Observation, known: BoundEvidence, today: Decision) -> Decision:
        """Return the decision under the best staleness bound; ``today`` is that under the present.

        What measured steps say of prices is said under the present bound, and holds for those that
        the run has not had. For those that it has had, what was measured then holds.
        """
        decisions = {known.bound: today}
        for bound in known.bounds:
            if bound != known.bound:
                work = under(unnamed(bound), now.workload)
                then = replace(now, workload=work, measured=(), recalibration=None, staleness=None)
                with suppress(NothingFits):
                    decisions[bound] = self._corrected(now, known.left.get(bound), today)._decide(
                        then
                    )
        priced = {
            bound: priced_bound(known, bound, one.layout, one.seconds)
            for bound, one in sorted(decisions.items())
        }
        choice = chosen_bound(known, priced, self.admission.min_gain)
        decision = decisions[choice.chosen.bound]
        explanation = decision.explanation and replace(decision.explanation, bound=choice)
        found = replace(decision.found, recalibration=today.recalibration)
        return replace(
            decision, explanation=explanation, found=found, bounds=tuple(priced.values())
        )

    def _corrected(self, now: Observation, found: Recalibration | None, today: Decision) -> Planner:
        """Return the planner with prices times these factors; None: times today's."""
        profile = today.found.profile
        if found is not None:
            profile = self.costs(now.plan, now.evidence).recalibrated(found)
        return replace(self, costs=lambda plan, evidence: profile)

    def _decide(self, now: Observation) -> Decision:
        """Choose a placement and judge it, under the staleness bound that the workload has."""
        profile = self.costs(now.plan, now.evidence)
        self.space.check(now.plan, profile)
        today = self.space.layout_of(now.working(now.plan), now.slots)
        found = self._recalibrated(now, profile, today)
        candidates = list(self.space.candidates(found.search, now))
        before = found.search.served_by(today.models).times(today)
        chosen = self._chosen(now, found, candidates)
        decision = self._judge(now, found, before, chosen)
        if self.begins:
            decision = replace(decision, plan=decision.proposed, why_not="")
        elif decision.plan is None:  # say why not to have the one with the shortest steps
            chosen = self._nearest([(each.times.step_s, each) for each in candidates])
            decision = self._judge(now, found, before, chosen)
        others = [each for each in candidates if str(each.layout) != str(chosen.layout)]
        explanation = self._explain(now, today, decision, chosen.layout, others)
        return replace(decision, explanation=explanation)

    def _recalibrated(
        self, now: Observation, profile: Profile, today: Layout
    ) -> RecalibratedSearch:
        """Return the search for the work to come, with prices corrected by measured steps.

        The work to come is that of the middle of the horizon, if lengths change on as they did: for
        training of the trajectories that end then, for rollout of those that begin then and end
        ``overlap`` steps later, or at the run's end. Where such trajectories are longer than
        anything that fits, the work is taken as it was.
        """
        work = now.workload
        lengths = now.lengths[-len(now.measured) :] if now.measured else ()
        past = work.stretched(fmean(lengths) / work.mean_generated if lengths else 1.0)
        middle = _horizon(now) / 2
        begins = min(middle + work.overlap, inf if now.steps_left is None else now.steps_left)
        begun, ended = (
            work.stretched(expected_change(now.lengths, steps, work.spread))
            for steps in (begins, middle)
        )
        try:
            return self._priced(now, profile, today, (begun, ended, past))
        except NothingFits:
            return self._priced(now, profile, today, (work, work, work))

    def _priced(
        self,
        now: Observation,
        profile: Profile,
        today: Layout,
        works: tuple[Workload, Workload, Workload],
    ) -> RecalibratedSearch:
        begun, ended, played = works
        return recalibrated(
            profile,
            begun,
            self.space.gpus,
            self.settings,
            today=today,
            measured=now.measured,
            ended=ended,
            played=played,
            before=now.recalibration,
            trained=bool(now.measured or now.lengths),
        )

    def _chosen(
        self,
        now: Observation,
        found: RecalibratedSearch,
        candidates: Sequence[Candidate],
    ) -> Candidate:
        """Return the candidate with the shortest steps, the seconds of its moves and of a restart
        shared by the horizon's steps; before a run the one with the least regret.
        """
        if self.begins:
            layouts = [each.layout for each in candidates]
            settings, gpus = self.settings, self.space.gpus
            best = least_regret(layouts, found.profile, now.workload, gpus, settings)
            return candidates[layouts.index(best)]
        steps = max(1.0, _horizon(now))

        def seconds(each: Candidate) -> Seconds:
            then, _ = each.place()
            return each.times.step_s + self.space.cost_s(now, each, then, found.search) / steps

        return self._nearest([(seconds(each), each) for each in candidates])

    def _nearest(self, timed: Sequence[tuple[Seconds, Candidate]]) -> Candidate:
        """Return the candidate that moves the least, of those within the tolerance of the best."""
        runnable = [one for one in timed if one[0] < inf]
        if not runnable:
            raise NothingFits("plan", "no placement can run", hint="libra run --dry-run RECIPE")
        limit = min(seconds for seconds, _ in runnable) * (1 + self.admission.tolerance)
        good = [one for one in runnable if one[0] <= limit]
        return min(good, key=lambda one: (one[1].distance, one[0]))[1]

    def _judge(
        self, now: Observation, found: RecalibratedSearch, before: Times, chosen: Candidate
    ) -> Decision:
        plan, slots = chosen.place()
        moves = self.space.moves(now, plan, slots, found.profile)
        cost_s = self.space.cost_s(now, chosen, plan, found.search)
        steps = _horizon(now)
        admission = replace(self.admission, horizon=steps)
        why_not = admission.why_not(before, chosen.times, cost_s) if moves else NEAR
        return Decision(
            plan=None if why_not else plan,
            proposed=plan,
            slots=slots,
            moves=moves,
            before=before,
            after=chosen.times,
            cost_s=cost_s,
            horizon=steps,
            reasons=(f"today: {before}", f"then: {chosen.times}", *plan.reasons),
            why_not=why_not,
            found=found,
        )

    def _explain(
        self,
        now: Observation,
        today: Layout,
        decision: Decision,
        proposed: Layout,
        others: Sequence[Candidate],
    ) -> Explanation:
        search, move = decision.found.search, decision.plan is not None
        chosen, times = (proposed, decision.after) if move else (today, decision.before)
        runner_up: RunnerUp | None = RunnerUp(_option(proposed, decision.after), decision.why_not)
        if move or not decision.moves:
            runner_up = self._runner_up(decision.after, others)
        return Explanation(
            move=move,
            why_not=decision.why_not,
            today=_option(today, decision.before),
            chosen=_option(chosen, times),
            runner_up=runner_up,
            binds_today=binding(search, today, now, measured=True),
            binds=binding(search, chosen, now, measured=not move),
            predicted=predicted_step(
                times.step_s,
                moves=move,
                measured=[step.step_s for step in now.measured],
                past=now.predictions,
            ),
            cost_s=decision.cost_s,
            payback_steps=decision.payback_steps,
            horizon_steps=decision.horizon,
            shapes=search.compared(chosen),
        )

    def _runner_up(self, times: Times, others: Sequence[Candidate]) -> RunnerUp | None:
        """Return the best of the other candidates, and why it is
        not chosen; None without others.
        """
        if not others:
            return None
        best = min(others, key=lambda each: each.times.step_s)
        slower = best.times.step_s / times.step_s - 1
        why_not = f"its steps are {slower:.1%} longer"
        if best.times.step_s == inf:
            why_not = "it does not fit"
        elif slower <= 0:
            less = "it moves more"
            if self.begins:
                less = "it loses more if lengths turn out otherwise, or its servers are smaller"
            why_not = f"its steps are {-slower:.1%} shorter, and {less}"
        return RunnerUp(_option(best.layout, best.times), why_not)


def binding(search: Search, layout: Layout, now: Observation, *, measured: bool) -> Binding:
    """Return what binds a layout: its longer half, the network, or the staleness rule.

    The network where a version takes longer than a step; the rule where training waits with a full
    batch ready for more than half of its waiting, which only steps that were ``measured`` show.
    """
    step_s = search.times(layout).step_s
    if now.sync_s > step_s:
        words = f"a version takes {now.sync_s:.1f} s to reach a server, a step {step_s:.1f} s"
        return Binding(Constraint.NETWORK, words)
    if measured and now.measured:
        seen = mean_step(now.measured)
        if seen.starved and seen.held_s > seen.waited_s / 2:
            words = (
                f"a full batch waits {seen.held_s:.1f} s for groups that the step is the last for"
            )
            return Binding(Constraint.STALENESS, words)
    return search.binding(layout)


def _horizon(now: Observation) -> float:
    return horizon(now.lengths, now.steps_left, now.workload.spread)


def _option(layout: Layout, times: Times) -> PlanOption:
    return PlanOption(str(layout), times.rollout_s, times.train_s, times.step_s)


def lacks_hosts(now: Observation) -> NothingFits:
    """Return the error that nothing can run without the nodes that are given up."""
    return NothingFits(
        "hosts",
        f"nothing can run without hosts that are given up: {', '.join(sorted(now.gone))}",
        hint="libra status shows the hosts; their slots are used again once they are back",
    )


def roles_of(plan: Plan) -> dict[SlotId, str]:
    """Return the role of each slot of the plan: the name of a bucket or of a frozen model,
    ``train`` or ``gradient``."""
    roles = {slot: bucket.name for slot, bucket in plan.servers}
    roles |= {slot: f"model {name}" for slot, name in plan.models}
    return roles | dict.fromkeys(plan.train, "train") | dict.fromkeys(plan.gradient, "gradient")


def answer(planner: DecisionMaker, action: Propose) -> PlanChosen | PlanKept:
    """Return the event that a ``Propose`` ends in, in a live run and in the simulator alike."""
    try:
        decision = planner.decide(action.observation)
    except LibraError as error:
        return PlanKept(str(error), action.order)
    if decision.plan is None:
        return PlanKept(
            decision.why_not, action.order, decision.recalibration, decision.explanation
        )
    return PlanChosen(
        replace(decision.plan, reasons=(action.why, *decision.reasons)),
        decision.slots,
        Prediction(decision.before.step_s, decision.after.step_s, decision.cost_s),
        action.order,
        decision.recalibration,
        decision.explanation,
    )
