"""What consecutive trajectories of a step, shortest first, are for servers of one shape.

The samples of a workload are sorted by generated tokens and cut into parts of equal number. Every
result is a matrix [j, i] over the parts j to i - 1, meaningless where i <= j.

**The longest to be expected.** The samples are also ordered by their time in play, longest first,
and cut into classes: each of the first ``SINGLES`` is one, from there they grow by a quarter. A
step draws some trajectories of each class; by a Poisson law none of those that come S to a step
with probability exp(-S). So the longest of a step is of a class that comes c to a step, after
longer ones that come S to a step, with probability exp(-S) (1 - exp(-c)). The longest of all
samples would be too long: a window of several steps has a longer one than most steps have.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.rollout import RolloutLoad
from libra_cli.core.workload import Workload

SINGLES = 16


class SortedParts:
    """A workload's samples, sorted and cut into at most ``groups`` parts."""

    def __init__(self, workload: Workload, groups: int) -> None:
        samples = sorted(workload.samples, key=lambda each: (each.generated, each.context))
        number = min(groups, len(samples))
        self._starts: Any = np.arange(number) * len(samples) // number
        self._holders = workload.holders
        self._weight = workload.played / len(samples)
        rows = [
            (s.prompt, s.generated, s.observed, s.mean_context, s.turns, s.tool_s, s.context)
            for s in samples
        ]
        self._columns = np.array(rows, dtype=float).T
        #: Of each part, the most generated tokens and the longest context.
        self.generated: Any = np.maximum.reduceat(self._columns[1], self._starts)
        self.contexts: Any = np.maximum.reduceat(self._columns[6], self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    def too_long(self, cost: ServerLaw) -> Any:
        """Where [j, i] is empty, or holds a context longer than the server's KV cache."""
        matrix = _maxima(self.contexts) > cost.kv_tokens
        return matrix | np.tri(len(self) + 1, dtype=bool)

    def load(self, cost: ServerLaw) -> RolloutLoad:
        """Return the load that each range of parts is for servers of this shape."""
        prompt, generated, observed, context, turns, tool_s, _ = self._columns
        work_s, prompt_s, engine_s, chunks_s = cost.trajectory_work(
            prompt=prompt, generated=generated, observed=observed, context=context, turns=turns
        )
        longest = self._longest(engine_s + tool_s, (work_s + prompt_s, engine_s, tool_s))
        share = _mean_over_longest(engine_s + tool_s, self._holders)
        return RolloutLoad(
            count=np.maximum(count := self._sums(np.ones_like(tool_s)), 1e-9),
            playing=np.full_like(count, share),
            work_s=self._sums(work_s),
            prompt_s=self._sums(prompt_s),
            engine_s=self._sums(engine_s),
            tool_s=self._sums(tool_s),
            engine_context=self._sums(engine_s * context),
            tool_context=self._sums(tool_s * context),
            boundaries=self._sums(np.maximum(turns - 1, 0) * context),
            chunks_s=self._sums(chunks_s),
            longest_work_s=longest[0],
            longest_engine_s=longest[1],
            longest_tool_s=longest[2],
        )

    def _sums(self, values: Any) -> Any:
        parts = np.add.reduceat(values, self._starts) * self._weight
        ends = np.concatenate(([0.0], np.cumsum(parts)))
        return np.maximum(ends[None, :] - ends[:, None], 0.0)

    def _longest(self, key: Any, values: tuple[Any, ...]) -> list[Any]:
        """Return the means of ``values`` for the trajectory
        expected to have the largest ``key``.
        """
        order = np.argsort(-key, kind="stable")
        starts = _class_starts(len(key))
        sizes = np.diff([*starts, len(key)])
        classes: Any = np.empty(len(key), dtype=int)
        classes[order] = np.repeat(np.arange(len(starts)), sizes)
        counts = np.zeros((len(key), len(starts)))
        counts[np.arange(len(key)), classes] = self._weight
        ends = np.cumsum(np.add.reduceat(counts, self._starts), axis=0)
        ends = np.concatenate((np.zeros((1, len(starts))), ends))
        drawn = np.maximum(ends[None, :] - ends[:, None], 0.0)
        longer = np.cumsum(drawn, axis=2) - drawn
        chance = np.exp(-longer) * -np.expm1(-drawn)
        chance /= np.maximum(chance.sum(axis=2, keepdims=True), 1e-300)
        return [chance @ (np.add.reduceat(value[order], starts) / sizes) for value in values]


def _mean_over_longest(values: Any, drawn: float) -> float:
    """The mean over the mean of the largest of so many of them, drawn at random."""
    ends = np.linspace(1.0, 0.0, len(values) + 1) ** drawn
    return float(values.mean() / max(-np.diff(ends) @ np.sort(values)[::-1], 1e-300))


def _class_starts(number: int) -> list[int]:
    starts = list(range(min(SINGLES, number)))
    size = 1.0
    while starts[-1] + ceil(size) < number:
        starts.append(starts[-1] + ceil(size))
        size *= 1.25 if len(starts) > SINGLES else 1.0
    return starts


def _maxima(values: Any) -> Any:
    """[j, i]: the largest of parts j to i - 1, 0 where there is none."""
    size = len(values) + 1
    spread = np.zeros((size, size))
    spread[:-1, 1:] = np.where(np.tri(size - 1, dtype=bool).T, values[None, :], 0.0)
    return np.maximum.accumulate(spread, axis=1)
