"""Whole systems on workloads like the published ones, and Libra's ablation.

A system is a planner with the scheduler that is published with it. All have libra's admission by KV
cache, which their own servers do not: without it those of other systems preempt where caches are
small. The rule is the published one, whole groups (``hold``), under the staleness bound of the
artifact's configurations. Lengths grow as published, over fewer steps (``workloads.GROWTH``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from libra_cli.bench.config import Progress
from libra_cli.bench.contenders import ADMISSION
from libra_cli.bench.jobs import Job, planned_run
from libra_cli.bench.paper.tables import (
    AS_PUBLISHED,
    GPUS,
    SHIPPED,
    Figure,
    PaperRow,
    PaperScale,
    PaperTable,
    both_prices,
)
from libra_cli.bench.paper.workloads import (
    DAPO,
    GROUP_SIZE,
    GROWTH,
    R2E,
    SEARCH,
    WORKLOADS,
    DeclaredWorkload,
)
from libra_cli.bench.parallel import simulated
from libra_cli.bench.results import USUAL_POLICY, ResultRow
from libra_cli.config.rollout import Shapes
from libra_cli.core.costs.profile import Profile

BOUND, RULE = 2, "hold"
"""max_head_offpolicyness of the artifact's runs of R2E-Gym, and its rule for a batch."""
USUAL = USUAL_POLICY + ADMISSION
OURS, OWN_RULE = "libra", "libra, rule cut"


@dataclass(frozen=True, slots=True)
class System:
    """A planner with a scheduler; ``rule`` makes its batches, ``shapes`` are of its servers."""

    name: str
    planner: str
    policy: str
    rule: str = RULE
    shapes: Shapes = "alike"


SYSTEMS = (
    System("colocated", "colocated", USUAL),
    System("uniform", "uniform", USUAL),
    System("best static at start", "static-best", USUAL),
    System("greedy", "greedy", USUAL),
    System("streamrl", "streamrl", "streamrl" + ADMISSION),
    System("dynarl", "dynarl", "dynarl" + ADMISSION),
    System(OURS, "libra", "libra"),
    System(OWN_RULE, "libra", "libra", "cut"),
)
ABLATION = (
    System("+ heterogeneous TP", "static-best", USUAL, shapes="mixed"),
    System("+ C-MLFQ", "static-best", "cmlfq", shapes="mixed"),
    System("+ elastic pool", "libra", "cmlfq", shapes="mixed"),
)
"""The systems that the ablation has beside the others."""
LADDER = (
    ("static uniform", "uniform", 423.0),
    ("+ planner", "best static at start", 510.0),
    ("+ heterogeneous TP", "+ heterogeneous TP", 551.0),
    ("+ C-MLFQ", "+ C-MLFQ", 666.0),
    ("+ elastic pool", "+ elastic pool", 763.0),
)
"""The published ablation on R2E-Gym: a name, the system here, and tokens a second."""
LIBRA_OVER: Mapping[tuple[str, str], float] = {
    (SEARCH.name, "colocated"): 3.00,
    (DAPO.name, "colocated"): 1.96,
    (R2E.name, "colocated"): 2.09,
    (SEARCH.name, "best static at start"): 0.63,
    (SEARCH.name, "greedy"): 0.80,
    (R2E.name, "uniform"): 763 / 423 - 1,
}
"""The published throughput of Libra over that of another system, less 1."""

Runs: TypeAlias = dict[tuple[str, str, str], list["SystemRun"]]
"""Runs by prices, workload and system, one a seed."""


@dataclass(frozen=True, slots=True)
class SystemRun:
    """A run's row, and the share of its time that GPUs on their way did nothing."""

    row: ResultRow
    moving: float


def played(scale: PaperScale, progress: Progress) -> Runs:
    """Simulate every system on every workload, by both sets of prices."""
    keys, jobs = [], []
    for name, prices in both_prices().items():
        for workload in WORKLOADS.values():
            for system in (*SYSTEMS, *(ABLATION if workload is R2E else ())):
                for job in _jobs(system, workload, prices, scale):
                    keys.append((name, workload.name, system.name))
                    jobs.append(job)
    runs: Runs = {}
    for key, run in zip(keys, simulated(_run, jobs, progress), strict=True):
        runs.setdefault(key, []).append(run)
    return runs


def job_of(workload: DeclaredWorkload, prices: Profile, scale: PaperScale) -> Job:
    """Return the job of libra on the workload, which does not change, under the published rule."""
    return Job(
        workload.trace,
        prices,
        prices,
        GPUS,
        OURS,
        "libra",
        0,
        steps=scale.steps,
        groups_per_step=scale.groups,
        group_size=GROUP_SIZE,
        bound=BOUND,
        staleness=RULE,
        most_tokens=workload.most_tokens,
    )


