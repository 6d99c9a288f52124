"""What an experiment measured, and what may be concluded from it.

A ``ResultRow`` is one run: a policy and a planner on one workload. The seed makes the workload,
the same for every contender, so two contenders are compared by their differences **seed by
seed**: how much harder one workload is than another cancels out. The law, for n seeds::

    mean(d) +- t(n - 1, .975) * sd(d) / sqrt(n),  d[i] = x[i] - baseline[i]

Guarantee: if the differences are normal, the interval holds the true mean in 95 of 100 experiments.
Limits: with 3 seeds t is 4.3, so only large differences are significant; intervals are not widened
for the number of contenders, so of 20 that are level with the best, one will look different.

The share of the bound is the mean over the seeds of the least makespan that any scheduler could
have (``bench.bounds``) over the makespan that it took.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, mode, stdev
from typing import Any, TypeAlias

from libra_cli.core.student import student_t
from libra_cli.core.types import Seconds, Tokens

FORMAT = 2
KNOWN_LENGTHS = "known-lengths"
"""The policy that knows how much every trajectory has left."""
WHOLE_REMAINDER = "whole-remainder"
"""The same, if it judges a move by all of that."""
KNOWN_LEVELS = "known-levels"
"""C-MLFQ that knows it."""
CLAIRVOYANT = "clairvoyant"
FREE_CLAIRVOYANT = "clairvoyant, free moves"
LIBRA_TOLD = "libra, work told"
BEST_STATIC = "best static"
"""The best plan that never moves, found in hindsight."""
SHARED = "best static, trainer's GPUs serve"
"""The best such plan where a server on the trainer's GPUs takes requests while it waits."""
BASE_POLICY = "least-loaded"
BASE_PLANNER = "static-best"
USUAL_POLICY = "sticky-least-loaded"
"""The policy of a planner's baseline, where it was run: a static split, sticky routing."""
LEAST_GAIN = 0.02
"""Gain of the clairvoyant over the best static plan, as a share; a share
of a smaller gain says nothing. Chosen.
"""
AS_IT_IS = "as it is"
METRICS = (
    "throughput_tok_s",
    "steady_tok_s",
    "makespan_s",
    "p50_s",
    "p99_s",
    "idle_rollout",
    "idle_train",
    "moves",
    "reprefilled_tokens",
)
"""The numbers of a row, by the names they have in JSON."""

_KNOW_THE_FUTURE = (
    KNOWN_LENGTHS,
    WHOLE_REMAINDER,
    KNOWN_LEVELS,
    CLAIRVOYANT,
    FREE_CLAIRVOYANT,
    BEST_STATIC,
    SHARED,
    LIBRA_TOLD,
)

Interval: TypeAlias = tuple[float, float]
Contender: TypeAlias = tuple[str, str, str]
"""Variant, planner and policy."""


@dataclass(frozen=True, slots=True)
class ResultRow:
    """The result of one run: who decided, on what, and what came out.

    ``steady_tok_s`` is the throughput from the step on by which as many are in flight as may be, or
    of the second half of a run that is too short for that; ``idle_rollout`` and ``idle_train`` are
    shares of slot time between 0 and 1; ``p50_s`` and ``p99_s`` the time of a trajectory from its
    start to its last token; ``moves`` counts what went elsewhere; ``reprefilled_tokens`` are prompt
    tokens computed although they had been before; ``bound_s`` is the least makespan of what was
    trained, None where plans change or groups may be trained in part. ``variant`` says what was
    changed in the experiment; empty for nothing.
    """

    policy: str
    planner: str
    trace: str
    seed: int
    variant: str
    throughput_tok_s: float
    steady_tok_s: float
    makespan_s: Seconds
    p50_s: Seconds
    p99_s: Seconds
    idle_rollout: float
    idle_train: float
    moves: int
    reprefilled_tokens: Tokens
    bound_s: Seconds | None = None

    @property
    def contender(self) -> Contender:
        """The variant, planner and policy, which are compared with others on the same workload."""
        return self.variant, self.planner, self.policy

    @property
    def causal(self) -> bool:
        """Whether neither policy nor planner reads the future, as the clairvoyant does."""
        return is_causal(self.policy, self.planner)

    def metric(self, name: str) -> float:
        return float(getattr(self, name))


@dataclass(frozen=True, slots=True)
class Timeline:
    """The slots' states and the trajectories' lengths of one run, which the report draws.

    ``spans`` are (slot, state, start, end) in seconds; ``lengths`` the generated tokens of every
    trajectory.
    """

    policy: str
    planner: str
    trace: str
    seed: int
    spans: tuple[tuple[str, str, Seconds, Seconds], ...]
    lengths: tuple[Tokens, ...]
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Regret:
    """The throughput that libra lost to the best static plan, from one start, on one trace and
    drift.

    ``regret``, ``steady_regret`` (by ``steady_tok_s``) and ``over_uniform`` are shares of the other
    one's throughput, ``ci95`` is of the first, over the seeds. ``of_start`` is the regret of what
    is told that plan at its first look, from this start, and goes there or stays: the rest is the
    planner's.
    ``share_of_clairvoyant`` is libra's part of what the clairvoyant gains over the best static
    plan; None where that is next to nothing. ``moves`` counts servers started and stopped.
    ``causes`` divide the regret (``bench.regret_causes``) and add up to it.
    """

    trace: str
    variant: str
    start: str
    seeds: int
    regret: float
    ci95: Interval | None
    of_start: float
    steady_regret: float
    share_of_clairvoyant: float | None
    over_uniform: float
    moves: float
    causes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """The rows, timelines and regrets of an experiment.

    ``notes`` are sentences beside its tables.
    """

    title: str
    rows: list[ResultRow]
    timelines: list[Timeline]
    notes: list[str]
    regrets: list[Regret] = field(default_factory=list)

    @property
    def comparisons(self) -> list[Comparison]:
        """The comparisons that follow from the rows; raises as ``compare``."""
        return compare(self.rows)


