"""The comparisons of ``libra bench``: one function an experiment, each many simulated runs.

``schedule`` compares policies on fixed plans, ``plan`` planners under one policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from libra_cli.bench.config import ExperimentConfig, Progress
from libra_cli.bench.jobs import Job, playable, run_job
from libra_cli.bench.parallel import simulated
from libra_cli.bench.results import (
    BASE_PLANNER,
    USUAL_POLICY,
    ExperimentResult,
    ResultRow,
    Timeline,
)
from libra_cli.core.planning.search import propose
from libra_cli.sim.drift import Drift
from libra_cli.sim.traces import Trace

STEPS = 16
"""Optimizer steps of a run under a fixed plan: three times as many as may be in flight, so that
most of them are trained once the pipeline is full."""
LONG_STEPS = 48
"""Optimizer steps of a run whose plan may change: some ten times as many as may be in flight, so
that filling the pipeline at first and emptying it at last count for little."""


def schedule(config: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """Compare policies on the plan that libra's planner proposes for the trace."""
    traces, notes = playable_traces(config)
    jobs: list[Job] = []
    for trace in traces:
        blank = blank_job(config, trace)
        proposal = propose(config.profile, blank.workload, config.gpus, blank.settings)
        notes += [f"{trace.name}: {reason}" for reason in proposal.reasons[:2]]
        fixed = replace(blank, layout=proposal.layout)
        jobs += with_policies(fixed, config.policies, config.seeds)
    return run_experiment("policies on a fixed plan", jobs, notes, progress)


def plan(config: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """Compare planners under one policy, and the usual way beside
    them: a static split, sticky routing.
    """
    traces, notes = playable_traces(config)
    pairs = [(name, config.policy) for name in config.planners]
    if config.policy != USUAL_POLICY and BASE_PLANNER in config.planners:
        pairs.append((BASE_PLANNER, USUAL_POLICY))
    jobs = [
        replace(drifting_job(config, trace, drift), planner=name, policy=policy, seed=seed)
        for trace in traces
        for drift in config.drifts
        for seed in range(config.seeds)
        for name, policy in pairs
    ]
    return run_experiment(f"planners with {config.policy}", jobs, notes, progress)


# -- the runs of an experiment ---------------------------------------------------------------------


def blank_job(config: ExperimentConfig, trace: Trace) -> Job:
    """Return the job of libra on this trace, with seed 0, that contenders are derived from."""
    return replace(config.job(trace, steps=STEPS), policy="libra")


def drifting_job(config: ExperimentConfig, trace: Trace, drift: Drift) -> Job:
    """A run long enough for its plan to change, while the work does."""
    return replace(blank_job(config, trace), drift=drift, steps=LONG_STEPS, variant=str(drift))


def with_policies(job: Job, policies: Sequence[str], seeds: int) -> list[Job]:
    """The job under each policy, on each workload."""
    return [replace(job, policy=policy, seed=seed) for seed in range(seeds) for policy in policies]


def playable_traces(config: ExperimentConfig) -> tuple[list[Trace], list[str]]:
    """The traces without what no run could play, and notes that say so."""
    found = [playable(trace, config.max_len) for trace in config.traces]
    notes = [note for _, notes in found for note in notes]
    return [trace for trace, _ in found], [config.conditions, *notes]


def run_experiment(
    title: str, jobs: Sequence[Job], notes: list[str], progress: Progress
) -> ExperimentResult:
    """Simulate all jobs of an experiment and return its result."""
    played = list(run_jobs(jobs, progress))
    timelines = [timeline for _, timeline in played if timeline is not None]
    return ExperimentResult(title, [row for row, _ in played], timelines, notes)


def run_jobs(
    jobs: Sequence[Job], progress: Progress
) -> Iterator[tuple[ResultRow, Timeline | None]]:
    """Simulate all jobs; yield the row of each and its timeline, if that was kept, in order."""
    return simulated(run_job, jobs, progress)
