"""The comparisons of ``libra bench``: one function an experiment, each many simulated runs.

``schedule`` compares policies on fixed plans, ``plan`` planners under one policy;
``ablation`` and ``sensitivities`` compare what is left of libra without its parts, and where costs
are others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from libra_cli.bench.config import DEFAULT_DRIFT, BenchError, ExperimentConfig, Progress
from libra_cli.bench.contenders import ABLATIONS
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

_T = TypeVar("_T")

STEPS = 16
"""Optimizer steps of a run under a fixed plan: three times as many as may be in flight, so that
most of them are trained once the pipeline is full."""
LONG_STEPS = 48
"""Optimizer steps of a run whose plan may change: some ten times as many as may be in flight, so
that filling the pipeline at first and emptying it at last count for little."""
PARTS = (
    ("static uniform", "uniform", USUAL_POLICY),
    ("+ planner", BASE_PLANNER, USUAL_POLICY),
    ("+ C-MLFQ", BASE_PLANNER, "libra"),
    ("+ elastic pool", "libra", "libra"),
)
"""The ablation of Libra (arXiv 2606.03077), in its order, without servers of unlike shapes, which
no plan has: a name, a planner, a policy."""
OVERHEADS_MS = (0, 2, 4, 20)
"""Milliseconds an engine step takes beyond its kernels; chosen, to bracket the shipped 4 ms."""
MISTAKES = (0.5, 2.0)
"""Factors by which the believed costs of servers are wrong; chosen."""


def schedule(config: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """Policies on the plan that libra's planner proposes for the trace."""
    traces, notes = _playable(config)
    jobs: list[Job] = []
    for trace in traces:
        blank = _job(config, trace)
        proposal = propose(config.profile, blank.workload, config.gpus)
        notes += [f"{trace.name}: {reason}" for reason in proposal.reasons[:2]]
        fixed = replace(blank, layout=proposal.layout)
        jobs += _with_policies(fixed, config.policies, config.seeds)
    return _run("policies on a fixed plan", jobs, notes, progress)


def plan(config: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """Planners under one policy, and the usual way beside them: a static split, sticky routing."""
    traces, notes = _playable(config)
    pairs = [(name, config.policy) for name in config.planners]
    if config.policy != USUAL_POLICY and BASE_PLANNER in config.planners:
        pairs.append((BASE_PLANNER, USUAL_POLICY))
    jobs = [
        replace(_drifting(config, trace, drift), planner=name, policy=policy, seed=seed)
        for trace in traces
        for drift in config.drifts
        for seed in range(config.seeds)
        for name, policy in pairs
    ]
    return _run(f"planners with {config.policy}", jobs, notes, progress)


def ablation(config: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """libra built up in the published order, then its scheduler with each part removed.

    Raises:
        BenchError: there is more than one drift; its parts are variants already.
    """
    if len(config.drifts) > 1:
        raise BenchError("an ablation has one drift", hint=f"--drift {DEFAULT_DRIFT}")
    traces, notes = _playable(config)
    jobs = [
        replace(
            _drifting(config, trace, config.drifts[0]),
            planner=planner,
            policy=policy,
            seed=seed,
            variant=name,
        )
        for trace in traces
        for seed in range(config.seeds)
        for name, planner, policy in PARTS
    ]
    for trace in traces:
        blank = replace(_job(config, trace), planner="fixed", variant="scheduler")
        layout = propose(config.profile, blank.workload, config.gpus).layout
        fixed = replace(blank, layout=layout)
        jobs += _with_policies(fixed, ("libra", *ABLATIONS), config.seeds)
    return _run("libra, part by part", jobs, notes, progress)


def sensitivities(config: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """The policies with another overhead a step, and with costs that are believed wrongly."""
    profile = config.profile
    slower = {ms: profile.kernel_only().with_overhead(ms / 1000) for ms in OVERHEADS_MS}
    cases = [(f"overhead {ms} ms", real, real) for ms, real in slower.items()]
    cases += [(f"believed x{factor:g}", profile, profile.scaled(factor)) for factor in MISTAKES]
    traces, notes = _playable(config)
    jobs: list[Job] = []
    for trace in traces:
        for name, real, believed in cases:
            blank = replace(_job(config, trace), profile=real, believed=believed, variant=name)
            layout = propose(believed, blank.workload, config.gpus).layout
            fixed = replace(blank, layout=layout)
            jobs += _with_policies(fixed, config.policies, config.seeds)
    return _run("where costs are others, or estimated wrongly", jobs, notes, progress)


# -- the runs of an experiment ---------------------------------------------------------------------


def _job(config: ExperimentConfig, trace: Trace) -> Job:
    """libra on this trace, seed 0."""
    return replace(config.job(trace, steps=STEPS), policy="libra")


def _drifting(config: ExperimentConfig, trace: Trace, drift: Drift) -> Job:
    """A run long enough for its plan to change, while the work does."""
    return replace(_job(config, trace), drift=drift, steps=LONG_STEPS, variant=str(drift))


def _with_policies(job: Job, policies: Sequence[str], seeds: int) -> list[Job]:
    return [replace(job, policy=policy, seed=seed) for seed in range(seeds) for policy in policies]


def _playable(config: ExperimentConfig) -> tuple[list[Trace], list[str]]:
    """The traces without what no run could play, and notes that say so."""
    found = [playable(trace, config.max_len) for trace in config.traces]
    notes = [note for _, notes in found for note in notes]
    return [trace for trace, _ in found], [config.conditions, *notes]


def _run(title: str, jobs: Sequence[Job], notes: list[str], progress: Progress) -> ExperimentResult:
    played = list(run_jobs(jobs, progress))
    timelines = [timeline for _, timeline in played if timeline is not None]
    return ExperimentResult(title, [row for row, _ in played], timelines, notes)


def run_jobs(
    jobs: Sequence[Job], progress: Progress
) -> Iterator[tuple[ResultRow, Timeline | None]]:
    """Simulate all of them; what came out, in the order of the jobs."""
    return simulated(run_job, jobs, progress)
