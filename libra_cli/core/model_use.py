"""What trajectories ask of frozen models: counted in a run, and priced for a plan.

A run counts, for each model, the seconds of its servers with a request (``busy_s``) and the seconds
that requests were open, summed over them (``asked_s``). Of each step that is written down with the
step's other metrics, as ``models/NAME/servers``, ``/busy_s`` and ``/asked_s``.

Prices follow from these. A step's requests take the seconds of one server that they took before,
so n servers have as many busy seconds together as one, and a step lasts at least ``busy_s / n``.
While servers have no time left, requests share them: how long one is open falls as their number
rises (processor sharing, an upper bound on what a further server saves).

Limit: a server that has one request is as busy as one that has many, so one that could take more at
once is priced as if it could not; what was measured then says so at the next look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from libra_cli.core.types import Seconds

_METRIC = "models/{}/{}"
_COUNTS = ("servers", "busy_s", "asked_s")


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The use of a frozen model: ``servers`` that serve, their seconds with a request, and the
    seconds that requests were open; since the run began, or of a step."""

    model: str
    servers: float
    busy_s: Seconds
    asked_s: Seconds


class ModelUses:
    """The book of what has been counted, and of what of it was told with the last step."""

    def __init__(self) -> None:
        self._now: dict[str, ModelUse] = {}
        self._told: dict[str, ModelUse] = {}

    def saw(self, uses: Iterable[ModelUse]) -> None:
        """Take in the newest counts, which begin at nothing again with another controller."""
        for use in uses:
            before = self._now.get(use.model)
            if before is not None and use.busy_s < before.busy_s:
                self._told.pop(use.model, None)
            self._now[use.model] = use

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the step that is done: the use since the last call."""
        metrics: dict[str, float] = {}
        for name, use in self._now.items():
            told = self._told.get(name, ModelUse(name, 0, 0.0, 0.0))
            counts = (use.servers, use.busy_s - told.busy_s, use.asked_s - told.asked_s)
            metrics |= {
                _METRIC.format(name, count): value
                for count, value in zip(_COUNTS, counts, strict=True)
            }
        self._told = dict(self._now)
        return metrics


def uses_of(metrics: Mapping[str, float | None]) -> tuple[ModelUse, ...]:
    """Return the use of each model in a step, by the metrics of that step."""
    names = {name.split("/")[1] for name in metrics if name.startswith("models/")}
    return tuple(
        ModelUse(name, *(metrics.get(_METRIC.format(name, count)) or 0.0 for count in _COUNTS))
        for name in sorted(names)
    )


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """What a step asks of a frozen model, and how that went with so many ``servers``.

    ``busy_s`` and ``asked_s`` are seconds a step, ``busy`` is the share of the servers' time with a
    request.
    """

    model: str
    servers: float
    busy_s: Seconds
    asked_s: Seconds
    busy: float

    def step_s(self, servers: float) -> Seconds:
        """The least seconds of a step with so many servers; infinite with none, if any is asked."""
        if self.busy_s <= 0:
            return 0.0
        return self.busy_s / servers if servers > 0 else float("inf")

    def saved_s(self, servers: float) -> Seconds:
        """Seconds of a step, summed over trajectories, by which requests are open for less with so
        many servers; below 0 for more."""
        return self.asked_s * self.busy * (1 - self.servers / servers) if servers > 0 else 0.0


def demands(steps: Sequence[tuple[Seconds, tuple[ModelUse, ...]]]) -> tuple[ModelDemand, ...]:
    """Return the mean demand of steps: the seconds of each, and the use of models in it."""
    found: dict[str, list[tuple[Seconds, ModelUse]]] = {}
    for step_s, uses in steps:
        for use in uses:
            found.setdefault(use.model, []).append((step_s, use))
    return tuple(_demand(name, seen) for name, seen in sorted(found.items()))


def _demand(name: str, seen: Sequence[tuple[Seconds, ModelUse]]) -> ModelDemand:
    busy_s = fmean(use.busy_s for _, use in seen)
    served_s = fmean(step_s * use.servers for step_s, use in seen)
    return ModelDemand(
        name,
        fmean(use.servers for _, use in seen),
        busy_s,
        fmean(use.asked_s for _, use in seen),
        min(1.0, busy_s / served_s) if served_s else 0.0,
    )
