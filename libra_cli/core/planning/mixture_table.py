"""The best servers of several shapes on every number of GPUs: a dynamic program.

The trajectories of a step are sorted by generated tokens and cut into parts of equal number.
``least[u][g][i]`` is the least time in which exactly ``g`` GPUs, with servers of ``u`` shapes, play
the ``i`` shortest parts. Shapes come one after the other, small servers first, and each that is
used adds a bucket of ``k`` servers with ``t`` GPUs for the parts ``j`` to ``i``::

    least[u][g][i] = min over k, j of max(least[u - 1][g - t k][j], cost(t, k, parts j to i))

The published recurrence (Libra, arXiv 2606.03077) adds servers one by one and lets a shape have
several ranges of lengths. A scheduler can tell servers of one shape apart by nothing, so here a
shape has one range. ``k`` is 1 to 8, and from there four sizes an octave. ``cost`` is that of
``RolloutTable``: under the staleness rule, beside a training step of so many seconds.

Guarantee: of all such mixtures and ways to cut the parts the one with the least time. Limit: longer
trajectories are on larger servers, and each is taken to reach the bucket of its length without a
detour (``search`` prices that).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import floor, inf, log
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np

from libra_cli.core.planning.rollout_table import RolloutTable
from libra_cli.core.types import Seconds

CostOf: TypeAlias = Callable[[int, Any], Any]
"""Seconds of the parts j to i - 1 on each of these numbers of servers of a degree: an array
[number, j, i], infinite where the range is empty."""
BAND = 1.2
"""Training steps that differ by less than this factor have one table of mixtures between them: what
is chosen differs little, and its price is that beside its own training step. Chosen."""
KEPT = 16
"""Numbers of GPUs whose mixtures are looked at more closely, those with the shortest steps.
Chosen."""
SEVERAL = 2
"""Shapes that a mixture has at least; more are counted as so many."""


def best_mixtures(
    table: RolloutTable, train_s: Mapping[int, Seconds]
) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """Yield numbers of GPUs, and the best mixture on so many: its degrees, each with a number.

    ``train_s`` are the seconds of a training step beside rollout on so many GPUs; the ``KEPT`` with
    the shortest longer half are yielded, the best first.
    """
    bands: dict[int, list[int]] = defaultdict(list)
    for gpus, seconds in train_s.items():
        bands[0 if table.workload.takes_turns else floor(log(seconds, BAND))].append(gpus)
    found: list[tuple[Seconds, int, MixtureTable]] = []
    for band in bands.values():
        beside = fmean(train_s[gpus] for gpus in band)
        mixtures = MixtureTable(table.degrees, max(band), partial(_costs, table, beside))
        for gpus in band:
            if (seconds := mixtures.seconds(gpus)) < inf:
                together = seconds + train_s[gpus] if table.workload.takes_turns else 0.0
                found.append((max(together, seconds, train_s[gpus]), gpus, mixtures))
    for _, gpus, mixtures in sorted(found, key=lambda one: one[:2])[:KEPT]:
        yield gpus, mixtures.servers(gpus)


def _costs(table: RolloutTable, train_s: Seconds, degree: int, numbers: Any) -> Any:
    return table.costs(degree, numbers, train_s)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Servers of one degree: ``costs`` is [number, j, i], for each of the ``numbers`` of them."""

    degree: int
    numbers: tuple[int, ...]
    costs: Any


class MixtureTable:
    """The best mixture on each number of GPUs up to ``gpus``, of servers of these degrees."""

    def __init__(self, degrees: Sequence[int], gpus: int, cost_of: CostOf) -> None:
        self.gpus = gpus
        self._shapes = [
            _Shape(degree, numbers, cost_of(degree, np.array(numbers)))
            for degree in sorted(degrees)
            if (numbers := server_numbers(gpus // degree))
        ]
        parts = self._shapes[0].costs.shape[-1] if self._shapes else 1
        self._layers = [np.full((SEVERAL + 1, gpus + 1, parts), np.inf)]
        self._layers[0][0, 0, 0] = 0.0
        for shape in self._shapes:
            self._layers.append(_with_shape(self._layers[-1], shape))

    def seconds(self, gpus: int) -> Seconds:
        """Seconds of a step on exactly so many GPUs; infinity where no two shapes fit."""
        return float(self._layers[-1][SEVERAL, gpus, -1])

    def servers(self, gpus: int) -> tuple[tuple[int, int], ...]:
        """The mixture that takes ``seconds(gpus)``: its degrees, ascending, each with a number."""
        found: list[tuple[int, int]] = []
        used, end = SEVERAL, self._layers[0].shape[-1] - 1
        for layer, shape in zip(self._layers[-2::-1], reversed(self._shapes), strict=True):
            number, start = _last_bucket(layer, shape, used, gpus, end)
            if number:
                found.append((shape.degree, number))
                gpus, end = gpus - number * shape.degree, start
                used = 0 if used == 1 else 1 + int(layer[1, gpus, end] > layer[2, gpus, end])
        return tuple(reversed(found))


def server_numbers(most: int) -> tuple[int, ...]:
    """Numbers of servers that a shape is tried with: 1 to 8, then four an octave."""
    numbers = list(range(1, min(most, 8) + 1))
    step = 2
    while numbers and numbers[-1] + step <= most:
        numbers.append(numbers[-1] + step)
        if numbers[-1] == 8 * step:
            step *= 2
    return tuple(numbers)


def _with_shape(layer: Any, shape: _Shape) -> Any:
    """The least times if servers of this shape, or none of them, play what is longer."""
    found, gpus = layer.copy(), layer.shape[1]
    before = np.stack([_before(layer, used) for used in range(1, SEVERAL + 1)])
    for number, cost in zip(shape.numbers, shape.costs, strict=True):
        taken = number * shape.degree
        worst = np.maximum(before[:, : gpus - taken, :, None], cost).min(axis=2)
        np.minimum(found[1:, taken:], worst, out=found[1:, taken:])
    return found


def _before(layer: Any, used: int) -> Any:
    """The least times, [g, i], from which one more shape makes so many."""
    return layer[0] if used == 1 else np.minimum(layer[1], layer[2])


def _last_bucket(layer: Any, shape: _Shape, used: int, gpus: int, end: int) -> tuple[int, int]:
    """Servers of this shape in the best mixture of so many GPUs and parts, and their first part."""
    best_s, best = float(layer[used, gpus, end]), (0, end)
    if not used:
        return best
    before = _before(layer, used)
    for number, cost in zip(shape.numbers, shape.costs, strict=True):
        if (left := gpus - number * shape.degree) >= 0:
            worst = np.maximum(before[left], cost[:, end])
            start = int(np.argmin(worst))
            if worst[start] < best_s:
                best_s, best = float(worst[start]), (number, start)
    return best
