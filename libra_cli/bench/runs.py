"""The experiments of ``libra bench``: many simulated runs side by side, on every core there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import parent_process
from threading import Thread
from typing import TypeAlias

from libra_cli.bench.ablations import ABLATIONS
from libra_cli.bench.jobs import Job, playable, run_job
from libra_cli.bench.oracles import ORACLES
from libra_cli.bench.results import ExperimentOutcome, ResultRow, Timeline
from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.baselines import PLANNERS
from libra_cli.core.planning.search import PlannerSettings, propose
from libra_cli.core.scheduling.least_cost import POLICIES as HONEST
from libra_cli.sim.traces import Trace

Progress: TypeAlias = Callable[[str], None]
POLICIES = (*HONEST, *ORACLES)
LONG_STEPS = 48
"""Optimizer steps of a run whose plan may change: some ten times as many as may be in flight, so
that filling the pipeline at first and emptying it at last count for little."""
__all__ = ["PLANNERS", "POLICIES", "ablation", "plan", "schedule", "sensitivities"]


def run_jobs(
    jobs: Sequence[Job], progress: Progress, notes: Sequence[str] = ()
) -> ExperimentOutcome:
    """All of them, on every core there is."""
    rows: list[ResultRow] = []
    stories: list[Timeline] = []
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(min(cores, len(jobs) or 1), initializer=_leave_with_parent) as pool:
        for number, (row, story) in enumerate(pool.map(run_job, jobs), start=1):
            progress(f"{number} of {len(jobs)} runs: {row.trace}, {row.planner}, {row.policy}")
            rows.append(row)
            stories += [story] if story else []
    return ExperimentOutcome(rows, stories, list(notes))


def _leave_with_parent() -> None:
    """A process of the pool waits for work for ever, also from a parent that was killed."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _playable(traces: Sequence[Trace]) -> tuple[list[Trace], list[str]]:
    told = [playable(trace) for trace in traces]
    return [trace for trace, _ in told], [note for _, notes in told for note in notes]


def schedule(
    traces: Sequence[Trace],
    *,
    profile: Profile,
    gpus: int,
    policies: Sequence[str],
    seeds: int,
    progress: Progress,
) -> ExperimentOutcome:
    """Policies on the plan that libra's planner proposes for the trace."""
    jobs: list[Job] = []
    traces, notes = _playable(traces)
    for trace in traces:
        blank = Job(trace, profile, profile, gpus, "libra", "libra", 0)
        proposal = propose(profile, blank.workload, gpus)
        notes += [f"{trace.name}: {reason}" for reason in proposal.reasons[:2]]
        jobs += [
            replace(blank, policy=policy, seed=seed, layout=proposal.layout)
            for seed in range(seeds)
            for policy in policies
        ]
    return run_jobs(jobs, progress, notes)


def plan(
    traces: Sequence[Trace],
    *,
    profile: Profile,
    gpus: int,
    planners: Sequence[str],
    policy: str,
    drift: tuple[float, ...],
    seeds: int,
    progress: Progress,
) -> ExperimentOutcome:
    """Planners under one policy, and the usual way beside them: a static split, sticky routing."""
    shown = f"drift x{' x'.join(f'{factor:g}' for factor in drift)}" if drift else "no drift"
    traces, notes = _playable(traces)
    pairs = [(name, policy) for name in planners]
    if policy != "sticky-least-loaded" and "static-best" in planners:
        pairs.append(("static-best", "sticky-least-loaded"))
    jobs = [
        Job(
            trace,
            profile,
            profile,
            gpus,
            chosen,
            name,
            seed,
            variant=shown,
            drift=drift,
            steps=LONG_STEPS,
        )
        for trace in traces
        for seed in range(seeds)
        for name, chosen in pairs
    ]
    return run_jobs(jobs, progress, notes)


PARTS = (
    ("static uniform", "uniform", "sticky-least-loaded", PlannerSettings()),
    ("+ planner", "static-best", "sticky-least-loaded", PlannerSettings(mixed_gain=1e9)),
    (
        "+ mixed servers",
        "static-best",
        "sticky-least-loaded",
        PlannerSettings(mixed_gain=0.0, tolerance=0.0),
    ),
    ("+ C-MLFQ", "static-best", "libra", PlannerSettings(mixed_gain=0.0, tolerance=0.0)),
    ("+ elastic pool", "libra", "libra", PlannerSettings(mixed_gain=0.0, tolerance=0.0)),
)
"""The published ablation, in its order: a name, a planner, a policy, what the planner may do."""


def ablation(
    traces: Sequence[Trace],
    *,
    profile: Profile,
    gpus: int,
    seeds: int,
    drift: tuple[float, ...],
    progress: Progress,
) -> ExperimentOutcome:
    """libra built up in the published order, then its scheduler with each part removed."""
    traces, notes = _playable(traces)
    jobs = [
        Job(
            trace,
            profile,
            profile,
            gpus,
            policy,
            planner,
            seed,
            variant=name,
            settings=settings,
            drift=drift,
            steps=LONG_STEPS,
        )
        for trace in traces
        for seed in range(seeds)
        for name, planner, policy, settings in PARTS
    ]
    for trace in traces:
        blank = Job(trace, profile, profile, gpus, "libra", "fixed", 0, variant="scheduler")
        layout = propose(profile, blank.workload, gpus).layout
        jobs += [
            replace(blank, policy=policy, seed=seed, layout=layout)
            for seed in range(seeds)
            for policy in ("libra", *ABLATIONS)
        ]
    return run_jobs(jobs, progress, notes)


OVERHEADS_MS = (0, 2, 4, 20)
MISTAKES = (0.5, 2.0)


def sensitivities(
    traces: Sequence[Trace],
    *,
    profile: Profile,
    gpus: int,
    policies: Sequence[str],
    seeds: int,
    progress: Progress,
) -> ExperimentOutcome:
    """The policies with another overhead a step, and with costs that are believed wrongly."""
    kernels = profile.kernel_only()
    cases = [
        (f"overhead {ms} ms", kernels.with_overhead(ms / 1000), kernels.with_overhead(ms / 1000))
        for ms in OVERHEADS_MS
    ]
    cases += [(f"believed x{factor:g}", profile, profile.scaled(factor)) for factor in MISTAKES]
    jobs: list[Job] = []
    traces, notes = _playable(traces)
    for trace in traces:
        for name, real, believed in cases:
            blank = Job(trace, real, believed, gpus, "libra", "libra", 0, variant=name)
            layout = propose(believed, blank.workload, gpus).layout
            jobs += [
                replace(blank, policy=policy, seed=seed, layout=layout)
                for seed in range(seeds)
                for policy in policies
            ]
    return run_jobs(jobs, progress, notes)
