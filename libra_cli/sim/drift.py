"""What changes over a run: a pure transformation of the groups that are drawn from a trace.

    1,4             generated tokens end four times as long as they began; 1,4,1: and come back
    tools:1,20      tools end taking twenty times as long
    turns:1,3       trajectories end with three times as many turns
    contexts:1,4    prompts, and what tools return, end four times as long
    filtered:0,0.6  of the groups played, dynamic sampling ends leaving out this share: those of the
                    tasks with the shortest trajectories, which a policy solves first
    task:NAME       the second half of the groups is drawn from another trace, at once

Factors are evenly spaced over the groups of a run and linear in between; with ``/`` between them,
as in ``tools:1/20/1``, each holds for an equal part of the groups, and they change at once. Where a
trace has recorded no tool times, a drift of tools draws them: log-normal, of median ``TOOL_S``,
with a spread of ``TOOL_SPREAD``. Groups that are filtered do not count as groups of the run. Limit:
one thing changes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import log
from random import Random
from statistics import fmean

from libra_cli.sim.traces import TOOL_S, RecordedEpisode, Trace

TOOL_SPREAD = 1.5
"""Standard deviation of the logarithm of a drawn tool time. Chosen: a mean of 3.1 s and a 99th
percentile of 33 s beside the median of one second, as heavy a tail as shells and browsers have."""
KINDS = ("lengths", "tools", "turns", "contexts", "filtered", "task")


@dataclass(frozen=True, slots=True)
class Drift:
    """A drift of one of ``KINDS``: its factors over the run (of ``filtered`` shares, 0 to 1), or
    the trace that ``task`` changes to. ``sudden``: each factor holds for an equal part of the run.
    """

    kind: str = "lengths"
    factors: tuple[float, ...] = ()
    task: Trace | None = None
    sudden: bool = False

    def __str__(self) -> str:
        if self.task is not None:
            return f"drift task {self.task.name.partition('_')[0]}"
        if not self.factors:
            return "no drift"
        kind = "" if self.kind == "lengths" else f"{self.kind} "
        shown = [f"{one:.0%}" if self.filters else f"x{one:g}" for one in self.factors]
        return f"drift {kind}" + (" / " if self.sudden else " ").join(shown)

    @property
    def filters(self) -> bool:
        """Whether a run needs dynamic sampling to be played so."""
        return self.kind == "filtered"

    def groups(
        self, trace: Trace, name: str, *, size: int, number: int
    ) -> Iterator[tuple[RecordedEpisode, ...]]:
        """Groups of ``size`` for ever, of which ``number`` are the run; ``name`` seeds the draw."""
        drawn, tools = trace.groups(Random(name), size), Random(f"tools/{name}")
        traces, after = (trace, trace), drawn
        if self.task is not None:
            traces, after = (trace, self.task), self.task.groups(Random(f"task/{name}"), size)
        easy = _easy_first(trace) if self.filters else {}
        at = 0
        while True:
            half = int(2 * at >= number)
            group = next((drawn, after)[half])
            factor = factor_at(self.factors, at / number, sudden=self.sudden)
            if self.filters:
                signal = easy[group[0].task] >= factor
                yield _with_rewards(group, signal=signal)
            else:
                signal = True
                yield tuple(self._changed(traces[half], one, factor, tools) for one in group)
            at += signal

    def _changed(
        self, trace: Trace, episode: RecordedEpisode, factor: float, random: Random
    ) -> RecordedEpisode:
        if not self.factors:
            return episode
        if self.kind == "lengths":
            return episode.stretched(factor)
        if self.kind == "turns":
            return episode.repeated(factor)
        if self.kind == "contexts":
            return episode.padded(factor)
        if "tool times" in trace.lacks:
            drawn = [random.lognormvariate(log(TOOL_S), TOOL_SPREAD) for _ in episode.turns]
        else:
            drawn = [turn.tool_s for turn in episode.turns]
        return episode.with_tool_times([factor * tool_s for tool_s in drawn])


NO_DRIFT = Drift()


def factor_at(factors: tuple[float, ...], place: float, *, sudden: bool = False) -> float:
    """Linear between evenly spaced factors, or the one of this part of the run if they change
    suddenly; 1 without any. ``place`` runs from 0 to 1.
    """
    if len(factors) < 2:
        return factors[0] if factors else 1.0
    if sudden:
        return factors[min(int(max(place, 0.0) * len(factors)), len(factors) - 1)]
    at = min(max(place, 0.0), 1.0) * (len(factors) - 1)
    low = min(int(at), len(factors) - 2)
    return factors[low] + (at - low) * (factors[low + 1] - factors[low])


def _easy_first(trace: Trace) -> Mapping[str, float]:
    """The place of each task, from 0 to 1, among all by the mean tokens that it generates."""
    means = {
        task: fmean(e.generated for e in episodes) for task, episodes in trace.by_task().items()
    }
    return {task: at / len(means) for at, task in enumerate(sorted(means, key=lambda t: means[t]))}


def _with_rewards(
    group: tuple[RecordedEpisode, ...], *, signal: bool
) -> tuple[RecordedEpisode, ...]:
    """The group with every other member rewarded; without signal all of them."""
    return tuple(
        replace(one, reward=float(not signal or member % 2)) for member, one in enumerate(group)
    )
