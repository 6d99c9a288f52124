"""A staleness bound that was chosen, or kept, as it is remembered and shown."""

from __future__ import annotations

from dataclasses import dataclass

from libra_cli.core.types import Seconds


@dataclass(frozen=True, slots=True)
class PricedBound:
    """A bound in versions, with what it promises.

    ``step_s`` are seconds a step with the best placement for it, moves shared by the horizon;
    ``worth`` is the share that a token is worth, ``low`` to ``high`` in four cases of five.
    """

    bound: int
    layout: str
    step_s: Seconds
    worth: float
    low: float
    high: float

    @property
    def effective_s(self) -> Seconds:
        """Seconds for as much as a step's worth of tokens of age 0 teaches; infinity: never."""
        return self.step_s / self.worth if self.worth > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class BoundChoice:
    """``chosen`` in place of ``today``, or the same again; ``other`` came next. ``why`` says it."""

    today: PricedBound
    chosen: PricedBound
    other: PricedBound | None
    why: str

    @property
    def changes(self) -> bool:
        """Whether the bound is another from here on."""
        return self.chosen.bound != self.today.bound
