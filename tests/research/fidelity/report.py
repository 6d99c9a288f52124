"""The comparisons of the simulator with what was recorded, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

from libra_cli.bench.report.sheets import Report
from libra_cli.bench.report.terminal import Sheet
from libra_cli.core.costs.profile import Profile
from tests.research.fidelity.run import WANTED_ERROR as WANTED_STEP_ERROR
from tests.research.fidelity.run import LiveFidelity
from tests.research.fidelity.server import (
    WANTED_CORRELATION,
    WANTED_ERROR,
    Fidelity,
    ServerComparison,
)


def server_report(compared: ServerComparison) -> Report:
    """A simulated server beside a recorded one."""
    recorded, found = compared.recorded, compared.fidelity
    shape = f"{recorded.model}, TP{recorded.tensor_parallel}"
    title = f"{shape}, {found.requests:,} requests; {compared.prices}"
    sheet = Sheet(title, ("simulated against recorded", "", "wanted", ""), _server_rows(found))
    return Report((sheet,), {"fidelity": {**asdict(found), "within": found.within}})


def _server_rows(found: Fidelity) -> list[Sequence[str]]:
    def error(name: str, value: float) -> Sequence[str]:
        return name, f"{value:+.1%}", f"within {WANTED_ERROR:.0%}", _mark(value, WANTED_ERROR)

    near = "✓" if found.correlation >= WANTED_CORRELATION else "✗"
    return [
        error("mean latency", found.mean_error),
        error("P99 latency", found.p99_error),
        error("makespan", found.makespan_error),
        (
            "correlation of latencies, request by request",
            f"{found.correlation:.4f}",
            f"≥ {WANTED_CORRELATION}",
            near,
        ),
        ("time from the first token to the last", f"{found.token_error:+.1%}", "", ""),
        ("time to the first token", f"{found.wait_error_s * 1e3:+.0f} ms", "", ""),
    ]


def _mark(error: float, wanted: float) -> str:
    return "✓" if abs(error) <= wanted else "✗"


def runs_report(found: Sequence[LiveFidelity], profile: Profile) -> Report:
    """Finished runs beside their simulations."""
    error = fmean(abs(one.step_error) for one in found)
    mean, wanted = f"{error:.1%} {_mark(error, WANTED_STEP_ERROR)}", f"{WANTED_STEP_ERROR:.0%}"
    rows = [*map(_run_row, found), ("mean size of the errors", "", "", mean, "", "")]
    notes = [
        f"wanted: a mean error of the step time of at most {wanted}; + is simulated too slow",
        f"profile {profile.name}: {profile.provenance.get('measured', 'not measured here')}",
    ]
    columns = ("run", "step\nmeasured", "step\nsimulated", "error", "each\nstep", "tokens/s")
    sheet = Sheet("a finished run, and the same trajectories simulated", columns, rows, notes)
    body = {
        "profile": profile.name,
        "mean_error": error,
        "wanted": WANTED_STEP_ERROR,
        "runs": [_run_json(one) for one in found],
    }
    return Report((sheet,), {"live_fidelity": body})


def _run_row(one: LiveFidelity) -> tuple[str, ...]:
    return (
        one.name,
        f"{one.recorded.step_s:.2f} s",
        f"{one.simulated.step_s:.2f} s",
        f"{one.step_error:+.1%}",
        f"{one.each_error:.0%}",
        f"{one.recorded.tokens_per_s:,.0f} / {one.simulated.tokens_per_s:,.0f}",
    )


def _run_json(one: LiveFidelity) -> dict[str, object]:
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