@dataclass(frozen=True, slots=True)
class Difference:
    """A contender's mean minus another's, by seed, as a share of the other's (-0.1: a tenth less).

    ``ci95`` is None with fewer than two seeds in common.
    """

    to: Contender
    mean: float
    ci95: Interval | None

    @property
    def significant(self) -> bool:
        """Whether the interval leaves zero out; False where there is none."""
        return self.ci95 is not None and not self.ci95[0] <= 0.0 <= self.ci95[1]


@dataclass(frozen=True, slots=True)
class ComparisonSummary:
    """The means of one contender on one trace, over the seeds.

    ``judged_by`` is the metric of the comparisons: the makespan where policies are compared, the
    end-to-end throughput where planners are. ``rival`` is the best other causal contender. ``best``
    marks the causal contender with the best mean. ``mean`` and ``ci95`` are by ``METRICS``.
    """

    policy: str
    planner: str
    trace: str
    variant: str
    seeds: int
    mean: Mapping[str, float]
    ci95: Mapping[str, Interval | None]
    judged_by: str
    best: bool
    baseline: Difference | None
    rival: Difference | None
    share_of_bound: float | None
    share_ci95: Interval | None

    @property
    def contender(self) -> Contender:
        return self.variant, self.planner, self.policy

    @property
    def causal(self) -> bool:
        return is_causal(self.policy, self.planner)

    @property
    def significant(self) -> bool:
        """Whether it differs from the best other causal contender by more than chance."""
        return self.rival is not None and self.rival.significant


@dataclass(frozen=True, slots=True)
class Comparison:
    """Contenders that were compared with one another on one trace, in the order of their first row.

    ``variant`` is empty where variants are the contenders. ``names`` says of each one only what
    tells it from the others.
    """

    trace: str
    variant: str
    names: tuple[str, ...]
    summaries: tuple[ComparisonSummary, ...]


def compare(rows: Sequence[ResultRow]) -> list[Comparison]:
    """Every comparison of an experiment.

    A comparison is all rows of one trace and variant. Variants that have one contender each (the
    same thing, built up part by part) are compared with one another, and with the first of them.
    Otherwise the baseline is ``least-loaded`` where policies are compared; where planners are, it
    is ``static-best``, with ``sticky-least-loaded`` if it was run; and else the first contender.

    Raises:
        ValueError: two rows of the same contender, trace and seed.
    """
    return [
        Comparison(trace, _variant(arena), _names(list(arena)), tuple(_summaries(arena)))
        for (trace, _), arena in _arenas(rows).items()
    ]


def to_json(results: Iterable[ExperimentResult]) -> dict[str, Any]:
    """The object of ``libra bench --json``, of all experiments; shares are 0 to 1."""
    listed = list(results)
    compared = [comparison for result in listed for comparison in result.comparisons]
    return {
        "format": FORMAT,
        "rows": [asdict(row) for result in listed for row in result.rows],
        "summary": [_summary_json(s) for comparison in compared for s in comparison.summaries],
        "regret": [asdict(regret) for result in listed for regret in result.regrets],
        "notes": [note for result in listed for note in result.notes],
    }


def is_causal(policy: str, planner: str) -> bool:
    """Whether neither the policy nor the planner knows the future."""
    return {policy, planner}.isdisjoint(_KNOW_THE_FUTURE)


def interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % t-interval of the mean; None with fewer than two values."""
    if len(values) < 2:
        return None
    middle = fmean(values)
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return middle - half, middle + half


# -- comparisons ---------------------------------------------------------------------------------

_Runs: TypeAlias = dict[Contender, dict[int, ResultRow]]


def _arenas(rows: Sequence[ResultRow]) -> dict[tuple[str, str | None], _Runs]:
    """The comparisons, by trace and variant; variants of one contender each are under None."""
    contenders: dict[tuple[str, str], set[Contender]] = {}
    for row in rows:
        contenders.setdefault((row.trace, row.variant), set()).add(row.contender)
    arenas: dict[tuple[str, str | None], _Runs] = {}
    for row in rows:
        alone = len(contenders[row.trace, row.variant]) == 1
        arena = arenas.setdefault((row.trace, None if alone else row.variant), {})
        by_seed = arena.setdefault(row.contender, {})
        if row.seed in by_seed:
            raise ValueError(f"two rows of {row.contender} on {row.trace}, seed {row.seed}")
        by_seed[row.seed] = row
    return arenas


def _variant(arena: _Runs) -> str:
    variants = {variant for variant, _, _ in arena}
    return variants.pop() if len(variants) == 1 else ""


def _names(contenders: Sequence[Contender]) -> tuple[str, ...]:
    """Return a name for each contender, of no more parts than it takes to tell them apart.

    The part that differs first of variant, planner and policy comes first.
    """
    varying = [at for at in range(3) if len({c[at] for c in contenders}) > 1] or [2]
    usual = [mode(c[at] for c in contenders) for at in range(3)]
    first = varying[0]
    tries = (
        tuple(c[first] or AS_IT_IS for c in contenders),
        tuple(
            ", ".join(c[at] or AS_IT_IS for at in varying if at == first or c[at] != usual[at])
            for c in contenders
        ),
    )
    whole = tuple(", ".join(c[at] or AS_IT_IS for at in varying) for c in contenders)
    return next((names for names in tries if len(set(names)) == len(names)), whole)


def _summaries(arena: _Runs) -> list[ComparisonSummary]:
    judged_by = "makespan_s" if len({c[1] for c in arena}) == 1 else "throughput_tok_s"
    base = _baseline(list(arena))
    ranked = _ranked_causal(arena, judged_by)
    return [_summary(arena, contender, base, ranked, judged_by) for contender in arena]


def _baseline(contenders: Sequence[Contender]) -> Contender:
    """Return the contender that the others are compared with: the
    first of the wanted that was run.
    """
    variants, planners = ({c[at] for c in contenders} for at in (0, 1))
    wanted: list[tuple[str | None, str | None]] = [(None, BASE_POLICY)]
    if len(variants) > 1:
        wanted = []
    elif len(planners) > 1:
        wanted = [(BASE_PLANNER, USUAL_POLICY), (BASE_PLANNER, None)]
    for planner, policy in wanted:
        for contender in contenders:
            if planner in (None, contender[1]) and policy in (None, contender[2]):
                return contender
    return contenders[0]


def _ranked_causal(arena: _Runs, judged_by: str) -> list[Contender]:
    """Return the causal contenders, the best first."""
    sign = 1.0 if judged_by == "makespan_s" else -1.0
    causal = [name for name, runs in arena.items() if next(iter(runs.values())).causal]
    return sorted(causal, key=lambda name: sign * _metric_mean(arena[name].values(), judged_by))


def _summary(
    arena: _Runs, contender: Contender, base: Contender, ranked: list[Contender], judged_by: str
) -> ComparisonSummary:
    runs = arena[contender]
    rival = next((other for other in ranked if other != contender), None)
    shares = [run.bound_s / run.makespan_s for run in runs.values() if run.bound_s is not None]
    row = next(iter(runs.values()))
    return ComparisonSummary(
        policy=row.policy,
        planner=row.planner,
        trace=row.trace,
        variant=row.variant,
        seeds=len(runs),
        mean={name: _metric_mean(runs.values(), name) for name in METRICS},
        ci95={name: interval([run.metric(name) for run in runs.values()]) for name in METRICS},
        judged_by=judged_by,
        best=len(ranked) > 1 and contender == ranked[0],
        baseline=None if base == contender else _difference(arena, contender, base, judged_by),
        rival=None if rival is None else _difference(arena, contender, rival, judged_by),
        share_of_bound=fmean(shares) if shares else None,
        share_ci95=interval(shares),
    )


def _metric_mean(runs: Iterable[ResultRow], metric: str) -> float:
    return fmean(run.metric(metric) for run in runs)


def _difference(arena: _Runs, one: Contender, other: Contender, metric: str) -> Difference | None:
    """Return the difference over the seeds that both have; None
    without any, or with a mean of 0.
    """
    pairs = _pairs(arena, (one, other), metric)
    whole = fmean(pair[1] for pair in pairs) if pairs else 0.0
    if whole == 0.0:
        return None
    differences = [(mine - theirs) / whole for mine, theirs in pairs]
    return Difference(other, fmean(differences), interval(differences))


def _pairs(arena: _Runs, contenders: Sequence[Contender], metric: str) -> list[tuple[float, ...]]:
    """The metric of all of them, for every seed they have in common."""
    runs = [arena[contender] for contender in contenders]
    seeds = [seed for seed in runs[0] if all(seed in one for one in runs)]
    return [tuple(one[seed].metric(metric) for one in runs) for seed in seeds]


# -- JSON ----------------------------------------------------------------------------------------


def _summary_json(summary: ComparisonSummary) -> dict[str, Any]:
    """The fields by their names, and whom it was compared with, spelled out."""
    return {
        **asdict(summary),
        "baseline": _difference_json(summary.baseline),
        "rival": _difference_json(summary.rival),
        "significant": summary.significant,
    }


def _difference_json(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    variant, planner, policy = difference.to
    return {
        "policy": policy,
        "planner": planner,
        "variant": variant,
        "difference": difference.mean,
        "ci95": difference.ci95,
        "significant": difference.significant,
    }
