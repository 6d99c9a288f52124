"""The monitor ``wandb``: a Weights & Biases run with the run's own id, resumed with it.

The key is W&B's own: ``WANDB_API_KEY`` or what ``wandb login`` has written. ``WANDB_MODE=offline``
writes into the run directory, for ``wandb sync`` later. See docs.wandb.ai/models/track.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from libra_cli.config.errors import LibraError
from libra_cli.runtime.monitors.protocol import MonitoredRun
from libra_cli.runtime.monitors.samples import COLUMNS, SampledTrajectory, table_row

STEP = "train/step"
"""The x axis. Not W&B's own step, which cannot go back when the trainer does."""


class Wandb:
    """Metrics, the recipe as the config, and a table of sampled trajectories a step."""

    packages = ("wandb",)

    def __init__(
        self,
        *,
        project: str = "libra",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        """Take the arguments of ``wandb.init``; the name is the run's where none is given."""
        self._about: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "name": name,
            "group": group,
            "tags": list(tags),
        }

    def start(self, run: MonitoredRun) -> None:
        """Begin W&B's run, or go on with it."""
        import wandb

        # W&B would ask for a key on the terminal that the run is shown on.
        settings = wandb.Settings(silent=True, console="off", quiet=True)
        mode = wandb.setup(settings).settings.mode
        if mode == "online" and wandb.api.api_key is None:
            raise LibraError(
                "W&B has no key; type: export WANDB_API_KEY=..., or wandb login, or export"
                " WANDB_MODE=offline"
            )
        self._table = wandb.Table
        self._run = wandb.init(
            **self._about | {"name": self._about["name"] or run.id},
            id=run.id,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.recipe),
            settings=settings,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        run.note(f"W&B: {self._run.url or f'wandb sync {Path(self._run.dir).parent}'}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **metrics})

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand them to W&B's own process, at the step of their weights."""
        self.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[SampledTrajectory]) -> None:
        rows = [table_row(step, sample) for sample in samples]
        self._run.log({STEP: step, "samples": self._table(columns=list(COLUMNS), data=rows)})

    def finish(self, state: str) -> None:
        """Wait until W&B has everything; a failed run ends there with exit code 1."""
        self._run.finish(exit_code=int(state == "failed"))
