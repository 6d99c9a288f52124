"""Prices corrected by what was measured: one law for a live run and for the simulator.

Each half's prices are multiplied by its measured over its predicted seconds of a step, by the mean
over some steps, within a factor of ``MOST``. Training's are measured as they are. Rollout's are all
of them where training waited for at least ``IDLE`` of the time. Where it never did, the staleness
bound held rollout back: fewer trajectories were in play than there is room for, and each was faster
for it. How long they took tells the prices, and these how long a step takes when every place is
taken (``RolloutTable.saturated_step_s``). In between it is a mix. The two do not agree, and a plan
changes which of them is taken, so who remembers the correction ``before`` gets the geometric mean
with it: otherwise moves chase each other.

Limit: held back, nothing shows how unevenly a rollout would end, nor what its caches would save.
Simulated on four traces it was told 22 % too fast where stragglers rule and 27 to 75 % too slow
elsewhere; prices as they are were 5 to 150 % too slow there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import fmean

from libra_cli.core.costs.profile import Profile
from libra_cli.core.costs.workload import Workload
from libra_cli.core.planning.search import Layout, PlannerSettings, Search, Times
from libra_cli.core.planning.triggers import IDLE, STARVED
from libra_cli.core.types import Seconds

MOST = 4.0


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Seconds of a step: all of it, those of training, those that training waited, and those that
    trajectories were in play, summed over them.

    ``beside`` is how many were in play, by the mean over those seconds: they come in bursts.
    """

    step_s: Seconds
    train_s: Seconds
    waited_s: Seconds
    in_play_s: Seconds
    beside: float

    @property
    def starved(self) -> bool:
        """Training waited for rollout."""
        return self.waited_s > STARVED * self.step_s


@dataclass(frozen=True, slots=True)
class Recalibration:
    """What each half's prices are multiplied by."""

    rollout: float = 1.0
    training: float = 1.0

    def of(self, profile: Profile) -> Profile:
        """These prices, corrected."""
        slower = profile.scaled(self.rollout)
        return replace(slower, training=profile.training.scaled(self.training))

    def blended(self, before: Recalibration) -> Recalibration:
        """With one that was found before, the geometric mean."""
        rollout = sqrt(self.rollout * before.rollout)
        return Recalibration(rollout, sqrt(self.training * before.training))


def concurrency(
    spans: Iterable[tuple[Seconds, Seconds]], since: Seconds, until: Seconds
) -> tuple[Seconds, float]:
    """How many trajectories were in play, from when each began and ended: ``in_play_s`` and
    ``beside`` of the time from ``since`` to ``until``."""
    inside = [(max(begin, since), min(end, until)) for begin, end in spans]
    changes = sorted(
        change for begin, end in inside if end > begin for change in ((begin, 1), (end, -1))
    )
    playing, at, in_play_s, met_s = 0, since, 0.0, 0.0
    for when, change in changes:
        in_play_s += playing * (when - at)
        met_s += playing * playing * (when - at)
        playing, at = playing + change, when
    return in_play_s, met_s / in_play_s if in_play_s else 0.0


def mean(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """Of at least one step."""
    in_play_s = sum(step.in_play_s for step in steps)
    met_s = sum(step.in_play_s * step.beside for step in steps)
    return MeasuredStep(
        step_s=fmean(step.step_s for step in steps),
        train_s=fmean(step.train_s for step in steps),
        waited_s=fmean(step.waited_s for step in steps),
        in_play_s=in_play_s / len(steps),
        beside=met_s / in_play_s if in_play_s else 0.0,
    )


@dataclass(frozen=True, slots=True)
class RecalibratedSearch:
    """Today's layout as measured (None: no step was) and as priced, and plans by better prices."""

    shown: Times | None
    priced: Times
    correction: Recalibration
    profile: Profile
    search: Search


def corrected(
    profile: Profile,
    workload: Workload,
    gpus: int,
    settings: PlannerSettings,
    *,
    today: Layout,
    measured: Sequence[MeasuredStep],
    before: Recalibration | None = None,
) -> RecalibratedSearch:
    """Correct the prices by the steps measured on today's layout. Raises NothingFits."""
    search = Search(profile, workload, gpus, settings)
    priced = search.times(today)
    if not measured:
        return RecalibratedSearch(None, priced, Recalibration(), profile, search)
    shown = _stages(mean(measured), priced, search, today)
    found = _correction(shown, priced)
    found = found.blended(before) if before else found
    if found != Recalibration():
        profile = found.of(profile)
        search = Search(profile, workload, gpus, settings)
    return RecalibratedSearch(shown, priced, found, profile, search)


def _stages(measured: MeasuredStep, priced: Times, search: Search, layout: Layout) -> Times:
    step_s = saturated_step_s = measured.step_s
    if measured.in_play_s and priced.rollout_s < inf:
        saturated_step_s = search.table.saturated_step_s(
            layout.buckets, measured.in_play_s, measured.beside
        )
    held = max(0.0, 1.0 - measured.waited_s / (IDLE * step_s))
    return Times(step_s + held * min(0.0, saturated_step_s - step_s), measured.train_s)


def _correction(measured: Times, predicted: Times) -> Recalibration:
    return Recalibration(
        rollout=_ratio(measured.rollout_s, predicted.rollout_s),
        training=_ratio(measured.train_s, predicted.train_s),
    )


def _ratio(measured: Seconds, predicted: Seconds) -> float:
    if measured <= 0 or not 0 < predicted < inf:
        return 1.0
    return min(MOST, max(1 / MOST, measured / predicted))
