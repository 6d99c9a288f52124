"""The monitor ``trackio``: a run of Hugging Face's Trackio, in its SQLite file or on a Space.

``TRACKIO_DIR`` says where the file is, ``HF_TOKEN`` who may write to a Space, and ``trackio show``
shows it. See huggingface.co/docs/trackio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libra_cli.runtime.monitors.protocol import MonitoredRun
from libra_cli.runtime.monitors.samples import COLUMNS, SampledTrajectory, table_row


class Trackio:
    """Metrics, the recipe as the config, and a table of sampled trajectories a step."""

    packages = ("trackio",)

    def __init__(
        self,
        *,
        project: str = "libra",
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
    ) -> None:
        """Take the arguments of ``trackio.init``; the name is the run's where none is given."""
        self._about: dict[str, Any] = {
            "project": project,
            "name": name,
            "group": group,
            "space_id": space_id,
            "server_url": server_url,
        }

    def start(self, run: MonitoredRun) -> None:
        """Begin Trackio's run, or go on with it."""
        import trackio

        self._table = trackio.Table
        self._run = trackio.init(
            **self._about | {"name": self._about["name"] or run.id},
            config=dict(run.recipe),
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # the controller's, where nothing is trained
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand them to Trackio's own thread, at the step of their weights."""
        self.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[SampledTrajectory]) -> None:
        rows = [table_row(step, sample) for sample in samples]
        self._run.log({"samples": self._table(columns=list(COLUMNS), data=rows)}, step=step)

    def finish(self, state: str) -> None:
        """Wait until Trackio has written everything."""
        self._run.finish()
