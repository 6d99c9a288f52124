"""What is made of a server's counters besides what libra itself needs to know.

To add a metric, add a line to one of the tables. By its name it reaches the readings of a server
(``SampleRecord.metrics_json``), ``libra status`` and its ``--json``, and ``report.html``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

Page: TypeAlias = Mapping[str, float]
"""Gauges and counters by their names; what there is, ``libra_cli.node.rollout.engine`` says."""


def mean_since(observed: str) -> Callable[[Page, Page], float | None]:
    """The mean of what was observed between two readings; None if that is nothing."""

    def mean(before: Page, now: Page) -> float | None:
        total, count = (
            now.get(f"{observed}_{part}", 0.0) - before.get(f"{observed}_{part}", 0.0)
            for part in ("sum", "count")
        )
        return total / count if count > 0 else None

    return mean


def share_since(part: str, whole: str) -> Callable[[Page, Page], float | None]:
    """What one counter grew by between two readings, of what another did; None if that is 0."""

    def share(before: Page, now: Page) -> float | None:
        grew, by = (now.get(name, 0.0) - before.get(name, 0.0) for name in (part, whole))
        return grew / by if by > 0 else None

    return share


METRICS: Mapping[str, Callable[[Page, Page], float | None]] = {
    # Seconds that a turn waited inside vLLM.
    "request_queue_time_s": mean_since("queue_time_s"),
}
"""Functions that compute each metric from the reading before (empty at first) and this one."""

PREFILL: Mapping[str, Callable[[Page, Page], float | None]] = {
    # Tokens of contexts that it has computed since its start, once or again.
    "prefill_tokens": lambda before, now: now["prefill_tokens"],
}
"""Functions that compute the metrics of servers with a prefix cache."""

SPECULATIVE: Mapping[str, Callable[[Page, Page], float | None]] = {
    # Of tokens that drafts guessed, those that were right.
    "draft_acceptance": share_since("accepted_tokens", "draft_tokens"),
    # Of steps, those with drafts.
    "draft_steps": share_since("draft_steps", "steps"),
}
"""Functions that compute the metrics of servers with speculative decoding, from two readings."""


HEAD: Mapping[str, Callable[[Page, Page], float | None]] = {
    # Steps of training since the policy that the head was made for, which is its version 0.
    "draft_lag": lambda before, now: now["draft_lag"],
}
"""Functions that compute the metrics of servers whose drafts come from a head."""


def named(before: Page, now: Page) -> dict[str, float | None]:
    """Every metric that a server with these counters has."""
    metrics = {
        **METRICS,
        **(PREFILL if "prefill_tokens" in now else {}),
        **(SPECULATIVE if "draft_steps" in now else {}),
        **(HEAD if "draft_lag" in now else {}),
    }
    return {name: value(before, now) for name, value in metrics.items()}
