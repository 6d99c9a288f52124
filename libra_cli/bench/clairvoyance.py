"""Planners that know more than a planner can: the bounds of ``libra bench regret``.

    ScheduledLayouts  carries out layouts chosen in hindsight, one for each part of the run
    OraclePlanner     libra's own, which is told the work to come in place of the work that was

Limit: a script changes at the borders of equal parts, and is as good as the layouts that were
simulated for it; neither is the best that there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from libra_cli.core.costs.profile import Profile
from libra_cli.core.observation import Observation
from libra_cli.core.planning.baselines import decided
from libra_cli.core.planning.gpu_placement import GpuPlacement
from libra_cli.core.planning.planner import Decision, DecisionMaker
from libra_cli.core.planning.search import Layout, Search
from libra_cli.core.types import Pool
from libra_cli.core.workload import Workload

TOLD = "told"
"""The planner's name of libra's own that is told the work to come."""


@dataclass(frozen=True, slots=True)
class OraclePlanner:
    """A planner that is told the work of the steps from the present one on."""

    planner: DecisionMaker
    coming: Callable[[int], Workload]

    def decide(self, now: Observation) -> Decision:
        """Return the decision of the planner for the work to come, of which all growth is told."""
        known = now.lengths[-len(now.measured) :]  # of all steps where none is measured
        lengths = (fmean(known),) * len(known) if known else ()
        return self.planner.decide(replace(now, workload=self.coming(now.step), lengths=lengths))


@dataclass(frozen=True, slots=True)
class ScheduledLayouts:
    """The layouts of equal parts of a run of so many steps, each adopted when its part begins.

    ``regroups``: all that trains becomes one group, at the price of a restart of the trainer.
    """

    layouts: tuple[Layout, ...]
    steps: int
    space: GpuPlacement
    search: Search
    profile: Profile
    regroups: bool = False

    def decide(self, now: Observation) -> Decision:
        """The layout of the part that the next step is in."""
        part = min(now.step * len(self.layouts) // self.steps, len(self.layouts) - 1)
        layout, today = self.layouts[part], self.space.layout_of(now.plan, now.slots)
        stay = "" if layout.servers != today.servers else "as the script says"
        reason = f"part {part + 1} of {len(self.layouts)}"
        trains = Pool.TRAIN if self.regroups else None
        return decided(
            now,
            self.space,
            self.search,
            self.profile,
            layout,
            reason,
            why_not=stay,
            near=[slot for slot in now.slots if slot.pool is not trains],
        )
