"""Maps values to pixels, and chooses the round numbers at which an axis has its ticks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ROUND = (1, 2, 5, 10)
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_CLOCK_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(minutes * _MINUTE for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * _HOUR for hours in (1, 2, 3, 6, 12, 24)),
)
_DETAILED = 30
"""Below this ratio of the largest to the smallest value a logarithmic axis has ticks at 2 and 5."""
_DECADES = 6
"""The most powers of ten that a logarithmic axis names."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps the values from ``low`` to ``high`` to the pixels from ``begin`` to ``end``."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value, also of one outside the range."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        share = ((math.log(value) if self.log else value) - low) / (high - low)
        return self.begin + share * (self.end - self.begin)


def enclosing(low: float, high: float, *, count: int = 6) -> list[float]:
    """Return about ``count`` round numbers from ``low`` or below to ``high`` or above."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(low) / 10 or 1.0
        low, high = low - room, high + room
    step = _round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def whole_numbers(low: float, high: float, *, count: int = 8) -> list[float]:
    """Return at most about ``count`` round whole numbers between ``low`` and ``high``."""
    return _multiples(low, high, max(1, _round_step((high - low) / count)))


def round_numbers(low: float, high: float, *, count: int = 8) -> list[float]:
    """Return at most about ``count`` round numbers between ``low`` and ``high``."""
    return _multiples(low, high, _round_step((high - low) / count))


def clock_times(seconds: float, *, count: int = 10) -> list[float]:
    """Return at most about ``count`` round times from 0 to ``seconds``."""
    rough = seconds / count
    days = _DAY * _round_step(max(rough, _DAY) / _DAY)
    step = next((step for step in _CLOCK_STEPS if step >= rough), days)
    return _multiples(0, seconds, step)


def enclosing_powers(low: float, high: float) -> list[float]:
    """Return powers of ten from ``low`` or below to ``high`` or above, with 2 and 5 times them
    where these are few."""
    inner = (1, 2, 5) if high / low < _DETAILED else (1,)
    numbers = list(_powers(low, high, inner))
    first = max(at for at, number in enumerate(numbers) if number <= low * (1 + 1e-9))
    last = min(at for at, number in enumerate(numbers) if number >= high * (1 - 1e-9))
    return numbers[first : max(last, first + 1) + 1]


def powers(low: float, high: float) -> list[float]:
    """Return the powers of ten between ``low`` and ``high``, with 2 and 5 times them where these
    are few."""
    inner = (1, 2, 5) if high / low < _DETAILED else (1,)
    return [number for number in _powers(low, high, inner) if low <= number <= high]


def decimal_words(ticks: Sequence[float]) -> list[str]:
    """Return the numbers as text, each with as many digits as tell it from its neighbours."""
    step = min((b - a for a, b in itertools.pairwise(ticks)), default=1.0)
    largest = max(map(abs, ticks), default=1.0) or 1.0
    digits = max(6, 2 + math.floor(math.log10(largest)) - math.floor(math.log10(step)))
    return [f"{0.0 if abs(tick) < step / 2 else tick:,.{digits}g}" for tick in ticks]


def power_words(ticks: Sequence[float]) -> list[str]:
    """Return powers of ten and small multiples of them as text: ``10⁻⁵``, ``2·10⁻⁵``."""
    words = []
    for tick in ticks:
        exponent = math.floor(math.log10(tick) + 1e-9)
        factor = round(tick / 10.0**exponent)
        power = "10" + str(exponent).translate(_SUPERSCRIPTS)
        words.append(power if factor == 1 else f"{factor}·{power}")
    return words


def clock(seconds: float) -> str:
    """Return a time as ``minutes:seconds``, or ``hours:minutes:seconds`` from an hour on."""
    minutes, rest = divmod(round(seconds), _MINUTE)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in _ROUND if factor * power >= rough * (1 - 1e-9))


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _powers(low: float, high: float, inner: Sequence[int]) -> Iterator[float]:
    """Yield multiples of powers of ten that reach beyond ``low`` and ``high``, in order."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1
    every = math.ceil((last - first) / _DECADES)
    for exponent in range(first, last + every, every):
        yield from (factor * 10.0**exponent for factor in inner)
