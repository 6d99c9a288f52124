"""The monitor ``jsonl``: ``metrics.jsonl`` in the run directory, one JSON object a step.

Every run has it, whether its recipe names it or not.

pandas.read_json("runs/quickstart-1/metrics.jsonl", lines=True)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from libra_cli.runtime.monitors.protocol import MonitoredRun
from libra_cli.runtime.store.run_directory import append_whole

FILE = "metrics.jsonl"


class JsonLines:
    """Appends, so a run that is resumed goes on in its file."""

    def start(self, run: MonitoredRun) -> None:
        self._path = run.directory / FILE
        self._lines: list[str] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line, or keep it for the next step if nothing can be written now."""
        self._lines.append(json.dumps({"step": step, **metrics}) + "\n")
        with contextlib.suppress(OSError):
            self._write()

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line of their own, with the step of their weights."""
        self.log(step, metrics)

    def finish(self, state: str) -> None:
        self._write()

    def _write(self) -> None:
        lines = "".join(self._lines)
        if lines:
            append_whole(self._path, lines)
            self._lines.clear()
