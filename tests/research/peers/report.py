"""What libra and its peers took, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from libra_cli.bench.report.sheets import Report
from libra_cli.bench.report.terminal import Sheet, amount
from tests.research.peers.runs import (
    SMOOTHED,
    SUCCESS,
    WARM_STEPS,
    PeerDifference,
    PeerRow,
    differences,
)


def peers_report(rows: Sequence[PeerRow]) -> Report:
    """What libra and its peers took, run by run."""
    table = [
        (
            row.contender,
            f"{row.latency_s:g}",
            str(row.seed),
            *("" if value is None else amount(value) for value in (row.step_s, row.first_s)),
            "never" if row.success_s is None else amount(row.success_s),
            f"{row.reward:.3f}",
            f"{row.area:.3f}",
            f"{row.by_policy:.3f}",
        )
        for row in rows
    ]
    found = differences(rows)
    notes = [
        f"step: median, without the first {WARM_STEPS}; first: from launch to the end of step 1",
        f"learned: from launch until the mean reward of {SMOOTHED} steps was {SUCCESS}",
        f"reward: mean of the last {SMOOTHED} steps; area: of all steps",
        "policy: mean over the versions of the policy that generated the tokens",
        *map(_peer_difference, found),
    ]
    head = ("", "tool\ns", "seed", "step\ns", "first\ns", "learned\ns", "reward", "area", "policy")
    sheet = Sheet("libra and its peers, on this machine", head, table, notes)
    body = {
        "peers": [asdict(row) for row in rows],
        "differences": [asdict(one) for one in found],
    }
    return Report((sheet,), body)


def _peer_difference(one: PeerDifference) -> str:
    half = "" if one.ci95 is None else f" ± {one.ci95[1] - one.mean:.3f}"
    where = f"tools of {one.latency_s:g} s, {one.seeds} seeds"
    return f"libra less trl, {where}: {one.number} {one.mean:+.3f}{half}"
