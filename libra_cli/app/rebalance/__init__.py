"""``libra rebalance``: what plan a run, or a recipe, should have, and whether to move.

With ``--dry-run`` it is told; without, a live run is asked to carry it out. What is told is what a
live run's own planner decides: the same planner, on the same observation.
"""

from __future__ import annotations

from pathlib import Path

from libra_cli.app.rebalance.cases import case_of_recipe, case_of_run
from libra_cli.app.rebalance.orders import RebalanceError
from libra_cli.app.rebalance.result import result_of
from libra_cli.report.status.rebalance import RebalanceResult
from libra_cli.runtime.store.run_directory import newest_run


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
        return result_of(case_of_recipe(target, trace, profile))
    if trace is not None:
        raise RebalanceError(
            "a run has its own trajectories: --trace is for a recipe",
            hint=f"leave it out, or: libra rebalance RECIPE.yaml --dry-run --trace {trace}",
        )
    return result_of(case_of_run(target or newest_run(), profile))
