"""The row of a step, whose numbers have the names that monitors are told.

All other rows are those of the run itself (``core.records``, ``runtime.store.reader``). Times are
seconds since the epoch, everything else says its unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepRow:
    """An optimizer step of the run."""

    step: int
    started_at: float
    ended_at: float
    metrics: Mapping[str, float] = field(hash=False)
    """Metrics by the names of ``core.metric_names``, as monitors are told them; what is not known
    is left out. ``libra help monitors`` has the table with units.
    """
    checkpoint: str
    """Path of the checkpoint on the hosts that train; empty if none was written."""
