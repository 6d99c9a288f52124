"""The last sudden change of the work: which of the newest steps are like those to come.

Means over steps from before and after a change are of no work that ever was. Looked for is one
change point of a step's numbers (the split whose two means leave the least squares, of logarithms),
and it is one if the means differ by ``DRIFT`` or more, by ``ERRORS`` standard errors, and leave
``CLEARER`` times fewer squares than a line, which is a gradual change and no reason to forget.

Simulated on 400 series of 24 steps: of those without a change 0, 1 and 3 % were found to have one,
with steps off by 10, 20 and 30 %, and 5 to 16 % of those that grow by 6 % of the first step a step;
a change to four times as much was known in half of the cases after two steps, in nine of ten after
three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from statistics import fmean

from libra_cli.core.planning.admission import DRIFT, RECENT

LEAST = 2
"""Steps before a change and after it, at least: a single one is an outlier."""
ERRORS = 5.0
CLEARER = 1.5
SPREAD = 0.2
"""A step's standard deviation, a share of it, that four more squares are of. All chosen."""


class WorkHistory:
    """Numbers of the newest steps that say what their work was like, since its last change."""

    def __init__(self) -> None:
        self._steps: list[Mapping[str, float]] = []
        self.since: int | None = None
        """Steps since the last sudden change; None if there was none."""

    def add(self, work: Mapping[str, float]) -> None:
        """Add a step with its numbers above zero, by name, and forget those before a change."""
        steps = [*self._steps, work][-RECENT:]
        series = ([step[name] for step in steps] for name in work)
        alike = min(since_change(values) for values in series)
        if alike < len(steps):
            self.since = alike
        elif self.since is not None:
            self.since += 1
        self._steps = steps[-alike:]


def since_change(values: Sequence[float]) -> int:
    """Return how many of the newest values came after a sudden change; all if there was none."""
    logs, number = [log(value) for value in values], len(values)
    if number < 2 * LEAST:
        return number
    left, at = min(
        (_squares(logs[:at]) + _squares(logs[at:]), at) for at in range(LEAST, number - LEAST + 1)
    )
    change = abs(fmean(logs[at:]) - fmean(logs[:at]))
    variance = (left + 4 * SPREAD**2) / (number + 2)
    error = (variance * (1 / at + 1 / (number - at))) ** 0.5
    is_one = change > max(log(1 + DRIFT), ERRORS * error)
    return number - at if is_one and left * CLEARER < _about_line(logs) else number


def _squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)


def _about_line(values: Sequence[float]) -> float:
    """Squares of the distances from the line (least squares) through evenly spaced values."""
    places = [place - (len(values) - 1) / 2 for place in range(len(values))]
    products = sum(place * value for place, value in zip(places, values, strict=True))
    return _squares(values) - products**2 / sum(place**2 for place in places)
