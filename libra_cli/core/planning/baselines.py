"""The planners that libra's is measured against in the simulator: published rules, by name.

    colocated     every GPU serves and then trains, in turn; nothing moves
    uniform       half the GPUs to each side in servers of four GPUs; nothing moves
    static-best   libra's first plan; nothing moves
    greedy        a server's worth to the slower half
    streamrl      one more server when the gap of the halves reaches what it would save, either way
                  (the elastic rule of StreamRL, arXiv 2504.15930)
    dynarl        on queue or utilisation for rollout, and ``T_train / T_rollout`` for training, to
                  the split that would balance what was measured, at once and whatever it costs
                  (after DynaRL, OSDI 2026, with the thresholds that Libra's artifact gives it)

The moving ones begin as libra does, judge by the mean of the steps that libra judges by, and rest
for as many steps after a move. As published they do not, and
lose to never moving: ``dynarl`` changed its plan after almost every step and swung between extreme
splits. Limit: none of them counts what a move costs, and that is how they are published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from libra_cli.config.errors import InputError
from libra_cli.core.costs.profile import Profile
from libra_cli.core.evidence import Recalibration
from libra_cli.core.observation import MeasuredStep, Observation, mean_step
from libra_cli.core.planning.gpu_placement import GpuPlacement
from libra_cli.core.planning.planner import Candidate, Decision, DecisionMaker, Planner
from libra_cli.core.planning.recalibration import RecalibratedSearch
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search, least_regret
from libra_cli.core.planning.triggers import cooldown
from libra_cli.core.types import Seconds, Slot
from libra_cli.core.workload import Workload

PLANNERS = ("colocated", "uniform", "static-best", "greedy", "streamrl", "dynarl", "libra")
STATIC = ("colocated", "uniform", "static-best")
"""The planners that never move a slot."""
PROPOSED = ("static-best", "libra")
"""The planners that may have servers of several shapes; a rule moves servers of one."""
QUEUE_PRESSURE, ACTIVE_PRESSURE, ROLLOUT_STARVES = 0.75, 0.85, 1.25
BORROW, NEVER_BORROW = 1.15, 0.80
"""Thresholds of the artifact of Libra (arXiv 2606.03077), see ``_dynarl``."""


class PlannerError(InputError):
    """No planner has the name asked for."""


def first_layout(
    name: str, profile: Profile, workload: Workload, gpus: int, settings: PlannerSettings
) -> Layout:
    """The layout that the planner of this name begins with.

    Raises:
        PlannerError: there is no such planner; names those that there are.
        NothingFits: no layout can run.
    """
    if name not in PLANNERS:
        raise PlannerError(f"no planner is called {name!r}", hint=f"one of: {', '.join(PLANNERS)}")
    if name not in PROPOSED:
        settings = replace(settings, shapes="alike")
    if name == "colocated":
        return _colocated(profile, workload, gpus, settings)
    search = Search(profile, workload, gpus, settings)
    if name == "uniform":
        return _uniform(search, settings)
    layouts = [layout for layout, _ in search.layouts()]
    return least_regret(layouts, profile, workload, gpus, settings)


def planner_of(
    name: str, profile: Profile, space: GpuPlacement, settings: PlannerSettings
) -> DecisionMaker:
    """The planner of this name, for a run in this space."""
    if name == "libra":
        return Planner(space, lambda plan, evidence: profile, settings)
    return Rule(name, profile, space, replace(settings, shapes="alike"))


@dataclass(slots=True)
class Rule:
    """A planner with equal servers and a rule that moves GPUs between the halves."""

    name: str
    profile: Profile
    space: GpuPlacement
    settings: PlannerSettings
    _rests_until: int = field(default=0, init=False)

    def decide(self, now: Observation) -> Decision:
        """Return the rule's next split, if it is another one."""
        search = Search(self.profile, now.workload, self.space.gpus, self.settings)
        today = self.space.layout_of(now.plan, now.slots)
        degree = today.buckets[0].tensor_parallel
        share = degree
        target, reason = self._target(now, today, share, search)
        most = self.space.gpus - self.space.base_gpus
        layout = _equal(search, degree, min(max(share, target), most), self.settings)
        same = layout.servers == today.servers or search.times(layout).step_s == float("inf")
        stay = (reason or "balanced") if same else ""
        if not same:
            self._rests_until = now.step + cooldown(now.workload.overlap)
        return decided(now, self.space, search, self.profile, layout, reason, why_not=stay)

    def _target(
        self, now: Observation, today: Layout, share: int, search: Search
    ) -> tuple[int, str]:
        if not now.measured:
            return today.rollout_gpus, "nothing is measured under this plan yet"
        if now.step < self._rests_until:
            return today.rollout_gpus, f"at rest until step {self._rests_until}"
        step = mean_step(now.measured)
        rules: dict[str, Callable[[], tuple[int, str]]] = {
            "greedy": lambda: _greedy(now, today, step, share),
            "streamrl": lambda: self._streamrl(now, today, step, share, search),
            "dynarl": lambda: _dynarl(now, today, step, share, self.space.gpus),
        }
        return rules[self.name]()

    def _streamrl(
        self, now: Observation, today: Layout, step: MeasuredStep, share: int, search: Search
    ) -> tuple[int, str]:
        gap = _rollout_s(now, step) - step.train_s
        moved = share if gap > 0 else -share
        degree = today.buckets[0].tensor_parallel
        other = _equal(search, degree, max(share, today.rollout_gpus + moved), self.settings)
        before, after = search.times(today), search.times(other)
        saved = before.rollout_s - after.rollout_s if gap > 0 else before.train_s - after.train_s
        if saved <= 0 or abs(gap) < saved:
            return today.rollout_gpus, ""
        reason = f"a gap of {abs(gap):.1f} s is worth the {saved:.1f} s of one more"
        return today.rollout_gpus + moved, reason


