"""What ``libra ps`` shows: what runs own on hosts, and who else holds their GPUs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from libra_cli.config.text import printable
from libra_cli.report.terminal.plots import Portable


def owned_view(answers: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A table of processes, within 80 columns, and what is not ours below it."""
    told = [(one["node"], one["told"]) for one in answers if one["told"] is not None]
    parts: list[RenderableType] = []
    rows = [(node, row, found["leases"]) for node, found in told for row in found["processes"]]
    rows.sort(key=lambda one: [str(one[1][name]) for name in ("run", "node", "process")])
    if rows:
        parts.append(_table(rows))
    elif told:
        which = "these hosts" if len(told) == len(answers) else "the hosts that answered"
        parts.append(Text(f"no run owns anything on {which}"))
    for node, found in told:
        parts += [Text(_other(node, one)) for one in found["others"]]
    return Portable(Group(*parts))


def _table(rows: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold", ratio=3)
    for name in ("node", "process"):
        table.add_column(name, overflow="fold", ratio=2)
    for name in ("pid", "since", "GPU MiB", "lease", "heard"):
        table.add_column(name, justify="right", no_wrap=True)
    for asked, row, leases in rows:
        lease = leases.get(f"{row['run']}/{row['node']}", {})
        table.add_row(
            *(printable(str(row[name])) for name in ("run",)),
            printable(str(row["node"] or asked)),
            printable(str(row["process"])),
            str(row["pid"]),
            _ago(time.time() - float(row["since"])),
            str(row["gpu_mib"] or "-"),
            _ago(float(lease["left_s"])) if lease else "none",
            _ago(float(lease["heard_s"])) if lease else "-",
        )
    return table


def _other(node: str, one: Mapping[str, Any]) -> str:
    who = printable(f"{one['user'] or 'somebody'}, pid {one['pid']}: {one['command'] or '?'}")
    return f"not ours, on {node}: {one['gpu_mib']} MiB by {who}"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
