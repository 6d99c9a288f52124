"""The monitor ``tensorboard``: event files in the run directory, written by tensorboardX.

TensorBoard itself, which shows them, need not be installed beside libra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from libra_cli.runtime.monitors.protocol import MonitoredRun
from libra_cli.runtime.monitors.samples import SampledTrajectory, as_markdown


class TensorBoard:
    """A scalar for every metric, and the sampled trajectories as text."""

    packages = ("tensorboardX",)

    def __init__(self, *, directory: str | None = None) -> None:
        """``directory`` is where runs lie side by side; null: ``tensorboard`` of the run's own."""
        self._directory = directory
        self._last: int | None = None
        self._writer: Any = None

    def start(self, run: MonitoredRun) -> None:
        """Choose the directory of the event files, and note the command that shows them."""
        from tensorboardX import SummaryWriter

        self._open = SummaryWriter
        own = run.directory / "tensorboard"
        self._path = Path(self._directory).expanduser() / run.id if self._directory else own
        shown = self._path.parent if self._directory else self._path
        run.note(f"TensorBoard: tensorboard --logdir {shown}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write them; what was written before of this step and later ones is hidden."""
        if self._last is None or step <= self._last:
            self._close()
            # Files of one second would have the same name.
            suffix = f".from-{step}"
            self._writer = self._open(str(self._path), purge_step=step, filename_suffix=suffix)
        self._last = step
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write them, beside what is known of the step."""
        if self._writer is None:
            self._writer = self._open(str(self._path), filename_suffix=".evaluation")
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[SampledTrajectory]) -> None:
        self._writer.add_text("samples", "\n".join(map(as_markdown, samples)), step)
        self._writer.flush()

    def finish(self, state: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
