"""What routes the turns on unlike servers, and what those are worth, in the simulator.

    python -m tests.research.unlike_servers --trace tau2 --rules hold,cut --bounds 0,1 [--published]

Of the GPUs libra's plan of alike servers gives some to rollout. On as many the best mixture of two
or three shapes, by the same table, plays the same groups under each of ``POLICIES``. With
``--published`` a step takes 4 ms beyond its kernels, the KV cache is 15 %, and servers have 32
seats: servers of one and of eight GPUs then cross as published, and little else does so
(``a800-qwen3-14b-as-published`` is a fit of the whole). Told is throughput, seed by seed, ± 95 %
over the seeds.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import typer

from libra_cli.bench.conditions import NETWORK, PROFILE
from libra_cli.bench.config import RULES
from libra_cli.bench.jobs import Job, longest_of, playable, run_job
from libra_cli.bench.parallel import simulated
from libra_cli.bench.results import ResultRow, interval
from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.rollout_table import DEFAULT_SEATS, PlannedBucket, RolloutTable
from libra_cli.core.planning.search import Layout, PlannerSettings, propose
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace
from tests.research.changed_costs import with_kv_share, with_overhead

POLICIES = ("libra", "cmlfq", "no tool signals", "known-levels")
ALIKE = "alike"
"""The layout of libra's plan, under the policy ``libra``."""
COMPARED = (
    ("mixed over alike", "libra", ALIKE),
    ("cmlfq over libra", "cmlfq", "libra"),
    ("cmlfq over no tool signals", "cmlfq", "no tool signals"),
    ("known-levels over libra", "known-levels", "libra"),
)
DEGREES = (1, 2, 4, 8)


def arguments() -> Namespace:
    """What was typed."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--trace", action="append", required=True)
    add("--rules", default="hold,cut")
    add("--bounds", default="0,1,2,4")
    add("--published", action="store_true", help="by constants nearest to the published ratios")
    add("--gpus", type=int, default=24)
    add("--steps", type=int, default=8)
    add("--seeds", type=int, default=5, help="how many, from 0 on")
    add("--out", type=Path, default=Path("unlike-servers.jsonl"))
    return parser.parse_args()


def prices(published: bool) -> tuple[Profile, int]:
    """The profile, and the seats of a server."""
    shipped = load_profile(PROFILE).on_network(NETWORK)
    if not published:
        return shipped, DEFAULT_SEATS
    return with_kv_share(with_overhead(shipped, 0.004), 0.15), 32


def mixtures(gpus: int, seats: int) -> Iterator[tuple[PlannedBucket, ...]]:
    """Every way to use all of the GPUs in servers of two or three shapes, those of one in pairs."""
    steps = (2, 1, 1, 1)
    ranges = (range(0, gpus // d + 1, by) for d, by in zip(DEGREES, steps, strict=True))
    for numbers in product(*ranges):
        shapes = [(d, n) for d, n in zip(DEGREES, numbers, strict=True) if n]
        if sum(d * n for d, n in shapes) == gpus and len(shapes) in (2, 3):
            yield tuple(PlannedBucket(d, n, 1, seats) for d, n in shapes)


def layouts(job: Job, seats: int) -> tuple[Layout, Layout]:
    """libra's plan of alike servers, and the best mixture on as many GPUs beside it."""
    plan = propose(job.profile, job.workload, job.gpus, PlannerSettings(max_num_seqs=seats))
    gpus, train_s = plan.layout.rollout_gpus, plan.times.train_s
    table = RolloutTable(job.profile.servers, job.workload, gpus, max_num_seqs=seats)
    best = min(mixtures(gpus, seats), key=lambda buckets: table.buckets_s(buckets, train_s))
    return plan.layout, replace(plan.layout, buckets=table.boundaries(best, train_s))


def jobs_of(asked: Namespace) -> Iterator[Job]:
    """The alike servers and every policy on the mixture, of each trace, rule, bound and seed."""
    profile, seats = prices(asked.published)
    rules, bounds = asked.rules.split(","), [int(bound) for bound in asked.bounds.split(",")]
    for name, rule, bound in product(asked.trace, rules, bounds):
        if rule != "hold" and not bound:
            continue  # nothing may be late there, so every rule holds
        trace, _ = playable(load_trace(name), longest_of(profile, asked.gpus))
        blank = Job(trace, profile, profile, asked.gpus, "libra", "libra", 0, steps=asked.steps)
        blank = replace(blank, bound=bound, staleness=RULES[rule])
        alike, mixed = layouts(blank, seats)
        for seed in range(asked.seeds):
            about = replace(blank, seed=seed, variant=f"{rule} {bound}")
            yield replace(about, layout=alike)
            for policy in POLICIES:
                yield replace(about, layout=mixed, policy=policy)


def row_of(job: Job) -> dict[str, Any]:
    """Simulate one run; return what it is and its throughput."""
    row: ResultRow
    row, _ = run_job(job)
    assert job.layout is not None
    alone = len(job.layout.buckets) == 1
    who = ALIKE if alone else job.policy
    kept = {"servers": str(job.layout), "tokens_per_s": row.throughput_tok_s, "moves": row.moves}
    return {"trace": row.trace, "rule": row.variant, "seed": row.seed, "who": who, **kept}


def table_of(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines: of each trace and rule what is compared, paired by seed."""
    for cell in dict.fromkeys((row["trace"], row["rule"]) for row in rows):
        mine = [row for row in rows if (row["trace"], row["rule"]) == cell]
        yield f"{cell[0]}, {cell[1]}: " + " | ".join(dict.fromkeys(row["servers"] for row in mine))
        rates = {(row["who"], row["seed"]): row["tokens_per_s"] for row in mine}
        seeds = sorted({row["seed"] for row in mine})
        for title, one, other in COMPARED:
            gains = [rates[one, seed] / rates[other, seed] - 1 for seed in seeds]
            spread = interval(gains)
            sure = "" if spread is None else f" ± {50 * (spread[1] - spread[0]):.1f}"
            yield f"    {title}: {100 * fmean(gains):+.1f}{sure} %"


def main() -> None:
    """Simulate, write every run, and print the table."""
    asked = arguments()
    rows = []
    with asked.out.open("w") as file:
        for row in simulated(row_of, list(jobs_of(asked)), lambda text: None):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    typer.echo("\n".join(table_of(rows)))


if __name__ == "__main__":
    main()
