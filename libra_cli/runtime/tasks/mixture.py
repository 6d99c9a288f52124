"""Which task a group gets: sources by weight, and the rows of each in order or shuffled.

Both are functions of the group's number and the run's seed alone, so that a run that goes on, or
another process, gives a group the same task.

**Sources.** They are dealt out as several environments are (``runtime.tasks.weighted_turns``):
after n groups each has had its share of them, to within one group.

**Rows.** A source's rows are used up before one comes again. With ``shuffle`` each round has an
order of its own, drawn by the seed, and ``limit`` rows are a sample drawn by the seed once.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import Any

from libra_cli.config.environment import EnvironmentSpec, TaskSourceSpec
from libra_cli.runtime.tasks.files import Row, read_rows
from libra_cli.runtime.tasks.weighted_turns import Mixture


class Tasks:
    """The tasks of all sources of a recipe."""

    def __init__(self, sources: Sequence[TaskSourceSpec]) -> None:
        """Read every source.

        Raises:
            EnvironmentBroken: a source cannot be read or has no task.
        """
        self._sources = [_RowsInOrder(spec, number) for number, spec in enumerate(sources)]
        self._weights = [spec.weight for spec in sources]
        self._mixture = Mixture(self._weights)

    def __len__(self) -> int:
        return sum(source.count for source in self._sources)

    @property
    def round(self) -> int:
        """After how many groups every row was played once at least."""
        counts = [source.count for source in self._sources]
        return _until_all(counts, self._weights)

    def every(self) -> Iterator[dict[str, Any]]:
        """Yield every row that was read, in the order of the files."""
        for source in self._sources:
            yield from map(json.loads, source.rows)

    def at(self, index: int, seed: int) -> dict[str, Any]:
        """Return the task of group ``index`` of a run with this seed; a new object each time."""
        source, position = self._mixture.of(index)
        task: dict[str, Any] = json.loads(self._sources[source].at(position, seed))
        return task


def tasks_of(environments: Sequence[EnvironmentSpec]) -> int:
    """Count the groups after which every row of all their files was played once at least.

    Raises:
        EnvironmentBroken: a source cannot be read or has no task.
    """
    rounds = [Tasks(one.tasks).round for one in environments]
    return _until_all(rounds, [one.weight for one in environments])


def _until_all(counts: Sequence[int], weights: Sequence[float]) -> int:
    """After how many of a mixture each has had its number."""
    whole = sum(weights)
    return max(ceil(n * whole / weight) for n, weight in zip(counts, weights, strict=True))


class _RowsInOrder:
    def __init__(self, spec: TaskSourceSpec, number: int) -> None:
        self.rows = read_rows(spec)
        self._number = number
        self._shuffle = spec.shuffle
        self.count = min(spec.limit or len(self.rows), len(self.rows))

    def at(self, position: int, seed: int) -> Row:
        turn, place = divmod(position, self.count)
        if self._shuffle:
            place = _order(f"{seed}/{self._number}/{turn}", self.count)[place]
            if self.count < len(self.rows):
                place = _order(f"{seed}/{self._number}/limit", len(self.rows))[place]
        return self.rows[place]


@lru_cache(maxsize=16)
def _order(name: str, count: int) -> array[int]:
    """Return ``range(count)`` in an order that depends on ``name`` alone."""
    order = array("Q", range(count))
    random.Random(name).shuffle(order)
    return order
