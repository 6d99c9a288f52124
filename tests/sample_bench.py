"""Invented results of experiments, shaped like real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from libra_cli.bench.jobs import Job
from libra_cli.bench.results import ExperimentResult, ResultRow, Timeline

MAKESPANS = {
    "round-robin": 1.3,
    "least-loaded": 1.0,
    "sticky-least-loaded": 0.97,
    "attained-service": 0.94,
    "sibling-history": 0.95,
    "streamrl": 0.92,
    "dynarl": 0.96,
    "heddle": 0.9,
    "cmlfq-published": 0.99,
    "libra": 0.895,
    "known-lengths": 0.86,
}
PLANNERS = {
    "colocated": 1.25,
    "uniform": 1.15,
    "static-best": 1.0,
    "greedy": 0.98,
    "streamrl": 0.95,
    "dynarl": 0.9,
    "libra": 0.81,
}
STATES = ("serving", "idle", "serving", "draining", "starting", "syncing", "training", "idle")


def row(
    policy: str = "libra",
    seed: int = 0,
    makespan_s: float = 312.0,
    *,
    planner: str = "fixed",
    trace: str = "tau2bench_closed_models",
    variant: str = "",
) -> ResultRow:
    return ResultRow(
        policy=policy,
        planner=planner,
        trace=trace,
        seed=seed,
        variant=variant,
        throughput_tok_s=9.6e6 / makespan_s,
        steady_tok_s=1e7 / makespan_s,
        makespan_s=makespan_s,
        p50_s=makespan_s * 0.21,
        p99_s=makespan_s * 0.83,
        idle_rollout=0.22,
        idle_train=0.41,
        moves=1240,
        reprefilled_tokens=3_412_000,
    )


def rows(
    factors: dict[str, float],
    *,
    seeds: int = 4,
    noise: float = 0.02,
    planners: bool = False,
    variant: str = "",
    trace: str = "tau2bench_closed_models",
) -> list[ResultRow]:
    """The same workloads for every contender, hence a common part for every seed."""
    random = Random(7)
    whole = [random.gauss(312.0, 40.0) for _ in range(seeds)]
    return [
        row(
            policy="libra" if planners else name,
            planner=name if planners else "fixed",
            seed=seed,
            makespan_s=whole[seed] * factor * random.gauss(1.0, noise),
            variant=variant,
            trace=trace,
        )
        for name, factor in factors.items()
        for seed in range(seeds)
    ]


def timeline(policy: str = "libra", *, slots: int = 12, planner: str = "fixed") -> Timeline:
    random = Random(3)
    spans: list[tuple[str, str, float, float]] = []
    for slot in range(slots):
        now = 0.0
        for _ in range(6):
            for state in STATES:
                long = state in ("serving", "training")
                end = now + random.uniform(2.0, 30.0 if long else 4.0)
                spans.append((f"n{slot // 4}/{slot % 4}", state, now, end))
                now = end
    lengths = tuple(int(random.lognormvariate(6.9, 1.1)) + 1 for _ in range(800))
    return Timeline(policy, planner, "tau2bench_closed_models", 0, tuple(spans), lengths)


def result(
    factors: dict[str, float] = MAKESPANS, *, planners: bool = False, notes: Sequence[str] = ()
) -> ExperimentResult:
    return ExperimentResult(
        "planners" if planners else "policies on a fixed plan",
        rows(factors, planners=planners, variant="lengths x1 to x4" if planners else ""),
        [],
        list(notes),
    )


class Runs:
    """Invents what comes out of every run, and remembers which ones were asked for."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def __call__(
        self, jobs: Sequence[Job], progress: Callable[[str], None]
    ) -> Iterator[tuple[ResultRow, Timeline | None]]:
        self.jobs += jobs
        progress(f"{len(jobs)} runs [1/2]")
        for job in jobs:
            random = Random(f"{job.planner} {job.policy} {job.seed} {job.variant}")
            makespan_s = 312.0 * MAKESPANS.get(job.policy, 1.0) * PLANNERS.get(job.planner, 1.0)
            made = row(
                job.policy,
                job.seed,
                makespan_s * random.gauss(1.0, 0.02),
                planner=job.planner,
                trace=job.trace.name,
                variant=job.variant,
            )
            yield made, None
