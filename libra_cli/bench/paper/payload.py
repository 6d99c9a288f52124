"""Whether what tools return goes with how long a trajectory gets, in traces of other models."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from libra_cli.bench.paper.tables import Figure, PaperRow, PaperTable, Told
from libra_cli.core.types import Tokens, ToolOutcome
from libra_cli.sim.traces import RecordedEpisode, load_trace

CLASSES: tuple[tuple[str, Tokens, float, str], ...] = (
    ("below 8K", 0, 8_192, "about 1K"),
    ("8K to 40K", 8_192, 40_960, "12.5K at 21K"),
    ("beyond 40K", 40_960, float("inf"), "repeated failures"),
)
"""Lengths of whole trajectories, from and to, and what is published of their tools."""
TRACES: tuple[str, str] = ("moatless", "tau2bench")
LEAST = 5
"""Trajectories of a length below which nothing is told of it."""


def payload_table() -> PaperTable:
    """Tool tokens by length of the trajectory, and the share of calls that failed."""
    rows = []
    traces = [load_trace(name).episodes for name in TRACES]
    for name, least, most, published in CLASSES:
        found = [[one for one in episodes if least <= one.context < most] for episodes in traces]
        rows.append(PaperRow(f"tool tokens, {name}", published, *map(_tokens, found)))
        rows.append(PaperRow("  calls that failed", None, *map(_failed, found)))
    return PaperTable(
        "tool returns by length of the trajectory",
        tuple(rows),
        why=("the traces are of other models and tasks than R2E-Gym",),
        columns=TRACES,
    )


def _tokens(episodes: Sequence[RecordedEpisode]) -> Told:
    if len(episodes) < LEAST:
        return "too few"
    return Figure(fmean(sum(t.observation for t in one.turns) for one in episodes), "tokens")


def _failed(episodes: Sequence[RecordedEpisode]) -> Told:
    calls = [turn.outcome for one in episodes for turn in one.turns if turn.outcome is not None]
    if len(episodes) < LEAST or not calls:
        return "too few"
    return Figure(fmean(outcome is ToolOutcome.ERROR for outcome in calls), "share")
