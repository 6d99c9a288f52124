"""What a monitor is: an object that is told how a run starts, each step's metrics, and its end.

    class Wandb:
        def start(self, run: MonitoredRun) -> None:
            self._run = wandb.init(id=run.id, config=dict(run.recipe), resume="allow")

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            self._run.log(dict(metrics), step=step)

        def finish(self, state: str) -> None:
            self._run.finish(exit_code=int(state == "failed"))

**How a recipe names it.** ``run.monitors`` lists names: those that ship with libra, entry points of
group ``libra.monitors``, or ``package.module:attribute`` (``config.plugins``). Each leads to a
callable without arguments that makes one monitor. It is imported by the controller, so its package
must be installed there, and only there.

**What it is told.** ``start`` once, then ``log`` for every optimizer step, then ``finish`` once. It
is made and called in a thread of its own, so it may be slow: the run waits for it at the end only,
for ``FINISH_S``. After a restart of the trainer a step may be logged again, and what was said of it
before no longer holds.

**What happens if it fails.** A monitor that raises is told of once, on the terminal, and is called
no more; the run goes on. One whose module cannot be imported ends the run before it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from libra_cli.config.plugins import PluginGroup

MONITORS = PluginGroup(
    "libra.monitors",
    "monitor",
    {
        "jsonl": "libra_cli.runtime.monitors.jsonl:JsonLines",
    },
)
FINISH_S = 10.0
"""Seconds that the end of a run waits for a monitor to take in the rest."""


@dataclass(frozen=True, slots=True)
class MonitoredRun:
    """The run that starts, or goes on."""

    id: str
    """The same when it is resumed."""
    directory: Path
    """On the controller; a monitor may write there."""
    recipe: Mapping[str, Any]
    """As in ``recipe.json``: resolved, with every default, secrets masked."""


class Monitor(Protocol):
    """See the page above."""

    def start(self, run: MonitoredRun) -> None:
        """The hosts are about to be asked for what the run needs."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Optimizer step ``step`` is done.

        ``metrics`` has every number of its ``StepRecord`` (units are told there), the trainer's and
        the loss's by their own names. What is unknown or not finite is left out.
        """

    def finish(self, state: str) -> None:
        """The run is over: ``finished``, ``failed`` or ``stopped``."""
