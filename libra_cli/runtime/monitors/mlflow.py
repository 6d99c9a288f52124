"""The monitor ``mlflow``: a run of an MLflow server, found again by a tag when it is resumed.

mlflow-skinny is enough. ``MLFLOW_TRACKING_USERNAME``, ``_PASSWORD`` or ``_TOKEN`` say who writes. A
file store (``file:...``) wants ``MLFLOW_ALLOW_FILE_STORE=true``. See mlflow.org/docs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from libra_cli.config.errors import LibraError
from libra_cli.runtime.monitors.protocol import MonitoredRun
from libra_cli.runtime.monitors.samples import SampledTrajectory, as_markdown

TAG = "libra.run"
"""The tag of an MLflow run that holds the id of libra's run."""
_STATES = {"finished": "FINISHED", "failed": "FAILED"}


class Mlflow:
    """Metrics, the recipe and the sampled trajectories as files of the run."""

    packages = ("mlflow",)

    def __init__(self, *, tracking_uri: str | None = None, experiment: str = "libra") -> None:
        """Connect to nothing yet; a null ``tracking_uri`` means that of ``MLFLOW_TRACKING_URI``."""
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._experiment = experiment

    def start(self, run: MonitoredRun) -> None:
        """Begin MLflow's run, or go on with it."""
        if self._uri is None:
            raise LibraError("MLflow has no server; type: export MLFLOW_TRACKING_URI=http://...")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would tell its makers
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client: Any = MlflowClient(self._uri)
        self._run_id = self._find(run) or self._create(run)
        run.note(f"MLflow: experiment {self._experiment}, run {self._run_id}")

    def _find(self, run: MonitoredRun) -> str | None:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            self._experiment_id = self._client.create_experiment(self._experiment)
            return None
        self._experiment_id = found.experiment_id
        runs = self._client.search_runs([self._experiment_id], f"tags.`{TAG}` = '{run.id}'")
        if not runs:
            return None
        self._client.update_run(runs[0].info.run_id, status="RUNNING")
        return str(runs[0].info.run_id)

    def _create(self, run: MonitoredRun) -> str:
        tags = {TAG: run.id}
        made = self._client.create_run(self._experiment_id, tags=tags, run_name=run.id)
        self._client.log_dict(made.info.run_id, dict(run.recipe), "recipe.json")
        return str(made.info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        rows = [self._metric(key, value, now_ms, step) for key, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send them, at the step of their weights; MLflow takes no ``@`` in a name."""
        self.log(step, {key.replace("@", "_at_"): value for key, value in metrics.items()})

    def log_samples(self, step: int, samples: Sequence[SampledTrajectory]) -> None:
        """Store the sampled trajectories as ``samples/step-NNNNNN.md`` of the run."""
        text = "\n".join(map(as_markdown, samples))
        self._client.log_text(self._run_id, text, f"samples/step-{step:06}.md")

    def finish(self, state: str) -> None:
        self._client.set_terminated(self._run_id, _STATES.get(state, "KILLED"))
