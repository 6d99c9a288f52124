"""Writes the reason of a stall: which process, what its log ends with, and the next command."""

from __future__ import annotations

import asyncio
from typing import Protocol

from libra_cli.config.text import one_line
from libra_cli.core.types import Seconds
from libra_cli.runtime.supervision.failures import words_of

TAIL_LINES = 3
LINE_CHARACTERS = 160
TAIL_S = 5.0
"""How long the report may wait for the end of the log."""


class TailReader(Protocol):
    """Reads the end of a process's log; ``runtime.hosts.host`` does."""

    async def tail(self, process: str, lines: int = 20) -> str:
        """Return the last lines of a process's log; raises LibraError."""
        ...


async def stall_reason(
    host: TailReader, node: str, process: str, what: str, silent_s: Seconds
) -> str:
    """Name the host, the process, what it was at, the end of its log and the next command."""
    try:
        async with asyncio.timeout(TAIL_S):
            lines = (await host.tail(process, TAIL_LINES)).splitlines()
        tail = " | ".join(one_line(line)[:LINE_CHARACTERS] for line in lines)
    except Exception as error:  # noqa: BLE001  that it has stalled must be told in any case
        tail = f"cannot be read: {words_of(error)}"
    return (
        f"{process} on {node} made no progress for {silent_s:.0f} s {what}; the end of its log: "
        f"{tail or 'nothing'}; next: libra logs {node} {process}"
    )
