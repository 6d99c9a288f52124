"""Decides whether two computations with the same weights differ by no more than rounding."""

from __future__ import annotations

from libra_cli.config.errors import WeightsError
from libra_cli.core.types import SlotId

WRONG_GAP = 1.0
"""Mean |difference| of log-probabilities, in nats, that no two right computations have. In bfloat16
vLLM and transformers differ by about 0.05 on the same weights (standard deviation on sampled
tokens, TRL issue 6789); kernels that compute something else are off by several nats."""
GAP_FACTOR = 5.0
"""How many times the gap at a process's first version a later one may have."""
LEAST_GAP = 1e-3
"""A bound in nats that no calibration goes below: in float32 gaps are near 1e-6, and vary."""


class GapBounds:
    """What a gap may be: a check against kernels that compute something else.

    Which version a server holds is proved by checksums. At the first version that a process proves,
    the gap is that of two computations with the same weights; later ones may be a few times as
    large. In bfloat16 that is more than a step changes, so the probe cannot tell versions apart.
    """

    def __init__(
        self,
        tolerance: float | None = None,
        *,
        wrong: float = WRONG_GAP,
        least: float = LEAST_GAP,
        what: str = "the probe differs",
    ) -> None:
        """Set the bounds in nats: ``tolerance`` if it is not to be measured, else ``wrong`` at
        first and never more, and later never less than ``least``. ``what`` begins the reasons."""
        self._tolerance = tolerance
        self._wrong, self._least, self._what = wrong, least, what
        self._first: dict[SlotId, tuple[int, float]] = {}

    def reason(self, slot: SlotId, incarnation: int, gap: float) -> str:
        """Why a gap is too large; empty if it is not, and then it counts as measured."""
        seen, first = self._first.get(slot, (incarnation, None))
        bound = self._bound(first if seen == incarnation else None)
        if gap > bound or gap != gap:  # NaN is not above anything
            return f"{self._what} by {gap:.2g} nats a token, allowed is {bound:.2g}"
        if first is None or seen != incarnation:
            self._first[slot] = (incarnation, gap)
        return ""

    def _bound(self, first: float | None) -> float:
        if self._tolerance is not None:
            return self._tolerance
        if first is None:
            return self._wrong
        return min(self._wrong, max(self._least, GAP_FACTOR * first))


def probe_gap(expected: tuple[float, ...], measured: list[float]) -> float:
    """Return the mean absolute difference of log-probabilities, in nats.

    Raises:
        WeightsError: the two have different lengths, or none.
    """
    if len(expected) != len(measured) or not expected:
        raise WeightsError(f"the probe has {len(expected)} tokens, the answer {len(measured)}")
    return sum(abs(a - b) for a, b in zip(expected, measured, strict=True)) / len(expected)
