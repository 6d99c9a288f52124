"""Where the seconds of the newest trajectories went, and whether environments hold up the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra_cli.config.errors import StateError
from libra_cli.core.frozen.bottleneck import model_bottleneck, model_loads
from libra_cli.core.records import StepRecord
from libra_cli.core.trajectory_time import environment_bottleneck, places_of
from libra_cli.report.status.steps import RECENT, IdlePart
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import recipe_of


@dataclass(frozen=True, slots=True)
class PlayingPart:
    """Seconds of a trajectory, means over those that have finished in the last ``RECENT`` steps."""

    trajectories: int
    waiting_s: float | None
    environment_s: float | None
    queue_s: float | None
    decode_s: float | None
    full: float | None
    """Share of the time in which a group would have begun, had hosts held more episodes."""
    bottleneck: str
    """A sentence that says that training waits for environments, or a frozen model they ask; empty
    if it does not."""

    @property
    def total_s(self) -> float | None:
        """The seconds of all four; None where nobody knows them."""
        parts = (self.waiting_s, self.environment_s, self.queue_s, self.decode_s)
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None


def playing(reader: Reader, steps: Sequence[StepRecord], idle: IdlePart) -> PlayingPart:
    """Return the means; all are None where no trajectory was played, or an older libra wrote."""
    recent = steps[-RECENT:]
    since = recent[0].free_at if recent else 0.0
    time, full = reader.trajectory_time(since), _full(recent)
    if time is None:
        return PlayingPart(0, None, None, None, None, full, "")
    try:
        recipe = recipe_of(reader.run_dir)
    except StateError:
        bottleneck = ""
    else:
        places, waits = places_of(recipe.environment, recipe.agent), idle.recent_training
        loads = model_loads(recipe.models, reader.slots())
        bottleneck = model_bottleneck(loads, time, training_idle=waits) or environment_bottleneck(
            time, training_idle=waits, places=places, full=full or 0.0
        )
    return PlayingPart(
        time.trajectories,
        time.waiting_s,
        time.environment_s,
        time.queue_s,
        time.decode_s,
        full,
        bottleneck,
    )


def _full(steps: Sequence[StepRecord]) -> float | None:
    known = [(step.batch.get("places_full_s"), step.period_s) for step in steps]
    counted = [(full_s, period_s) for full_s, period_s in known if full_s is not None]
    total = sum(period_s for _, period_s in counted)
    return sum(full_s for full_s, _ in counted) / total if total else None
