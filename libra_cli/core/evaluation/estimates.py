"""What the rewards of an evaluation say: pass@k and the mean reward, with 95 % intervals.

Tasks are drawn at random and samples of one task are alike, so the unit of all errors is the task,
not the sample: the standard error is that of the mean of one number a task (clustered errors, as in
Miller, arXiv 2411.00640, with one cluster a task).

**pass@k** of a task with ``c`` passes in ``n`` samples is 1 - C(n - c, k) / C(n, k), the unbiased
estimate of the chance that at least one of ``k`` samples passes (Chen et al., arXiv 2107.03374).
Its interval is Wilson's (1927) with the effective number of samples p (1 - p) / se ** 2 in place of
their number (Korn and Graubard 1998): within 0 and 1, and not empty where every task passes.

**The mean reward** has no bounds; its interval is mean +/- t standard errors, with Student's t of a
degree of freedom less than there are tasks. One task says nothing of others: it gives no interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, inf, isfinite, sqrt
from statistics import fmean, stdev

from libra_cli.core.student import student_t

Z = 1.959963984540054
"""The 97.5th percentile of the standard normal distribution."""
MOST_FREEDOM = 1000
"""Degrees of freedom from which Student's t is taken for theirs: 1.9623, and ``Z`` at last."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % interval, which of a reward of one task is without ends;
    ``tasks`` are those that it is over.
    """

    value: float
    low: float
    high: float
    tasks: int


def pass_at(k: int, *, passed: int, samples: int) -> float:
    """The unbiased estimate of pass@k of one task. ``samples`` is at least ``k``."""
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def pass_estimate(k: int, tasks: Sequence[Sequence[bool]]) -> Estimate | None:
    """Estimate pass@k by samples that passed or not; None if no task has ``k`` samples."""
    values = [
        pass_at(k, passed=sum(samples), samples=len(samples))
        for samples in tasks
        if len(samples) >= k
    ]
    if not values:
        return None
    share = fmean(values)
    low, high = wilson(share, _effective(share, values))
    return Estimate(share, low, high, len(values))


def _effective(share: float, values: Sequence[float]) -> float:
    """Independent samples that would have the error of these tasks."""
    error = standard_error(values)
    return share * (1.0 - share) / error**2 if error else float(len(values))


def wilson(share: float, samples: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of ``samples``, which need not be a whole number."""
    weight = Z**2 / samples
    centre = (share + weight / 2) / (1 + weight)
    half = Z * sqrt(share * (1 - share) / samples + weight / (4 * samples)) / (1 + weight)
    # Rounding must not push the share itself, or 0 and 1, out of it.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def mean_estimate(tasks: Sequence[Sequence[float]]) -> Estimate | None:
    """The mean reward of all tasks that have a sample; None if none has."""
    values = [fmean(rewards) for rewards in tasks if rewards]
    if not values:
        return None
    mean, freedom = fmean(values), min(len(values) - 1, MOST_FREEDOM)
    half = student_t(freedom) * standard_error(values) if freedom else inf
    return Estimate(mean, mean - half, mean + half, len(values))


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of independent values; 0 where there is only one."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def powers_up_to(samples: int) -> list[int]:
    """The k of pass@k that are told of so many samples: 1, 2, 4 and so on, and their number."""
    powers = [1 << power for power in range(samples.bit_length())]
    return powers if powers[-1] == samples else [*powers, samples]


def evaluation_metrics(
    tasks: Sequence[Sequence[float]], *, samples: int, success: float
) -> dict[str, float]:
    """Numbers of an evaluation by name, of each task's rewards.

    ``pass@K`` for the K of ``powers_up_to``, and ``avg@N``, the mean reward of ``samples`` = N
    samples a task; each also as ``NAME/low`` and ``NAME/high`` where its interval has ends. A
    sample passes whose reward is at least ``success``.
    """
    passed = [[reward >= success for reward in rewards] for rewards in tasks]
    named: dict[str, Estimate | None] = {
        f"pass@{k}": pass_estimate(k, passed) for k in powers_up_to(samples)
    }
    named[f"avg@{samples}"] = mean_estimate(tasks)
    return _flat(named)


def _flat(named: Mapping[str, Estimate | None]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, one in named.items():
        if one is not None:
            flat[name] = one.value
        if one is not None and isfinite(one.low):
            flat |= {f"{name}/low": one.low, f"{name}/high": one.high}
    return flat
