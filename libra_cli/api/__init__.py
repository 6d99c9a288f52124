"""A run in Python, for notebooks and scripts: its steps, turns, moves and evaluations as rows.

    from libra_cli.api import load_run

    run = load_run("runs/quickstart-1")
    run.steps[-1].metrics["reward/mean"]
    best = max(run.trajectories, key=lambda one: one.reward or 0.0)
    print(run.text(best))
    run.steps.to_pandas().plot(x="step", y="reward/mean")

It reads the run directory and changes nothing, while the run goes on too, and of runs of older
libras. What is in ``__all__`` stays as it is from version to version, by every name that
``libra help monitors`` has; the database's tables and the columns ``*_json`` do not.
"""

from libra_cli.api.rows import StepRow
from libra_cli.api.run import LoadedRun, load_run
from libra_cli.api.table import RowTable
from libra_cli.core.records import EvaluationRecord as EvaluationRow
from libra_cli.core.records import MoveRecord as MoveRow
from libra_cli.core.records import PhaseRow
from libra_cli.core.records import TurnRecord as TurnRow
from libra_cli.core.types import ToolReturn as ToolRow
from libra_cli.runtime.store.joined_rows import TrajectoryRow

__all__ = [
    "EvaluationRow",
    "LoadedRun",
    "MoveRow",
    "PhaseRow",
    "RowTable",
    "StepRow",
    "ToolRow",
    "TrajectoryRow",
    "TurnRow",
    "load_run",
]
