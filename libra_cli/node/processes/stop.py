"""Stops everything of a run on this host, whoever is there to do it. Standard library only."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

from libra_cli.node.credentials import CREDENTIALS
from libra_cli.node.processes import temporary
from libra_cli.node.processes.ports import PORTS
from libra_cli.node.processes.proc import Marker
from libra_cli.node.processes.supervisor import StopResult, Supervisor

LAST_GRACE_S = 10.0
SOCKET = "agent.sock"
TOKEN = "token"
LIFE = "life"
"""A link that points nowhere: its text is a name that no other life of the run here has."""
WEIGHTS = "weights"
"""A link to this run's weight versions, so that their memory can be freed without an agent."""


def stop_everything(run_dir: Path) -> StopResult:
    """Stop what carries the marker, agent and guard too, and remove what it held in memory.

    The current directory is the run directory.
    """
    supervisor = Supervisor(run_dir, Marker.of(run_dir), report=lambda _: None)
    result = asyncio.run(supervisor.stop_all(LAST_GRACE_S))
    remove_traces(result)
    return result


def remove_traces(stopped: StopResult) -> None:
    """Remove what a run needs only while it lives; what processes use that are left, stays."""
    with suppress(OSError):
        shutil.rmtree(os.path.realpath(WEIGHTS), ignore_errors=True)
        for name in (WEIGHTS, SOCKET, TOKEN, CREDENTIALS, LIFE, PORTS):
            Path(name).unlink(missing_ok=True)
        if not stopped.leftovers:
            temporary.remove()
