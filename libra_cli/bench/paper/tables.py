"""The tables of ``libra bench paper``: what is published, and the same by two sets of prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeAlias

from libra_cli.bench.conditions import NETWORK
from libra_cli.bench.results import Interval, interval
from libra_cli.core.costs.profile import Profile
from libra_cli.sim.profiles import load_profile

SHIPPED, AS_PUBLISHED = "a800-qwen3-14b", "a800-qwen3-14b-as-published"
GPUS = 48
"""GPUs of the published runs of Libra (arXiv 2606.03077)."""
Unit: TypeAlias = Literal["tok/s", "s", "tokens", "times", "change", "share"]
"""What a number is of; a ``change`` of 0.1 is a tenth more, a ``share`` of 0.1 a tenth."""


@dataclass(frozen=True, slots=True)
class PaperScale:
    """How much is simulated: workloads (``seeds``), and of each run its optimizer steps, and groups
    of 16 a step. ``points`` are static plans that the cost model is held against.
    """

    seeds: int
    steps: int
    groups: int
    points: int


WHOLE = PaperScale(seeds=3, steps=12, groups=16, points=45)
QUICK = PaperScale(seeds=1, steps=3, groups=3, points=5)
"""Enough to see the page in about a minute; its numbers mean nothing."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that was found here, or published; ``ci95`` is over seeds."""

    value: float
    unit: Unit
    ci95: Interval | None = None

    @classmethod
    def over(cls, values: Sequence[float], unit: Unit) -> Figure:
        """Return the mean over seeds with its interval."""
        return cls(fmean(values), unit, interval(values))


Told: TypeAlias = Figure | str | None
"""A number, words in its place, or nothing."""


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One published result beside what the simulator says by the shipped prices and by those as
    published."""

    what: str
    published: Told
    shipped: Told
    as_published: Told


@dataclass(frozen=True, slots=True)
class PaperTable:
    """Results that belong together. ``why`` says why they differ, ``notes`` how they were found;
    ``columns`` are what the two found ones are by.
    """

    title: str
    rows: tuple[PaperRow, ...]
    why: tuple[str, ...]
    notes: tuple[str, ...] = ()
    columns: tuple[str, str] = ("shipped prices", "as published")


def both(said: Callable[[Profile], Told]) -> tuple[Told, Told]:
    """Return what is said of the shipped prices, and of those as published."""
    prices = both_prices()
    return said(prices[SHIPPED]), said(prices[AS_PUBLISHED])


def both_prices() -> Mapping[str, Profile]:
    """The shipped prices and those as published, by name, on the published network."""
    return {name: load_profile(name).on_network(NETWORK) for name in (SHIPPED, AS_PUBLISHED)}
