"""Runs that may be meant where a directory is none."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from libra_cli.runtime.store.schema import DATABASE

RUNS = Path("runs")
"""Where runs are looked for that are not named."""


def command_for_another(run_dir: Path) -> str:
    """Return the command that shows a run of a similar name, or the newest, or that makes one."""
    places = dict.fromkeys(one.absolute() for one in (run_dir.absolute().parent, RUNS))
    found = [one for place in places for one in place.glob(f"*/{DATABASE}")]
    if not found:
        return "libra quickstart makes a run"
    names = [one.parent.name for one in found]
    close = difflib.get_close_matches(run_dir.name, names, n=1)
    newest = max(found, key=lambda one: one.stat().st_mtime)
    meant = found[names.index(close[0])] if close else newest
    return f"libra status {os.path.relpath(meant.parent)}"
