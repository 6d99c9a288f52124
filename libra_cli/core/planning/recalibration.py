"""Prices corrected by what was measured: one law for a live run and for the simulator.

Each half's prices are multiplied by its measured over its predicted seconds of a step, by the mean
over some steps, predicted for the work of these very steps, within a factor of ``MOST``. Training's
are measured as they are. Rollout's are first told for the tokens that it played in them: while the
pipeline drains, what is trained was played before, and steps are shorter than rollout can sustain.
They are all of them where training waited for at least ``IDLE`` of the time. Where it never did,
the staleness bound held rollout back: fewer trajectories were in play than there is room for, and
each was faster for it. How long they took tells the prices, and these how long a step takes when
every place is taken (``RolloutTable.saturated_step_s``). In between it is a mix. Where the halves
take turns rollout's are those that training's are not. The two do not agree, and a plan changes
which of them is taken, and steps come in bursts as long as may be in flight. So what is found is
the geometric mean with what was found ``before`` this plan, or with prices as they are, which
counts as ``overlap`` steps of rollout and as one of training: otherwise moves chase each other.

Limit: held back, nothing shows how unevenly a rollout would end, nor what its caches would save.
Simulated on four traces it was told 22 % too fast where stragglers rule and 27 to 75 % too slow
elsewhere; prices as they are were 5 to 150 % too slow there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from libra_cli.core.costs.profile import Profile
from libra_cli.core.evidence import Recalibration
from libra_cli.core.observation import MeasuredStep, mean_step
from libra_cli.core.planning.search import Layout, PlannerSettings, Search, Times
from libra_cli.core.planning.training_table import TrainedRanks
from libra_cli.core.planning.triggers import IDLE
from libra_cli.core.types import Seconds
from libra_cli.core.workload import Workload

MOST = 4.0


@dataclass(frozen=True, slots=True)
class RecalibratedSearch:
    """Today's layout as measured (None: no step was) and as priced, and plans by better prices."""

    shown: Times | None
    priced: Times
    recalibration: Recalibration
    profile: Profile
    search: Search


def recalibrated(
    profile: Profile,
    workload: Workload,
    gpus: int,
    settings: PlannerSettings,
    *,
    today: Layout,
    measured: Sequence[MeasuredStep],
    ended: Workload | None = None,
    played: Workload | None = None,
    before: Recalibration | None = None,
    trained: bool = False,
) -> RecalibratedSearch:
    """Correct the prices by the steps measured on today's layout, of the work ``played`` in them.

    The search is for the ``workload`` that rollout begins, and for training of what has ``ended``.
    Where no step was measured the correction of ``before`` stays. ``trained``: today's ranks have
    trained such work, and fit. Raises NothingFits.
    """
    longest = (played or workload).longest.context
    ranks = TrainedRanks(today.base_gpus, today.workers, longest) if trained else None
    if not measured:
        search = Search(profile, workload, gpus, settings, ended, ranks)
        priced, found = search.times(today), before or Recalibration()
        if before is not None:
            profile = profile.recalibrated(found)
            search = Search(profile, workload, gpus, settings, ended, ranks)
        return RecalibratedSearch(None, priced, found, profile, search)
    past = Search(profile, played or workload, gpus, settings, trained=ranks)
    priced, step = past.times(today), mean_step(measured)
    shown = _stages(step, priced, past, today)
    # Beside a training step as long as it was, which the prices of training may not know.
    serving = past.serving(today, step.train_s)
    playing_s = past.playing_s(past.rollout_s(serving, step.train_s), today)
    expected = replace(priced, rollout_s=playing_s)
    found = _recalibration(shown, expected)
    number = len(measured)
    found = found.blended(
        before or Recalibration(),
        rollout=number / (number + workload.overlap),
        training=number / (number + 1),
    )
    profile = profile.recalibrated(found)
    search = Search(profile, workload, gpus, settings, ended, ranks)
    return RecalibratedSearch(shown, priced, found, profile, search)


def _stages(measured: MeasuredStep, priced: Times, search: Search, layout: Layout) -> Times:
    train_s = measured.train_s
    if search.workload.takes_turns:
        return Times(max(measured.step_s - train_s, 0.0), train_s, in_turn=True)
    played = _played(measured, search.workload)
    seen_s = saturated_s = measured.step_s / played
    if measured.in_play_s and priced.rollout_s < inf:
        saturated_s = search.table.saturated_step_s(
            search.serving(layout, train_s),
            measured.in_play_s / played,
            measured.concurrency,
            train_s,
        )
    held = max(0.0, 1.0 - measured.waited_s / (IDLE * measured.step_s))
    return Times(seen_s + held * min(0.0, saturated_s - seen_s), train_s)


def _played(measured: MeasuredStep, work: Workload) -> float:
    """Batches that rollout played in a step, by tokens; 1 where that is not known."""
    batch = work.mean_generated * work.played
    return measured.played_tokens / batch if measured.played_tokens else 1.0


def _recalibration(measured: Times, predicted: Times) -> Recalibration:
    return Recalibration(
        rollout=_ratio(measured.rollout_s, predicted.rollout_s),
        training=_ratio(measured.train_s, predicted.train_s),
    )


def _ratio(measured: Seconds, predicted: Seconds) -> float:
    if measured <= 0 or not 0 < predicted < inf:
        return 1.0
    return min(MOST, max(1 / MOST, measured / predicted))
