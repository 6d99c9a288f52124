"""What changes over a run: a pure transformation of the groups that are drawn from a trace.

    1,4          generated tokens end four times as long as they began; 1,4,1: and come back
    tools:1,20   tools end taking twenty times as long
    turns:1,3    trajectories end with three times as many turns
    task:NAME    the second half of the groups is drawn from another trace, at once

Factors are evenly spaced over the groups of a run and linear in between. Where a trace has recorded
no tool times, a drift of tools draws them: log-normal, of median ``TOOL_S``, with a spread of
``TOOL_SPREAD``. Limit: one thing changes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import log
from random import Random

from libra_cli.sim.traces import TOOL_S, RecordedEpisode, Trace

TOOL_SPREAD = 1.5
"""Standard deviation of the logarithm of a drawn tool time. Chosen: a mean of 3.1 s and a 99th
percentile of 33 s beside the median of one second, as heavy a tail as shells and browsers have."""
KINDS = ("lengths", "tools", "turns", "task")


@dataclass(frozen=True, slots=True)
class Drift:
    """A drift of one of ``KINDS``: its factors over the run, or
    the trace that ``task`` changes to.
    """

    kind: str = "lengths"
    factors: tuple[float, ...] = ()
    task: Trace | None = None

    def __str__(self) -> str:
        if self.task is not None:
            return f"drift task {self.task.name.partition('_')[0]}"
        if not self.factors:
            return "no drift"
        kind = "" if self.kind == "lengths" else f"{self.kind} "
        return f"drift {kind}" + " ".join(f"x{factor:g}" for factor in self.factors)

    def groups(
        self, trace: Trace, name: str, *, size: int, number: int
    ) -> Iterator[tuple[RecordedEpisode, ...]]:
        """Groups of ``size`` for ever, of which ``number`` are the run; ``name`` seeds the draw."""
        drawn, tools = trace.groups(Random(name), size), Random(f"tools/{name}")
        traces, after = (trace, trace), drawn
        if self.task is not None:
            traces, after = (trace, self.task), self.task.groups(Random(f"task/{name}"), size)
        for at in count():
            half = int(2 * at >= number)
            group = next((drawn, after)[half])
            factor = factor_at(self.factors, at / number)
            yield tuple(self._changed(traces[half], one, factor, tools) for one in group)

    def _changed(
        self, trace: Trace, episode: RecordedEpisode, factor: float, random: Random
    ) -> RecordedEpisode:
        if not self.factors:
            return episode
        if self.kind == "lengths":
            return episode.stretched(factor)
        if self.kind == "turns":
            return episode.repeated(factor)
        if "tool times" in trace.lacks:
            drawn = [random.lognormvariate(log(TOOL_S), TOOL_SPREAD) for _ in episode.turns]
        else:
            drawn = [turn.tool_s for turn in episode.turns]
        return episode.with_tool_times([factor * tool_s for tool_s in drawn])


NO_DRIFT = Drift()


def factor_at(factors: tuple[float, ...], place: float) -> float:
    """Linear between evenly spaced factors, 1 without any; ``place`` runs from 0 to 1."""
    if len(factors) < 2:
        return factors[0] if factors else 1.0
    at = min(max(place, 0.0), 1.0) * (len(factors) - 1)
    low = min(int(at), len(factors) - 2)
    return factors[low] + (at - low) * (factors[low + 1] - factors[low])