def decided(
    now: Observation,
    space: GpuPlacement,
    search: Search,
    profile: Profile,
    layout: Layout,
    reason: str,
    *,
    why_not: str,
    near: Sequence[Slot] | None = None,
) -> Decision:
    """Return the decision for a layout with a rule's reason; to stay where ``why_not`` says why.

    It is placed as ``near`` as can be to these slots; None: to today's.
    """
    plan, slots = space.place(layout, now.slots if near is None else near)
    before, after = search.times(space.layout_of(now.plan, now.slots)), search.times(layout)
    candidate = Candidate(layout, after, (), lambda: (plan, slots))
    return Decision(
        plan=None if why_not else plan,
        proposed=plan,
        slots=slots,
        moves=space.moves(now, plan, slots, profile),
        before=before,
        after=after,
        cost_s=space.cost_s(now, candidate, plan, search),
        horizon=float("inf"),
        reasons=(reason,),
        why_not=why_not,
        found=RecalibratedSearch(None, before, Recalibration(), profile, search),
    )


def _greedy(now: Observation, today: Layout, step: MeasuredStep, share: int) -> tuple[int, str]:
    ratio = _rollout_s(now, step) / max(step.train_s, 1e-9)
    if 0.95 < ratio < 1.05:
        return today.rollout_gpus, ""
    moved = share if ratio > 1 else -share
    return today.rollout_gpus + moved, f"the slower half, at {ratio:.2f}"


def _dynarl(
    now: Observation, today: Layout, step: MeasuredStep, share: int, gpus: int
) -> tuple[int, str]:
    serving, rollout_s = today.rollout_gpus, _rollout_s(now, step)
    ratio = rollout_s / max(step.train_s, 1e-9)
    pressed = now.queue >= QUEUE_PRESSURE or 1 - now.rollout_idle >= ACTIVE_PRESSURE
    grow = ratio >= ROLLOUT_STARVES and pressed
    lend = 1 / max(ratio, 1e-9) >= BORROW and now.queue < NEVER_BORROW
    if not (grow or lend):
        return serving, ""
    weight, other = rollout_s * serving, step.train_s * max(1, today.training_gpus)
    balanced = gpus * weight / max(weight + other, 1e-9)
    return round(balanced / share) * share, f"triggered at {ratio:.2f}, queue {now.queue:.2f}"


def _rollout_s(now: Observation, step: MeasuredStep) -> Seconds:
    """Seconds of the step without rollout's waiting for training."""
    return step.step_s * (1 - now.rollout_idle)


def _uniform(search: Search, settings: PlannerSettings) -> Layout:
    half = search.gpus // 2
    fitting = (degree for degree in search.table.degrees if degree <= min(half, 4))
    degree = max(fitting, default=min(search.table.degrees))
    return _equal(search, degree, half, settings)


def _equal(search: Search, degree: int, gpus: int, settings: PlannerSettings) -> Layout:
    """Return as many servers of this degree as ``gpus`` hold, with the other GPUs training."""
    longest = max(sample.generated for sample in search.workload.samples)
    servers = max(1, gpus // degree)
    bucket = PlannedBucket(degree, servers, longest, settings.max_num_seqs)
    spare = search.gpus - servers * degree
    training = search.training.best(spare)
    ranks = training.ranks if training is not None else max(1, spare)
    return Layout((bucket,), ranks)


def _colocated(
    profile: Profile, workload: Workload, gpus: int, settings: PlannerSettings
) -> Layout:
    search = Search(profile, replace(workload, overlap=1.0), gpus, settings)
    training = search.training.best(gpus)
    if training is None:
        raise search.training.refusal(gpus)
    return Layout(search.uniform(gpus), training.ranks, colocated=True)
