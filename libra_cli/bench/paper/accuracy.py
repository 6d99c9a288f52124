"""Routing accuracy: how often each rule names the bucket of the work left, and what it moves.

The rules, clock and buckets are those of ``libra bench routing``, on the workload like Search-R1 in
the place of the published one, and on a trace of real agents.
"""

from __future__ import annotations

from libra_cli.bench.config import Progress
from libra_cli.bench.paper.tables import Figure, PaperRow, PaperScale, PaperTable
from libra_cli.bench.paper.workloads import SEARCH
from libra_cli.bench.routing import RULES, RoutingRow, routing
from libra_cli.sim.traces import load_trace

REAL = "tau2bench"
PUBLISHED = {"published tree": 0.911, "attained service": 0.448}
"""Shares of Search-R1's requests in the right bucket (Libra, arXiv 2606.03077)."""


def accuracy_table(scale: PaperScale, progress: Progress) -> PaperTable:
    """Play every rule on both sets of trajectories and return what each was worth."""
    traces = (SEARCH.trace, load_trace(REAL))
    found = routing(traces, scale.seeds, progress)
    rows = []
    for rule in RULES:
        own = [[row for row in found if row.rule == rule and row.trace == t.name] for t in traces]
        right = PUBLISHED.get(rule)
        known = None if right is None else Figure(right, "share")
        rows.append(PaperRow(rule, known, *(_share(rows, "right") for rows in own)))
        moved = Figure(0.082, "share") if rule == "published tree" else None
        rows.append(PaperRow("  tokens moved", moved, *(_share(rows, "moved") for rows in own)))
        rows.append(PaperRow("  mean over the buckets", None, *(_share(r, "recall") for r in own)))
    rows.append(PaperRow("a predictor by embeddings", Figure(0.652, "share"), None, None))
    return PaperTable(
        "routing: the right bucket of three",
        tuple(rows),
        why=(
            "the published buckets and traffic, and what counts as right, are not known",
            "the published tree takes nothing off for what was spent since its node",
        ),
        columns=(SEARCH.name, REAL),
    )


def _share(rows: list[RoutingRow], name: str) -> Figure:
    return Figure.over([getattr(row, name) for row in rows], "share")
