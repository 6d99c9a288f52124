"""Prices of a run that is over, from all its turns and steps at once.

With B(t) requests and K(t) tokens of context on a server at t, and of a turn g tokens generated,
``fresh`` prompt tokens of so many ``requests`` begun on its server between its begin and its end,
and ``beside`` seconds of it during which the trainer worked on the same cores::

    seconds of the turn = g (a + b mean B + c mean K) + p fresh + r requests + k beside

by least squares of errors relative to what is expected, in which no price is below 0. A token takes
1 / (1 - k) times as long while the trainer works.

What a step costs whatever is in it (a) is told from what a sequence costs (b) by turns at different
loads alone. A server that was full all the time has a few: as it fills in the first step and runs
empty after the last. Where these do not tell, a and the rest are held to equal parts of a step at
the mean load (``PULL``). ``least`` and ``most`` are the laws with the smallest and the largest a
that the run allows: 1.96 standard errors from the best one, by leaving out a tenth of its turns at
a time (the jackknife), and beyond that as far as ``PULL`` toward either end moves it.

Guarantee: all three laws take the same time at the mean load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, sqrt
from typing import Any, NamedTuple

from libra_cli.core.costs.nnls import non_negative_least_squares
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.evidence import PlayedTurn
from libra_cli.core.types import Seconds, SlotId

PULL = 1e-4
"""Weight of the assumed parts of a step, in turns for each turn; chosen, so that a hundredth of the
turns at a tenth of the load outweighs it."""
KV_PART = 0.05
"""Assumed part of the KV cache in a step at the mean load."""
SLICES = 10
"""Parts of the turns, by time, each of which is left out once."""
STEP_PULL, STEP_PARTS = 0.1, (0.15, 0.85)
"""Weight of the assumed parts of a mean training step (whatever is in it, and its tokens), in
steps; chosen."""
MOST_BESIDE = 2 / 3
"""Largest k, with which everything takes three times as long: a core is shared by three. Chosen."""
ROUNDS, OUTLIER = 3, 8.0
"""Further fits, each relative to what the one before expected; and times what is expected, beyond
which a time counts as that much. Chosen."""
Z = 1.96
"""Standard errors in half of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class ServerHindsight:
    """The law of a run's servers while the trainer rests, the two extremes that the run allows, and
    k (``beside``)."""

    law: ServerCost
    least: ServerCost
    most: ServerCost
    beside: float


def server_hindsight(
    turns: Sequence[PlayedTurn], training: Sequence[TrainedSpan], prior: ServerCost
) -> ServerHindsight:
    """The law of the servers that played these turns, all of one shape, by any order; ``training``
    are the steps of a trainer on the same cores, in order. Without turns the prior.
    """
    import numpy as np

    turns = sorted((one for one in turns if one.ended > one.began), key=lambda one: one.ended)
    if not turns:
        return ServerHindsight(prior, prior, prior, 0.0)
    rows, most = _amounts(turns, training)
    seconds = np.array([turn.ended - turn.began for turn in turns])
    data = _Data.of(rows, seconds, seconds)
    for _ in range(ROUNDS):
        # By the seconds themselves, those that a stall made long would count for nothing.
        data = _Data.of(rows, seconds, rows @ np.array(data.prices(0.5)))
    middle = data.prices(0.5)
    fixed = data.fixed(middle)
    without = [data.fixed(data.without(slice_).prices(0.5)) for slice_ in range(SLICES)]
    mean = sum(without) / SLICES
    error = sqrt((SLICES - 1) / SLICES * sum((one - mean) ** 2 for one in without))
    pulled = [data.fixed(data.prices(part)) for part in (0.0, 1.0)]
    spread = hypot(Z * error, (pulled[1] - pulled[0]) / 2)
    kv = max(prior.kv_tokens, int(most))

    def law(part: float) -> ServerCost:
        step_s, sequence_s, kv_token_s, prefill_token_s, request_s, _ = data.moved(middle, part)
        return replace(
            prior,
            step_s=step_s,
            sequence_s=sequence_s,
            kv_token_s=kv_token_s,
            prefill_token_s=prefill_token_s,
            prefill_pair_s=0.0,
            request_s=request_s,
            kv_tokens=kv,
        )

    least, largest = max(0.0, fixed - spread), min(1.0, fixed + spread)
    beside = min(MOST_BESIDE, middle[5])
    return ServerHindsight(law(fixed), law(least), law(largest), beside)


class TrainedSpan(NamedTuple):
    """When a training step began and ended, and in which share of that time the trainer worked."""

    began: Seconds
    ended: Seconds
    share: float = 1.0


class SharedStep(NamedTuple):
    """An optimizer step of ``ranks`` ranks, of which gradient workers count in part: its seconds,
    the tokens that it trained, and during how many of the seconds any server had a turn."""

    seconds: Seconds
    tokens: float
    ranks: float
    beside_s: Seconds


