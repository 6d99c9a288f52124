"""``libra bench fidelity --run-dir``: finished runs beside their simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from libra_cli.bench.experiments import profile_of
from libra_cli.bench.fidelity.checks import CheckResult
from libra_cli.bench.fidelity.run import LiveFidelity, Recorded, compared
from libra_cli.bench.report.terminal import Sheet
from libra_cli.bench.results import FORMAT
from libra_cli.core.records import StepRecord, TrajectoryRecord, TurnRecord
from libra_cli.core.types import TrajectoryId
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import recipe_of

WANTED = 0.08
"""Mean size of the error of a run's step time."""


def live_fidelity(
    run_dirs: Sequence[Path], profile_name: str, *, progress: Callable[[str], None]
) -> CheckResult:
    """Each run beside its simulation with a profile that was measured elsewhere.

    Raises:
        LibraError: a run or a profile that cannot be read, or that say nothing of one another.
    """
    profile = profile_of(profile_name)
    found = []
    for run_dir in run_dirs:
        progress(f"playing {run_dir.name} again")
        found.append(compared(read_run_dir(run_dir), profile))
    error = fmean(abs(one.step_error) for one in found)
    rows = [_row(one) for one in found]
    mark = "✓" if error <= WANTED else "✗"
    rows.append(("mean size of the errors", "", "", f"{error:.1%} {mark}", "", ""))
    notes = [
        f"wanted: a mean error of the step time of at most {WANTED:.0%}; + is simulated too slow",
        f"profile {profile.name}: {profile.provenance.get('measured', 'not measured here')}",
    ]
    columns = ("run", "step\nmeasured", "step\nsimulated", "error", "each\nstep", "tokens/s")
    sheet = Sheet("a finished run, and the same trajectories simulated", columns, rows, notes)
    told = {
        "format": FORMAT,
        "live_fidelity": {
            "profile": profile.name,
            "mean_error": error,
            "wanted": WANTED,
            "runs": [_told(one) for one in found],
        },
    }
    return CheckResult((sheet,), told)


def read_run_dir(run_dir: Path) -> Recorded:
    """What a replay needs of a run directory.

    Raises:
        StateError: there is no run, or not all of it.
    """
    with Reader(run_dir) as reader:
        steps = reader.rows(StepRecord)
        turns = reader.rows(TurnRecord)
        ended = reader.rows(TrajectoryRecord, "state = 'finished'")
    finished = frozenset(TrajectoryId(row.group_id, row.member, row.attempt) for row in ended)
    return Recorded(run_dir.name, recipe_of(run_dir), tuple(steps), tuple(turns), finished)


def _row(one: LiveFidelity) -> tuple[str, ...]:
    return (
        one.name,
        f"{one.recorded.step_s:.2f} s",
        f"{one.simulated.step_s:.2f} s",
        f"{one.step_error:+.1%}",
        f"{one.each_error:.0%}",
        f"{one.recorded.tokens_per_s:,.0f} / {one.simulated.tokens_per_s:,.0f}",
    )


def _told(one: LiveFidelity) -> dict[str, object]:
    return {
        "run": one.name,
        "steps": len(one.recorded.steps_s),
        "measured_step_s": one.recorded.step_s,
        "simulated_step_s": one.simulated.step_s,
        "step_error": one.step_error,
        "each_step_error": one.each_error,
        "train_error": one.train_error,
        "measured_tok_s": one.recorded.tokens_per_s,
        "simulated_tok_s": one.simulated.tokens_per_s,
    }