def _jobs(
    system: System, workload: DeclaredWorkload, prices: Profile, scale: PaperScale
) -> Iterator[Job]:
    job = replace(
        job_of(workload, prices, scale),
        planner=system.planner,
        policy=system.policy,
        staleness=system.rule,
        shapes=system.shapes,
        drift=GROWTH,
    )
    return (replace(job, seed=seed) for seed in range(scale.seeds))


def _run(job: Job) -> SystemRun:
    row, _, steps = planned_run(job)
    return SystemRun(row, sum(step.moving_s for step in steps) / row.makespan_s)


# -- tables ----------------------------------------------------------------------------------------


def throughput_table(runs: Runs) -> PaperTable:
    """The throughput of libra, and by how much it is over that of every other system."""
    rows = []
    for workload in WORKLOADS.values():
        published = 2700.0 if workload is SEARCH else 763.0 if workload is R2E else None
        own = [_tokens_s(runs, prices, workload.name, OURS) for prices in (SHIPPED, AS_PUBLISHED)]
        known = None if published is None else Figure(published, "tok/s")
        rows.append(PaperRow(f"{workload.name}: libra", known, *own))
        rows += [_over_row(runs, workload.name, system.name) for system in SYSTEMS[:-2]]
        cut = [_change(runs, prices, workload.name, OWN_RULE, OURS) for prices in _BOTH]
        rows.append(PaperRow("  its own rule (cut) over hold", None, *cut))
    return PaperTable(
        "throughput of whole systems",
        tuple(rows),
        why=(
            "absolute tokens/s are of other trajectories: only their mean lengths are published",
            "the best static plan here is libra's own first one, told the lengths at the start",
        ),
        notes=(
            f"{GPUS} GPUs, rule {RULE}, bound {BOUND}; rivals have libra's admission by KV cache",
            "libra over dynarl is published for 160 NPUs: +18 to +37 %",
        ),
    )


def ablation_table(runs: Runs) -> PaperTable:
    """libra built up in the published order on R2E-Gym, each rung over the one before."""
    rows, before = [], ""
    known = 0.0
    for name, system, published in LADDER:
        if not before:
            own = [_tokens_s(runs, prices, R2E.name, system) for prices in _BOTH]
            rows.append(PaperRow(name, Figure(published, "tok/s"), *own))
        else:
            own = [_change(runs, prices, R2E.name, system, before) for prices in _BOTH]
            rows.append(PaperRow(name, Figure(published / known - 1, "change"), *own))
        before, known = system, published
    for what, one, other in (("in all", before, "uniform"), ("libra over that", OURS, before)):
        own = [_change(runs, prices, R2E.name, one, other) for prices in _BOTH]
        whole = Figure(known / LADDER[0][2] - 1, "change") if other == "uniform" else None
        rows.append(PaperRow(what, whole, *own))
    return PaperTable(
        "ablation on R2E-Gym, each over the line before",
        tuple(rows),
        why=(
            "the usual router takes no notice of unlike servers, and cmlfq does",
            "published are other trajectories, on GPUs; what libra has otherwise: libra help paper",
        ),
    )


_BOTH = (SHIPPED, AS_PUBLISHED)


def _over_row(runs: Runs, workload: str, system: str) -> PaperRow:
    published = LIBRA_OVER.get((workload, system))
    known = None if published is None else Figure(published, "change")
    own = [_change(runs, prices, workload, OURS, system) for prices in _BOTH]
    return PaperRow(f"  libra over {system}", known, *own)


def _tokens_s(runs: Runs, prices: str, workload: str, system: str) -> Figure:
    found = runs[prices, workload, system]
    return Figure.over([run.row.throughput_tok_s for run in found], "tok/s")


def _change(runs: Runs, prices: str, workload: str, one: str, other: str) -> Figure:
    """Return how much more tokens a second one system has than another, paired by seed."""
    pairs = zip(runs[prices, workload, one], runs[prices, workload, other], strict=True)
    return Figure.over([_ratio(a.row, b.row) - 1 for a, b in pairs], "change")


def _ratio(one: ResultRow, other: ResultRow) -> float:
    assert one.seed == other.seed
    return one.throughput_tok_s / other.throughput_tok_s


def moving_shares(runs: Runs, prices: str) -> Sequence[float]:
    """The share of each run of libra in which GPUs on their way did nothing, on R2E-Gym."""
    return [run.moving for run in runs[prices, R2E.name, OURS]]
