"""What a monitor is: an object that is told how a run starts, each step's metrics, and its end.

    class Printer:
        def __init__(self, *, prefix: str = "") -> None:
            self._prefix = prefix

        def start(self, run: MonitoredRun) -> None:
            run.note(f"{self._prefix}{run.id} begins")

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            print(self._prefix, step, metrics["reward/mean"])

        def finish(self, state: str) -> None:
            print(self._prefix, state)

**How a recipe names it.** ``run.monitors`` lists names, or maps them to arguments: those that ship
with libra, entry points of group ``libra.monitors``, or ``package.module:attribute``
(``config.plugins``). Each leads to a callable that makes one monitor and takes the arguments as
keywords. It is imported by the controller, so its package must be installed there, and only there.
Names of packages in its attribute ``packages`` are looked for before the run starts.

**What it is told.** ``start`` once, then ``log`` for every optimizer step, then ``finish`` once. It
is made and called in a thread of its own, so it may be slow: the run waits for it at the end only,
for ``FINISH_S``. What it has not taken in waits in a queue of ``QUEUE`` calls; while that is full,
what comes is lost to it, which is told once. After a restart of the trainer a step may be logged
again, and what was said of it before no longer holds.

**What it may ask for.** With a method ``log_samples(step, samples)`` it is shown some
``SampledTrajectory`` after each step. With a method ``log_evaluation(step, metrics)`` it is told
each evaluation that has finished, of the weights of ``step``, which may come after ``log`` of later
steps. With a method ``saw(record)`` and an attribute ``records``,
classes of ``core.records``, it is told every record of these classes as it is saved.

**What happens if it fails.** A monitor that raises is told of once, on the terminal, and is called
no more; the run goes on. One whose module or packages are not there, or that does not take its
arguments, ends the run before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from libra_cli.config.plugins import PluginGroup

MONITORS = PluginGroup(
    "libra.monitors",
    "monitor",
    {
        "jsonl": "libra_cli.runtime.monitors.jsonl:JsonLines",
        "tensorboard": "libra_cli.runtime.monitors.tensorboard:TensorBoard",
        "wandb": "libra_cli.runtime.monitors.wandb:Wandb",
        "trackio": "libra_cli.runtime.monitors.trackio:Trackio",
        "mlflow": "libra_cli.runtime.monitors.mlflow:Mlflow",
        "prometheus": "libra_cli.runtime.monitors.prometheus:Prometheus",
        "opentelemetry": "libra_cli.runtime.monitors.opentelemetry:OpenTelemetry",
    },
)
FINISH_S = 30.0
"""Seconds that the end of a run waits for all monitors to take in the rest."""
QUEUE = 10_000
"""Most calls that may wait for a monitor."""


def _say_nothing(line: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class MonitoredRun:
    """What a monitor is told of the run when it starts, or goes on."""

    id: str
    """The name of the run, which stays the same when it is resumed."""
    directory: Path
    """The run directory on the controller, in which a monitor may write."""
    recipe: Mapping[str, Any]
    """The recipe as in ``recipe.json``: resolved, with every default, secrets masked."""
    note: Callable[[str], None] = _say_nothing
    """Shows a line to whoever started the run; from any thread."""


class Monitor(Protocol):
    """What libra calls of a monitor; the module's docstring says when."""

    def start(self, run: MonitoredRun) -> None:
        """The hosts are about to be asked for what the run needs."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Optimizer step ``step`` is done.

        ``metrics`` are by the names of ``core.metric_names``, which has their units; what the loss,
        the rollout backend and the environment name is among them. What is unknown or not finite is
        left out.
        """

    def finish(self, state: str) -> None:
        """The run is over: ``finished``, ``failed`` or ``stopped``."""
