"""``libra status``: what a run looks like right now."""

from __future__ import annotations

import time
from pathlib import Path

from libra_cli.report.status.summary import RunSummary, summary
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import newest_run


def status(run_dir: Path | None) -> RunSummary:
    """``libra status``: of this run, or of the newest one.

    Raises:
        StateError: there is no such run.
    """
    with Reader(run_dir or newest_run()) as reader:
        return summary(reader, now=time.time())
