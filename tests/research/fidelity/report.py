"""The comparison of the simulator with a recorded server, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from libra_cli.bench.report.sheets import Report
from libra_cli.bench.report.terminal import Sheet
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
