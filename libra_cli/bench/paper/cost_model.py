"""How far the cost model is off: static plans of the declared workloads, predicted and simulated.

A point is a workload, a layout of 48 GPUs and a staleness bound, under ``hold``. Nothing was fitted
on any. Predicted is what the planner plans with, the law of ``core.planning.search``, told the very
trajectories that are played: with others of the same prompts, as a planner has them, the longest of
a batch alone would decide. Simulated is the mean step once the pipeline is full. Rollout is told
where the halves take turns (bound 0), a step less its training; else it cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

from libra_cli.bench.config import Progress
from libra_cli.bench.jobs import Job, world_of
from libra_cli.bench.paper.systems import job_of
from libra_cli.bench.paper.tables import (
    GPUS,
    Figure,
    PaperRow,
    PaperScale,
    PaperTable,
    both_prices,
)
from libra_cli.bench.paper.workloads import WORKLOADS
from libra_cli.bench.parallel import simulated
from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.rollout_table import DEFAULT_SEATS, PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.types import Seconds

SERVERS = ((1, 24), (2, 12), (4, 6), (4, 9), (8, 4))
"""Tensor-parallel degree and number of the servers of each layout; all other GPUs train."""
BOUNDS = (0, 1, 2)
STEADY_STEPS = 6
"""Steps of a run beyond those in which the pipeline fills."""


@dataclass(frozen=True, slots=True)
class Point:
    """The relative errors of a point, less 0 where a step was predicted too short."""

    step: float
    training: float
    rollout: float | None


def cost_model_table(scale: PaperScale, progress: Progress) -> PaperTable:
    """Simulate the points by both sets of prices and return the errors."""
    prices = both_prices()
    jobs = [job for one in prices.values() for job in _jobs(one, scale)]
    points = list(simulated(_point, jobs, progress))
    each = len(points) // len(prices)
    own = [points[:each], points[each:]]
    rows = (
        _row("rollout, mean size of the error", "3.1 to 5.9 %", own, "rollout", most=False),
        _row("training, mean", "2.4 to 5.5 %", own, "training", most=False),
        _row("a step, mean", Figure(0.0635, "share"), own, "step", most=False),
        _row("a step, the worst", Figure(0.093, "share"), own, "step", most=True),
    )
    return PaperTable(
        f"error of the cost model, {each} static plans",
        rows,
        why=(
            "the simulator has these very prices and no noise, and queues where the law has means",
        ),
        notes=("published: against GPUs; here against the simulator, which has the same prices",),
    )


def _jobs(prices: Profile, scale: PaperScale) -> list[Job]:
    every = [
        replace(
            job_of(workload, prices, scale),
            layout=_layout(*servers, longest=workload.most_tokens),
            planner="fixed",
            bound=bound,
            steps=STEADY_STEPS + bound,
        )
        for bound in BOUNDS
        for workload in WORKLOADS.values()
        for servers in SERVERS
    ]
    return every[: scale.points]


def _layout(degree: int, number: int, longest: int) -> Layout:
    bucket = PlannedBucket(degree, number, longest, DEFAULT_SEATS)
    return Layout((bucket,), GPUS - bucket.gpus)


def _point(job: Job) -> Point:
    assert job.layout is not None
    played = job.work_of(islice(job.groups(), job.steps * job.groups_per_step))
    times = Search(job.believed, played, job.gpus, PlannerSettings()).times(job.layout)
    world = world_of(job)
    world.run()
    ended = [step.ended_at for step in world.recording.steps]
    filled = job.bound
    step_s = (ended[-1] - ended[filled]) / (len(ended) - 1 - filled)
    train_s = fmean(end - start for start, end in world.recording.trained[filled + 1 :])
    rollout = None if job.bound else _error(times.rollout_s, step_s - train_s)
    return Point(_error(times.step_s, step_s), _error(times.train_s, train_s), rollout)


def _error(predicted: Seconds, simulated: Seconds) -> float:
    return predicted / simulated - 1


def _row(
    what: str, published: Figure | str, own: Sequence[Sequence[Point]], part: str, *, most: bool
) -> PaperRow:
    told = []
    for points in own:
        sizes = [abs(error) for point in points if (error := getattr(point, part)) is not None]
        told.append(Figure(max(sizes) if most else fmean(sizes), "share"))
    return PaperRow(what, published, *told)
