"""StreamRL's ladder: streaming, lengths known, and asynchrony, each over the rung before.

Published (arXiv 2504.15930) are 15, 8 and 25 %, in this order, for reasoning without tools; here on
the workload like DAPO-Math-17K, whose lengths stay. Every rung has the plan that libra's prices say
is best for it, which nothing moves, and whole groups. Lengths are known as StreamRL's ranker knows
them: the longest fifth, with the published recall (``bench.contenders``).
"""

from __future__ import annotations

from dataclasses import replace

from libra_cli.bench.config import Progress
from libra_cli.bench.contenders import ADMISSION
from libra_cli.bench.jobs import Job, run_job
from libra_cli.bench.paper.systems import job_of
from libra_cli.bench.paper.tables import Figure, PaperRow, PaperScale, PaperTable, both_prices
from libra_cli.bench.paper.workloads import DAPO
from libra_cli.bench.parallel import simulated
from libra_cli.core.costs.profile import Profile

BASE = "least-loaded" + ADMISSION
RUNGS = (
    ("synchronous, whole batches", None, BASE, False, 0),
    ("+ streaming", 0.15, BASE, True, 0),
    ("+ longest fifth known", 0.08, "streamrl" + ADMISSION, True, 0),
    ("+ asynchronous, one step stale", 0.25, "streamrl" + ADMISSION, True, 1),
)
"""A name, the published gain over the rung before, a policy, training.stream, max_staleness."""


def streaming_table(scale: PaperScale, progress: Progress) -> PaperTable:
    """Simulate the ladder and return it."""
    jobs = [job for prices in both_prices().values() for job in _jobs(prices, scale)]
    rows = iter(simulated(run_job, jobs, progress))
    tokens_s = [
        [[next(rows)[0].throughput_tok_s for _ in range(scale.seeds)] for _ in RUNGS]
        for _ in both_prices()
    ]
    told: list[PaperRow] = []
    for at, (name, published, *_) in enumerate(RUNGS):
        if published is None:
            own = [Figure.over(ladder[at], "tok/s") for ladder in tokens_s]
            told.append(PaperRow(name, None, *own))
            continue
        own = [
            Figure.over(
                [a / b - 1 for a, b in zip(ladder[at], ladder[at - 1], strict=True)], "change"
            )
            for ladder in tokens_s
        ]
        told.append(PaperRow(name, Figure(published, "change"), *own))
    return PaperTable(
        "StreamRL, each over the line before",
        tuple(told),
        why=(
            "libra streams whole groups: of 16 samples nearly every one has a long member",
            "lengths and training's share decide what a rung is worth, and are not published",
            "the plan has equal servers, where StreamRL gives the longest fifth its own",
        ),
    )


def _jobs(prices: Profile, scale: PaperScale) -> list[Job]:
    blank = replace(job_of(DAPO, prices, scale), planner="static-best")
    return [
        replace(blank, policy=policy, stream=stream, bound=bound, seed=seed)
        for _, _, policy, stream, bound in RUNGS
        for seed in range(scale.seeds)
    ]
