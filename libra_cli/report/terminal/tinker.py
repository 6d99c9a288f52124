"""What a person sees of a service of Tinker's SDK in a terminal: its clients and their adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from libra_cli.report.terminal.console import duration
from libra_cli.report.terminal.plots import Portable


def service_view(told: Mapping[str, Any]) -> RenderableType:
    """Draw what a service tells of itself (``TinkerService.status``)."""
    clients = told["clients"]
    title = Text.assemble(("libra tinker", "bold"), f"  {told['model']}", overflow="fold")
    loaded, most = told["adapters_on_servers"], told["most_adapters_on_servers"]
    facts = (
        f"{_number(len(clients), 'client')}, {_number(told['requests'], 'request')} under way, "
        f"{loaded} of {most} adapters on servers"
    )
    parts: list[RenderableType] = [title, Text(f"  {facts}")]
    if clients:
        parts += [Text(), Padding(_table(clients), (0, 0, 0, 2))]
    return Portable(Group(*parts))


def _table(clients: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("client", "adapter", "rank", "steps", "state", "samplers", "heard of"):
        table.add_column(name, justify="right" if name in ("rank", "steps", "samplers") else "left")
    for client in clients:
        own = str(client["samplers"]), f"{duration(client['heard_s'])} ago"
        rows = [
            (one["model"].rpartition(":")[2], str(one["rank"]), str(one["steps"]), _state(one))
            for one in client["adapters"]
        ] or [("", "", "", "")]
        for number, row in enumerate(rows):
            first = number == 0
            table.add_row(client["client"] if first else "", *row, *(own if first else ()))
    return table


def _state(adapter: Mapping[str, Any]) -> str:
    return "not saved" if adapter["unsaved"] else "saved" if adapter["steps"] else "new"


def _number(many: int, what: str) -> str:
    return f"{many} {what}{'' if many == 1 else 's'}"
