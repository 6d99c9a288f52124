"""Keeps the logs of a run on one host within a bound, while processes write straight into them.

A log that has grown beyond ``MOST_BYTES`` is copied to ``<name>.1``, in place of the copy before,
and emptied. Its writers append, so they go on at its beginning; what they write in the moment
between the two is lost. So a log and its copy take at most ``2 * MOST_BYTES``, and twice what is
written in ``EVERY_S``. Where the disk has no room for a copy, the log is emptied without one.
Standard library only.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from libra_cli.node.processes.private_files import private

MOST_BYTES = 64 * 1024**2
EVERY_S = 15.0


def rotate(logs: list[Path], most_bytes: int = MOST_BYTES) -> list[Path]:
    """Copy and empty the logs that are too long; returns them."""
    too_long = [log for log in logs if _size(log) > most_bytes]
    for log in too_long:
        copy = log.with_name(f"{log.name}.1")
        try:
            copy.unlink(missing_ok=True)
            with log.open("rb") as source, open(copy, "xb", opener=private) as target:
                shutil.copyfileobj(source, target)
        except OSError:  # a full disk, which this shall end
            with suppress(OSError):
                copy.unlink()
        with suppress(OSError):
            os.truncate(log, 0)
    return too_long


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
