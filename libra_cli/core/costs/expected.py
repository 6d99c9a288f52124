"""The work of a run before any of it was done: from given mean lengths, or a guess from limits.

Trajectories are spread about the means by a log-normal distribution, of which ``SAMPLES`` evenly
spaced quantiles stand for all; a long one has as many times the turns and tool returns as it has
generated tokens. What the recipe does not allow is cut by the ``Workload`` that they become.

The guess, where no lengths are given, is taken from the limits of the recipe: a trajectory
generates ``GENERATED`` of what ``max_turns`` times ``max_turn_tokens``, within ``max_len``, allows,
in ``TURNS`` of its turns; tools return as many tokens as it generates, one second a call; its
prompt is ``PROMPT`` of ``max_len``. Shares and spread are about those of the traces that come with
libra. It is a place to start from: the first steps say what is true.
"""

from __future__ import annotations

from math import exp
from statistics import NormalDist, fmean

from libra_cli.config.recipe import LengthsSpec
from libra_cli.core.workload import TrajectoryLimits, TrajectorySample

SAMPLES = 64
SPREAD = 0.75
"""Standard deviation of the logarithm of a trajectory's generated tokens: 0.6 to 0.9 on four of the
five shipped traces, 1.2 on the fifth."""
GENERATED = 0.1
"""Share of the tokens allowed: 0.05 to 0.1 on the shipped traces whose longest is no outlier."""
TURNS = 1 / 3
PROMPT = 1 / 16
TOOL_S = 1.0


def guessed_lengths(limits: TrajectoryLimits) -> LengthsSpec:
    """Return a guess of the mean lengths of trajectories, from the limits of a recipe."""
    allowed = min(limits.max_turns * limits.max_turn_tokens, limits.max_len)
    generated = max(1, round(GENERATED * allowed))
    turns = max(1, round(TURNS * limits.max_turns))
    return LengthsSpec(
        generated=generated,
        prompt=round(PROMPT * limits.max_len),
        observed=generated if turns > 1 else 0,
        turns=turns,
        tool_s=TOOL_S if turns > 1 else 0.0,
    )


def samples_around(lengths: LengthsSpec) -> tuple[TrajectorySample, ...]:
    """Trajectories about these means, as long as they would be without limits."""
    quantiles = [NormalDist().inv_cdf((n + 0.5) / SAMPLES) for n in range(SAMPLES)]
    factors = [exp(SPREAD * quantile) for quantile in quantiles]
    mean = fmean(factors)
    return tuple(_sample(lengths, factor / mean) for factor in factors)


def _sample(lengths: LengthsSpec, factor: float) -> TrajectorySample:
    turns = max(1, round(lengths.turns * factor))
    return TrajectorySample(
        prompt=lengths.prompt,
        generated=max(1, round(lengths.generated * factor)),
        observed=round(lengths.observed * factor),
        turns=turns,
        tool_s=lengths.tool_s * (turns - 1),
    )
