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

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from libra_cli.core.types import Seconds

_METRIC = "models/{}/{}"
_COUNTS = ("servers", "busy_s", "asked_s")


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The use of a frozen model: ``servers`` that serve, their seconds with a request, the seconds
    that requests were open, and how many (POST) were ``answered``; since the run began, or of a
    step. ``open`` requests have no answer now."""

    model: str
    servers: float
    busy_s: Seconds
    asked_s: Seconds
    open: int = 0
    answered: int = 0


def summed(uses: Iterable[ModelUse]) -> tuple[ModelUse, ...]:
    """Return one use for each model: all that were told of it, taken together."""
    found: dict[str, ModelUse] = {}
    for use in uses:
        before = found.get(use.model, ModelUse(use.model, 0, 0.0, 0.0))
        found[use.model] = ModelUse(
            use.model,
            before.servers + use.servers,
            before.busy_s + use.busy_s,
            before.asked_s + use.asked_s,
            before.open + use.open,
            before.answered + use.answered,
        )
    return tuple(found.values())


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
    def since_begin(self) -> tuple[ModelUse, ...]:
        """The use since the controller began."""
        return tuple(self._now.values())

    @property
    def since_step(self) -> tuple[ModelUse, ...]:
        """The use since the newest step, or since the run began."""
        return tuple(self._since(use) for use in self._now.values())

    def _since(self, use: ModelUse) -> ModelUse:
        told = self._told.get(use.model, ModelUse(use.model, 0, 0.0, 0.0))
        return replace(
            use,
            busy_s=use.busy_s - told.busy_s,
            asked_s=use.asked_s - told.asked_s,
            answered=use.answered - told.answered,
        )

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

    def of(name: str) -> ModelUse:
        servers, busy_s, asked_s = (
            metrics.get(_METRIC.format(name, count)) or 0.0 for count in _COUNTS
        )
        return ModelUse(name, servers, busy_s, asked_s)

    return tuple(map(of, sorted(names)))


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
    """The ``uses`` of frozen models in so many ``seconds``, by ``trajectories`` that ended then."""

    seconds: Seconds
    trajectories: float
    uses: tuple[ModelUse, ...]


def demands(
    counted: Sequence[CountedUse], latest: Sequence[CountedUse], trajectories: float
) -> tuple[ModelDemand, ...]:
    """Return what a step of so many trajectories asks of each model; nothing where none has ended.

    How long a server works for a trajectory is told by all that was ``counted``, whoever served it
    then; how long requests were open, and how busy servers were, by the ``latest``, of today's
    servers.
    """
    known = [seen for seen in (counted, latest) if any(one.trajectories for one in seen)]
    if not known:
        return ()
    counted, latest = known[0], known[-1]
    names = sorted({use.model for one in latest for use in one.uses})
    return tuple(_demand(name, counted, latest, trajectories) for name in names)


def _demand(
    name: str, counted: Sequence[CountedUse], latest: Sequence[CountedUse], trajectories: float
) -> ModelDemand:
    seen = [(one.seconds, use) for one in latest for use in one.uses if use.model == name]
    served_s = sum(seconds * use.servers for seconds, use in seen)
    busy_s = sum(use.busy_s for _, use in seen)
    return ModelDemand(
        name,
        fmean(use.servers for _, use in seen),
        _of_a_trajectory(name, counted).busy_s * trajectories,
        _of_a_trajectory(name, latest).asked_s * trajectories,
        min(1.0, busy_s / served_s) if served_s else 0.0,
    )


def _of_a_trajectory(name: str, counted: Sequence[CountedUse]) -> ModelUse:
    """Return the use of a model by one trajectory, of those that ended; 0 servers."""
    ended = sum(one.trajectories for one in counted)
    uses = [use for one in counted for use in one.uses if use.model == name]
    busy_s, asked_s = sum(use.busy_s for use in uses), sum(use.asked_s for use in uses)
    return ModelUse(name, 0, busy_s / ended, asked_s / ended)


class AskedModels:
    """What the newest steps asked of frozen models, by the trajectories that ended in them.

    All that ask are counted, those too that are not trained on: a server does not tell them apart.
    """

    def __init__(self, steps: int) -> None:
        """Nothing is known yet; so many ``steps`` are kept."""
        self._counted: deque[CountedUse] = deque(maxlen=steps)
        #: The steps under today's plan, and under the newest one before that had any.
        self._latest: deque[CountedUse] = deque(maxlen=steps)
        self._before: tuple[CountedUse, ...] = ()
        #: Trajectories that have ended since the newest step, and since the run began.
        self._ended = self._ever = 0

    def begin(self) -> None:
        """Take note that the run begins, or goes on: nothing is in play."""
        self._ended = self._ever = 0

    def ended(self) -> None:
        """Count a trajectory that has ended."""
        self._ended += 1
        self._ever += 1

    def new_plan(self) -> None:
        """Take note that what follows is under another plan."""
        self._before = tuple(self._latest) or self._before
        self._latest.clear()

    def step(self, seconds: Seconds, uses: tuple[ModelUse, ...], *, is_planned: bool) -> None:
        """Take in a step that took so long; ``is_planned``: it trained under today's plan."""
        ended, self._ended = self._ended, 0
        if not uses:
            return
        self._counted.append(CountedUse(seconds, ended, uses))
        if is_planned:
            self._latest.append(self._counted[-1])

    def demands(self, steps: int, trajectories: float) -> tuple[ModelDemand, ...]:
        """Return what a step of so many trajectories asks, by the newest ``steps``."""
        counted = list(self._counted)[-steps:]
        latest = list(self._latest)[-steps:] or self._before or counted
        return demands(counted, latest, trajectories)

    def last_asked(self, uses: Iterable[ModelUse]) -> int:
        """Return how many trajectories wait for their last answer, by the ``uses`` since the run
        began: for each model its open requests times the trajectories that an answer has ended, in
        the mean; of several models the most.

        Limit: a trajectory that never asks counts as ended by an answer, and one that waits until
        its client may ask (a judge's ``concurrency``) has no open request.
        """
        counts = (use.open * self._ever / use.answered for use in uses if use.answered)
        return round(max(counts, default=0.0))

    def first_demands(
        self,
        uses: Iterable[ModelUse],
        seconds: Seconds,
        under_way: Sequence[float],
        trajectories: float,
    ) -> tuple[ModelDemand, ...]:
        """Return what a step asks, by the ``uses`` in the ``seconds`` before the first step's end.

        ``under_way`` are the shares, 0 to 1, of trajectories that have been played so far: as much
        of what each asks is taken to have been asked, and is answered or open.
        """
        return tuple(
            demand for use in uses for demand in self._first(use, seconds, under_way, trajectories)
        )

    def _first(
        self, use: ModelUse, seconds: Seconds, under_way: Sequence[float], trajectories: float
    ) -> tuple[ModelDemand, ...]:
        asked = use.answered + use.open
        answered = use.answered / asked if asked else 1.0
        counted = [CountedUse(seconds, answered * (self._ended + sum(under_way)), (use,))]
        found = demands(counted, counted, trajectories)
        # Servers have come since, and those that were there began before anybody asked.
        is_busy = use.open >= max(1.0, use.servers)
        return tuple(replace(one, busy=1.0) for one in found) if is_busy else found