@dataclass(frozen=True, slots=True)
class TrainingHindsight:
    """What a step costs whatever is in it and for each token of one rank; how many times as long it
    takes while servers work; and by which share of it each further rank slows all of them."""

    step_s: Seconds
    token_s: Seconds
    slowdown: float
    rank_slowdown: float


def training_hindsight(
    steps: Sequence[SharedStep], beside: float, crowded: float
) -> TrainingHindsight:
    """The prices of steps of one trainer, where ``beside`` is assumed of k as far as they do not
    tell it, and of one number of ranks ``crowded`` of q / t; ValueError without any."""
    import numpy as np

    if not steps:
        raise ValueError("no step has been trained yet")
    seconds = np.array([step.seconds for step in steps])
    tokens = np.array([step.tokens for step in steps])
    ranks = np.array([step.ranks for step in steps])
    several = len({step.ranks for step in steps}) > 1
    columns = (
        np.ones(len(steps)),
        tokens / ranks,
        tokens * (1 - 1 / ranks) * several,
        np.array([step.beside_s for step in steps]),
    )
    rows = np.array(columns).T
    # Prices such that each alone explains the mean step, so that the pull is the same on all.
    units = seconds.mean() / np.maximum(rows.mean(axis=0), 1e-12)
    pull = np.sqrt(STEP_PULL) * np.eye(len(columns))
    parts = np.array([*(part * (1 - beside) for part in STEP_PARTS), 0.0, beside / units[3]])
    found, expected = units, seconds
    for _ in range(ROUNDS + 1):
        relative, counted = _relative(rows, seconds, expected)
        matrix = np.vstack([relative * units, pull])
        fitted = non_negative_least_squares(matrix, np.append(counted, pull @ parts))
        found = np.array(fitted) * units
        expected = rows @ found
    step_s, token_s, crowded_s, k = map(float, found)
    token_s = max(token_s, 1e-12)
    if several:
        return TrainingHindsight(step_s, token_s, slowdown_of(k), crowded_s / token_s)
    token_s /= 1 + crowded * (steps[0].ranks - 1)
    return TrainingHindsight(step_s, token_s, slowdown_of(k), crowded)


def slowdown_of(beside: float) -> float:
    """How many times as long something takes beside another, by its k."""
    return 1 / (1 - min(MOST_BESIDE, beside))


def busy_between(turns: Sequence[PlayedTurn], spans: Sequence[TrainedSpan]) -> list[Seconds]:
    """The seconds of each span in which the trainer worked while any server had one of these turns;
    the trainer's waits are taken to be spread evenly over the span."""
    import numpy as np

    if not turns:
        return [0.0] * len(spans)
    ends = 0.0
    merged = list[tuple[Seconds, Seconds]]()
    for began, ended in sorted((turn.began, turn.ended) for turn in turns):
        begin = max(began, ends) if merged else began
        if ended > begin:
            merged.append((begin, ended))
            ends = ended
    pieces, wanted = np.array(merged), np.array(spans)
    found = _Steps(pieces[:, 0], pieces[:, 1], np.ones(len(merged)))
    begins, until, shares = wanted.T
    return [float(one) for one in found.mean(begins, until) * (until - begins) * shares]


