"""The planner of a running job in numbers of GPUs, and how its rivals are made.

``libra`` looks when ``looks`` says so, corrects its prices as ``corrections`` has it, and moves if
``admission`` lets it, all as a live run does. What was measured is the mean of the steps on today's
layout, twice as many as may be in flight. A look predicts today's layout and the best ones, and of
those within ``tolerance`` of the best takes the one with the fewest GPUs moved.

Guarantee: no move without a predicted gain that pays it back; a steady workload stops moving.
Limit: predictions; a drift faster than the window is seen late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from libra_cli.config.errors import LibraError
from libra_cli.core.costs.profile import Profile
from libra_cli.core.costs.workload import Workload
from libra_cli.core.planning.admission import RECENT, Admission, horizon
from libra_cli.core.planning.baselines import Rule, Static
from libra_cli.core.planning.observation import (
    Decision,
    Observation,
    Replanner,
    moves_between,
    moves_cost_s,
)
from libra_cli.core.planning.recalibration import Recalibration, corrected
from libra_cli.core.planning.search import Layout, PlannerSettings, Search, Times
from libra_cli.core.planning.triggers import FILLING, STARVED, ReplanTriggers, steps_to_average
from libra_cli.core.types import Seconds

PLANNERS = ("colocated", "uniform", "static-best", "greedy", "streamrl", "dynarl", "libra")
PERIOD = 10
"""Steps after which a look is due, as a recipe's ``plan_interval`` is by default."""


class PlannerError(LibraError):
    """A planner that is not known."""

    exit_code = 2


class SimReplanner:
    """Ours; the law is the module's."""

    name = "libra"

    def __init__(
        self,
        profile: Profile,
        gpus: int,
        settings: PlannerSettings,
        admission: Admission | None = None,
    ) -> None:
        self._profile = profile
        self._gpus = gpus
        self._settings = settings
        self._admission = admission or Admission()
        self._looks: ReplanTriggers | None = None
        self._lengths: deque[float] = deque(maxlen=RECENT)
        self._correction: Recalibration | None = None
        self._seen: deque[Observation] = deque()

    def begin(self, workload: Workload) -> Layout:
        """The best plan for this workload."""
        self._looks = ReplanTriggers(PERIOD, workload.overlap)
        self._lengths.append(workload.mean_generated)
        return Search(self._profile, workload, self._gpus, self._settings).best().layout

    def consider(self, now: Observation) -> Decision:
        """Look if there is reason to, and move if it pays."""
        assert self._looks is not None, "begun"
        if now.step <= FILLING:
            return Decision(None, (), why_not="the first steps wait for the first trajectories")
        idle = self._idle(now)
        self._lengths.append(now.recent.mean_generated)
        reason = self._looks.due(idle, now.recent.mean_generated)
        if not reason:
            return Decision(None, (), why_not="nothing has changed enough to look again")
        return self._look(now, reason)

    def _idle(self, now: Observation) -> dict[str, float]:
        """How much of the last steps on this layout each half waited."""
        if self._seen and self._seen[-1].layout != now.layout:
            self._seen.clear()
        self._seen.append(now)
        while len(self._seen) > steps_to_average(now.recent.overlap):
            self._seen.popleft()
        took_s = sum(each.measured.step_s for each in self._seen)
        waited_s = sum(each.measured.waited_s for each in self._seen)
        busy_s = sum(each.rollout_s for each in self._seen)
        starved = waited_s > STARVED * took_s
        return {"training": waited_s / took_s, "rollout": 0.0 if starved else 1 - busy_s / took_s}

    def _look(self, now: Observation, reason: str) -> Decision:
        prices = corrected(
            self._profile,
            now.recent,
            now.gpus,
            self._settings,
            today=now.layout,
            measured=[each.measured for each in self._seen],
            before=self._correction,
        )
        self._correction = prices.correction
        before = prices.search.times(now.layout)
        layout, after = self._nearest(prices.search, now)
        gain_s = before.step_s - after.step_s
        cost_s = moves_cost_s(prices.profile, now.recent, now.layout, layout)
        payback = cost_s / gain_s if gain_s > 0 else None
        steps = horizon([*self._lengths], now.steps_left)
        why_not = replace(self._admission, horizon=steps).why_not(before, after, cost_s)
        reasons: tuple[str, ...] = (reason, f"today: {before}", f"then: {after} with {layout}")
        if not why_not:
            reasons = (*reasons, f"saves {gain_s:.1f} s a step, pays back in {payback:.1f} steps")
        chosen = None if why_not else layout
        return Decision(chosen, reasons, before, after, cost_s, payback, why_not)

    def _nearest(self, search: Search, now: Observation) -> tuple[Layout, Times]:
        best = search.best()
        limit = best.step_s * (1 + self._admission.tolerance)
        found = [(best.layout, best.times), *search.candidates(self._admission.tolerance)]
        found += [(layout, search.times(layout)) for layout in _neighbours(search, now.layout)]
        good = [pair for pair in found if pair[1].step_s <= limit]

        def key(pair: tuple[Layout, Times]) -> tuple[int, int, Seconds]:
            moves = moves_between(now.layout, pair[0])
            return moves.gpus, moves.number, pair[1].step_s

        return min(good, key=key)


def replanner(
    name: str,
    profile: Profile,
    gpus: int,
    *,
    settings: PlannerSettings | None = None,
) -> Replanner:
    """The planner of that name. Raises PlannerError, with the known ones, if there is none."""
    settings = settings or PlannerSettings()
    if name == "libra":
        return SimReplanner(profile, gpus, settings)
    if name in ("colocated", "uniform", "static-best"):
        return Static(name, profile, gpus, settings)
    if name in ("greedy", "streamrl", "dynarl"):
        return Rule(name, profile, gpus, settings)
    raise PlannerError(f"no planner is called {name!r}", hint=f"one of: {', '.join(PLANNERS)}")


def _neighbours(search: Search, today: Layout) -> list[Layout]:
    """Today's layout with one bucket a few servers larger or smaller, the rest training."""
    found: list[Layout] = []
    for index, bucket in enumerate(today.buckets):
        for change in (-4, -2, -1, 1, 2, 4):
            servers = bucket.servers + change
            kept = (replace(bucket, servers=servers),) if servers > 0 else ()
            buckets = (*today.buckets[:index], *kept, *today.buckets[index + 1 :])
            training = search.tree.best(search.gpus - sum(bucket.gpus for bucket in buckets))
            if buckets and training is not None:
                found.append(Layout(search.table.boundaries(buckets), training.shape))
    return found
