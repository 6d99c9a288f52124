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
from dataclasses import dataclass, replace
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

    @property
    def since_step(self) -> tuple[ModelUse, ...]:
        """The use since the newest step, or since the run began."""
        return tuple(self._since(use) for use in self._now.values())

    def _since(self, use: ModelUse) -> ModelUse:
        told = self._told.get(use.model, ModelUse(use.model, 0, 0.0, 0.0))
        return replace(use, busy_s=use.busy_s - told.busy_s, asked_s=use.asked_s - told.asked_s)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the step that is done: the use since the last call."""
        metrics: dict[str, float] = {}
        for use in self.since_step:
            metrics |= {_METRIC.format(use.model, count): getattr(use, count) for count in _COUNTS}
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


@dataclass(frozen=True, slots=True)
class CountedUse:
    """The ``uses`` of frozen models in so many ``seconds``, in which ``finished`` trajectories
    ended."""

    seconds: Seconds
    finished: int
    uses: tuple[ModelUse, ...]


def demands(
    counted: Sequence[CountedUse], latest: Sequence[CountedUse], trajectories: float
) -> tuple[ModelDemand, ...]:
    """Return what a step of so many trajectories asks of each model.

    How long a server works for a trajectory is told by all that was ``counted``, whoever served it
    then; how long requests were open, and how busy servers were, by the ``latest``, of today's
    servers.
    """
    names = sorted({use.model for one in latest for use in one.uses})
    return tuple(_demand(name, counted, latest, trajectories) for name in names)


def _demand(
    name: str, counted: Sequence[CountedUse], latest: Sequence[CountedUse], trajectories: float
) -> ModelDemand:
    work = _trajectory_use(name, counted)
    now = _trajectory_use(name, latest)
    seen = [(one.seconds, use) for one in latest for use in one.uses if use.model == name]
    served_s = sum(seconds * use.servers for seconds, use in seen)
    busy_s = sum(use.busy_s for _, use in seen)
    return ModelDemand(
        name,
        fmean(use.servers for _, use in seen),
        work.busy_s * trajectories,
        now.asked_s * trajectories,
        min(1.0, busy_s / served_s) if served_s else 0.0,
    )


def _trajectory_use(name: str, counted: Sequence[CountedUse]) -> ModelUse:
    """Return the use of a model by one trajectory, of those that ended; 0 servers."""
    ended = max(1, sum(one.finished for one in counted))
    uses = [use for one in counted for use in one.uses if use.model == name]
    busy_s, asked_s = sum(use.busy_s for use in uses), sum(use.asked_s for use in uses)
    return ModelUse(name, 0, busy_s / ended, asked_s / ended)
