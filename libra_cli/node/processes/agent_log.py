"""The log of an agent and its guard, ``agent.log`` in the run directory; standard library only."""

from __future__ import annotations

import os
import time

LOG = "agent.log"


def log(text: str) -> None:
    """Write a line; a full disk loses it, and nothing else."""
    try:
        os.write(2, f"{time.strftime('%F %T')} {text}\n".encode())
    except OSError:
        return


def open_log() -> int:
    """A descriptor of the log for a process that is started; of nothing if there is no room."""
    try:
        return os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
