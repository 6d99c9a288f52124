"""What is read from vLLM's ``/metrics`` besides what libra itself needs to know.

To add a metric, add a line to ``METRICS``. By its name it reaches the readings of a server
(``SampleRecord.metrics_json``), ``libra status`` and its ``--json``, and ``report.html``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

Page: TypeAlias = Mapping[str, float]
"""Gauges and counters by their names there, histograms as ``_sum`` and ``_count``; as
``client.parse_metrics`` gives them."""


def mean_since(histogram: str) -> Callable[[Page, Page], float | None]:
    """The mean of what a histogram observed between two readings; None if that is nothing."""

    def mean(before: Page, now: Page) -> float | None:
        total, count = (
            now.get(f"{histogram}_{part}", 0.0) - before.get(f"{histogram}_{part}", 0.0)
            for part in ("sum", "count")
        )
        return total / count if count > 0 else None

    return mean


METRICS: Mapping[str, Callable[[Page, Page], float | None]] = {
    # Seconds a request waited inside vLLM; vLLM tells of a request when it ends.
    "request_queue_time_s": mean_since("vllm:request_queue_time_seconds"),
}
"""Name -> its value, from the reading before (empty at first) and this one."""


def named(before: Page, now: Page) -> dict[str, float | None]:
    """Every metric of ``METRICS``."""
    return {name: value(before, now) for name, value in METRICS.items()}
