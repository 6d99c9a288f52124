"""How long trajectories get, counted in person-time: those under way count as what they are.

Whoever finishes early in a run is short, so the finished alone mislead. A table of ends and
passages per bin of total length, fading together, gives the share of every length with all counted
(a product-limit estimate on bins) over its share among the finished: the *tilt*.
"""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np

from libra_cli.core.scheduling.bins import BINS, BOUNDS, bin_of
from libra_cli.core.scheduling.prefix_tree import Histogram, Vector

LOWER: tuple[float, ...] = (0.0, *BOUNDS[:-1])
TILT_EVERY = 64
"""Passages after which the tilt is worked out anew."""
HAZARD = 0.35
"""Ends per passage of a bin that one passage seen in advance stands for: a Pareto tail of 1.2."""
STEEP = 3.0
"""The most a tilt may weigh a bin up or down."""
LEVEL = 0.05
"""A tilt whose logarithms are all smaller counts as none."""


class LengthTable:
    """Person-time: who ended in a bin of total length, and who passed through it.

    Faded by weighing what is new heavier: ``unit`` doubles every ``half_life`` ends.
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self.unit = 1.0
        self.ends: Histogram = [0.0] * BINS
        self.passed: Histogram = [0.0] * BINS
        self.squares = 0.0
        self._tilt: Vector | None = None
        self._stale = 0

    def passage(self, low: float, up: float) -> None:
        """A trajectory went on from ``low`` to ``up`` tokens."""
        place = bin_of(low)
        self._stale += 1
        while low < up:
            edge = min(up, BOUNDS[place]) if place < BINS - 1 else up
            self.passed[place] += self.unit * (edge - low) / (BOUNDS[place] - LOWER[place])
            low = edge
            place += 1

    def end(self, total: float) -> None:
        """A trajectory ended of itself."""
        self.ends[bin_of(total)] += self.unit
        self.squares += self.unit * total * total
        self.unit *= 2 ** (1 / self._half_life)
        if self.unit > 1e9:
            self._scale(1 / self.unit)

    @property
    def mean_square(self) -> float:
        """Of the lengths of those that finished, in tokens squared."""
        count = sum(self.ends)
        return self.squares / count if count else 1e6

    def tilt(self) -> Vector | None:
        """By bin of total length: its share with all counted over its share of the finished.

        None where that is nearly 1 in every bin. Worked out anew every ``TILT_EVERY`` passages.
        """
        if self._stale >= TILT_EVERY:
            self._stale = 0
            ratios = self._ratios()
            level = max(abs(log(ratio)) for ratio in ratios) < LEVEL
            self._tilt = None if level else np.array(ratios)
        return self._tilt

    def _ratios(self) -> list[float]:
        left = sum(self.ends) / self.unit
        alive, finished, ratios = 1.0, 1.0, []
        for ended, went in zip(self.ends, self.passed, strict=True):
            ends, passed = ended / self.unit, went / self.unit
            # Ends per passage in this bin: of all, and as the finished alone would have it, where
            # those that end in the bin count for half a passage.
            true = 1 - exp(-(ends + HAZARD) / (passed + 1))
            seen = 1 - exp(-(ends + HAZARD) / (left - ends / 2 + 1))
            ratio = alive * true / (finished * seen)
            ratios.append(min(max(ratio, 1 / STEEP), STEEP))
            alive *= 1 - true
            finished *= 1 - seen
            left -= ends
        return ratios

    def state(self) -> dict[str, Any]:
        """In present units."""
        return {
            "ends": [value / self.unit for value in self.ends],
            "passed": [value / self.unit for value in self.passed],
            "squares": self.squares / self.unit,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Know what ``state`` says."""
        self.unit = 1.0
        self.ends, self.passed = list(state["ends"]), list(state["passed"])
        self.squares = float(state["squares"])
        self._stale = TILT_EVERY

    def merge(self, state: dict[str, Any]) -> None:
        """Add what another has counted."""
        self.ends = [a + b * self.unit for a, b in zip(self.ends, state["ends"], strict=True)]
        self.passed = [a + b * self.unit for a, b in zip(self.passed, state["passed"], strict=True)]
        self.squares += state["squares"] * self.unit
        self._stale = TILT_EVERY

    def _scale(self, by: float) -> None:
        self.ends = [value * by for value in self.ends]
        self.passed = [value * by for value in self.passed]
        self.squares *= by
        self.unit *= by
