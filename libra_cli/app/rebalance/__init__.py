"""``libra rebalance``: what plan a run, or a recipe, should have, and whether to move.

With ``--dry-run`` it is told; without, a live run is asked to carry it out. A live run's own
planner (``propose``) looks at the same things in the same way, so what is told is what is done.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from libra_cli.app.rebalance.cases import case_of_recipe, case_of_run
from libra_cli.app.rebalance.decision import decide, told
from libra_cli.app.rebalance.orders import RebalanceError
from libra_cli.bench.experiments import DEFAULT_TRACE
from libra_cli.core.actions import Propose
from libra_cli.core.cluster.placement import slots_of
from libra_cli.core.events import PlanChosen, PlanKept
from libra_cli.core.types import Prediction
from libra_cli.report.status.rebalance import RebalanceResult
from libra_cli.runtime.store.run_directory import newest_run


def propose(run_dir: Path, look: Propose) -> PlanChosen | PlanKept:
    """What a live run's own planner answers.

    Raises:
        LibraError: it has not come far enough, or nothing fits.
    """
    case = replace(case_of_run(run_dir, None), pins=look.pins)
    decision = decide(case)
    if decision.plan is None:
        return PlanKept(decision.why_not, look.order)
    reasons = (look.why, *decision.reasons)
    promise = Prediction(decision.before.step_s, decision.after.step_s, decision.cost_s)
    plan = replace(decision.plan, reasons=reasons)
    return PlanChosen(plan, slots_of(case.recipe), promise, look.order)


def explain(target: Path | None, *, trace: str | None, profile: str | None) -> RebalanceResult:
    """The object of ``libra rebalance --dry-run``: of a run directory, a recipe, or the newest run.

    Raises:
        LibraError: no such run or recipe, a profile of another GPU, or nothing that fits.
    """
    if target is not None and not target.exists():
        raise RebalanceError(
            f"there is no {target}", hint="libra rebalance RUN_DIR --dry-run, or RECIPE.yaml"
        )
    if target is not None and target.is_file():
        return told(case_of_recipe(target, trace or DEFAULT_TRACE, profile))
    if trace is not None:
        raise RebalanceError(
            "a run has its own trajectories: --trace is for a recipe",
            hint=f"leave it out, or: libra rebalance RECIPE.yaml --dry-run --trace {trace}",
        )
    return told(case_of_run(target or newest_run(), profile))
