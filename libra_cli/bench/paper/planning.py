"""How long planning takes, and what a switch of GPUs between the halves costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from libra_cli.bench.config import SHAPES
from libra_cli.bench.paper.systems import Runs, job_of, moving_shares
from libra_cli.bench.paper.tables import (
    AS_PUBLISHED,
    SHIPPED,
    WHOLE,
    Figure,
    PaperRow,
    PaperTable,
    both,
)
from libra_cli.bench.paper.workloads import R2E
from libra_cli.config.rollout import Shapes
from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.search import propose
from libra_cli.core.types import Seconds

PLANNED = ((48, None), (128, "12.3 s, 1.9 s memoised"), (1024, None))
"""Numbers of GPUs that are planned for, and what is published of them."""
REPEATS = 3


def planning_table() -> PaperTable:
    """Time a proposal for each number of GPUs, on this machine; the median of ``REPEATS``."""
    rows = [
        PaperRow(f"{gpus} GPUs, {shapes} servers", published, *both(partial(_plan, gpus, shapes)))
        for gpus, published in PLANNED
        for shapes in SHAPES[:2]
    ]
    return PaperTable(
        "time of the planner", tuple(rows), why=("libra plans no TP, PP or EP of the trainer",)
    )


def _plan(gpus: int, shapes: Shapes, prices: Profile) -> Figure:
    job = replace(
        job_of(R2E, prices, WHOLE), gpus=gpus, groups_per_step=max(1, gpus // 4), shapes=shapes
    )
    workload = job.workload
    took: list[Seconds] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        propose(prices, workload, gpus, job.settings)
        took.append(time.perf_counter() - began)
    return Figure(median(took), "s")


def switch_table(runs: Runs) -> PaperTable:
    """What a move of GPUs takes by either prices, and the share of libra's runs that moves took."""
    shares = [Figure.over(moving_shares(runs, prices), "share") for prices in _BOTH]
    rows = (
        PaperRow("GPUs from rollout to training", Figure(8.0, "s"), *both(_to_training)),
        PaperRow("GPUs from training to rollout", Figure(10.8, "s"), *both(_to_rollout)),
        PaperRow("share of a run, R2E-Gym-like", "under 3.5 % of a step", *shares),
    )
    return PaperTable(
        "what a switch costs",
        rows,
        why=(
            "shipped: a process ends and another starts, which is estimated and was not measured",
        ),
    )


_BOTH: Sequence[str] = (SHIPPED, AS_PUBLISHED)


def _to_training(prices: Profile) -> Figure:
    return Figure(prices.moves.to_training_s, "s")


def _to_rollout(prices: Profile) -> Figure:
    return Figure(prices.moves.arrive(max(prices.servers)), "s")