@dataclass(frozen=True, slots=True)
class _Data:
    """Sums over the turns of each slice: of the products of two columns, and of each column with
    the seconds.

    Columns and seconds are relative to the seconds expected of the turn. ``load`` are the mean
    requests and KV tokens of a generated token, ``scale`` the seconds for each.
    """

    squares: Any
    products: Any
    number: Any
    load: tuple[float, float]
    scale: float

    @classmethod
    def of(cls, rows: Any, seconds: Any, expected: Any) -> _Data:
        import numpy as np

        rows, seconds = _relative(rows, seconds, expected)
        parts = list(
            zip(np.array_split(rows, SLICES), np.array_split(seconds, SLICES), strict=True)
        )
        generated = max(float(rows[:, 0].sum()), 1e-12)
        return cls(
            np.array([part.T @ part for part, _ in parts]),
            np.array([part.T @ took for part, took in parts]),
            np.array([len(part) for part, _ in parts]),
            (float(rows[:, 1].sum()) / generated, float(rows[:, 2].sum()) / generated),
            float(seconds.sum()) / generated,
        )

    def without(self, left_out: int) -> _Data:
        """Return the same without a slice."""
        keep = [one for one in range(SLICES) if one != left_out]
        return replace(
            self, squares=self.squares[keep], products=self.products[keep], number=self.number[keep]
        )

    def prices(self, fixed: float) -> tuple[float, ...]:
        """The prices a, b, c, p, r and k, held to steps of which so large a part is a."""
        import numpy as np

        running, held = self.load
        scale = self.scale
        parts = (fixed, (1 - fixed) * (1 - KV_PART), (1 - fixed) * KV_PART)
        assumed = np.array([parts[0], parts[1] / max(running, 1e-9), parts[2] / max(held, 1e-9)])
        assumed = np.append(assumed * scale, [0.0, 0.0, 0.0])
        units = (
            np.array([1.0, 1 / max(running, 1e-9), 1 / max(held, 1e-9), 1.0, 1.0, 1 / scale])
            * scale
        )
        squares = self.squares.sum(axis=0) * np.outer(units, units)
        pull = PULL * self.number.sum() * (squares[0, 0] / self.number.sum())
        lower = np.linalg.cholesky(squares + pull * np.eye(len(units)))
        right = self.products.sum(axis=0) * units + pull * assumed / units
        found = non_negative_least_squares(lower.T, np.linalg.solve(lower, right))
        return tuple(float(price) for price in np.array(found) * units)

    def fixed(self, prices: Sequence[float]) -> float:
        """The part that a is of a step at the mean load."""
        running, held = self.load
        step_s = prices[0] + prices[1] * running + prices[2] * held
        return prices[0] / step_s if step_s else 0.5

    def moved(self, prices: Sequence[float], fixed: float) -> tuple[float, ...]:
        """The same prices where a is another part of a step at the mean load, which stays."""
        running, held = self.load
        other = prices[1] * running + prices[2] * held
        step_s = prices[0] + other
        if not other:
            spread = (0.0, (1 - fixed) * step_s / max(running, 1e-9), 0.0)
        else:
            rest = (1 - fixed) * step_s / other
            spread = (0.0, prices[1] * rest, prices[2] * rest)
        return (fixed * step_s, *spread[1:], *prices[3:])


def _relative(rows: Any, seconds: Any, expected: Any) -> tuple[Any, Any]:
    """Return both for each second expected; seconds far from these count as ``OUTLIER`` times."""
    import numpy as np

    expected = np.maximum(expected, seconds / (10 * OUTLIER))
    return rows / expected[:, None], np.clip(seconds / expected, 1 / OUTLIER, OUTLIER)


def _amounts(turns: Sequence[PlayedTurn], training: Sequence[TrainedSpan]) -> tuple[Any, float]:
    """A row for each turn: tokens, tokens x requests, tokens x KV tokens, prompt tokens, requests,
    seconds beside the trainer; and the most KV tokens that a server held."""
    import numpy as np

    began = np.array([turn.began for turn in turns])
    ended = np.array([turn.ended for turn in turns])
    generated = np.array([float(turn.generated) for turn in turns])
    held = np.array([turn.prompt + turn.generated / 2 for turn in turns])
    fresh = np.array([float(turn.fresh) for turn in turns])
    rows, most = np.zeros((len(turns), 6)), 0.0
    rows[:, 0] = generated
    for mine in _by_slot(turns).values():
        load = _Steps(began[mine], ended[mine], np.ones(len(mine)))
        kept = _Steps(began[mine], ended[mine], held[mine])
        rows[mine, 1] = generated[mine] * load.mean(began[mine], ended[mine])
        rows[mine, 2] = generated[mine] * kept.mean(began[mine], ended[mine])
        order = np.argsort(began[mine])
        sums = np.append(0.0, np.cumsum(fresh[mine][order]))
        starts = began[mine][order]
        first, last = np.searchsorted(starts, began[mine]), np.searchsorted(starts, ended[mine])
        rows[mine, 3] = sums[last] - sums[first]
        rows[mine, 4] = last - first
        most = max(most, kept.most)
    if training:
        beside = _Steps(*np.array(training).T)
        rows[:, 5] = beside.mean(began, ended) * (ended - began)
    return rows, most


def _by_slot(turns: Sequence[PlayedTurn]) -> Mapping[SlotId, Any]:
    import numpy as np

    places: dict[SlotId, list[int]] = {}
    for place, turn in enumerate(turns):
        places.setdefault(turn.slot, []).append(place)
    return {slot: np.array(found) for slot, found in places.items()}


class _Steps:
    """A sum over time of amounts that are there from a begin to an end."""

    def __init__(self, began: Any, ended: Any, amounts: Any) -> None:
        import numpy as np

        times = np.concatenate([began, ended])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        values = np.cumsum(np.concatenate([amounts, -amounts])[order])
        self.most = float(values.max(initial=0.0))
        lasted = np.diff(self._times)
        self._sums = np.append(0.0, np.cumsum(values[:-1] * lasted))

    def mean(self, began: Any, ended: Any) -> Any:
        """Means between each begin and end, arrays of equal length."""
        import numpy as np

        until = np.interp(ended, self._times, self._sums)
        since = np.interp(began, self._times, self._sums)
        return (until - since) / np.maximum(ended - began, 1e-9)
