"""Policies where an engine step costs more, and where costs are estimated wrongly.

python -m tests.research.sensitivities [options as of libra bench schedule]
"""

from __future__ import annotations

from dataclasses import replace

import typer

from libra_cli.bench.config import ExperimentConfig, Progress
from libra_cli.bench.experiments import blank_job, playable_traces, run_experiment, with_policies
from libra_cli.bench.jobs import Job
from libra_cli.bench.results import ExperimentResult
from libra_cli.cli.bench import QUICK
from libra_cli.cli.bench_options import ON, TO, UNDER, BenchOptions, taking
from libra_cli.cli.reports import run_experiments
from libra_cli.core.planning.search import propose
from tests.research.changed_costs import with_overhead

OVERHEADS_MS = (0, 2, 4, 20)
"""Milliseconds an engine step takes beyond its kernels; chosen, to bracket the shipped 4 ms."""
MISTAKES = (0.5, 2.0)
"""Factors by which the believed costs of servers are wrong; chosen."""


def sensitivities(config: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """The policies with another overhead a step, and with costs that are believed wrongly."""
    profile = config.profile
    slower = {ms: with_overhead(profile, ms / 1000) for ms in OVERHEADS_MS}
    cases = [(f"overhead {ms} ms", real, real) for ms, real in slower.items()]
    cases += [(f"believed x{factor:g}", profile, profile.scaled(factor)) for factor in MISTAKES]
    traces, notes = playable_traces(config)
    jobs: list[Job] = []
    for trace in traces:
        for name, real, believed in cases:
            blank = replace(blank_job(config, trace), profile=real, believed=believed, variant=name)
            layout = propose(believed, blank.workload, config.gpus, blank.settings).layout
            fixed = replace(blank, layout=layout)
            jobs += with_policies(fixed, config.policies, config.seeds)
    return run_experiment("where costs are others, or estimated wrongly", jobs, notes, progress)


@taking(*ON, "policies", *UNDER, *TO, policies=QUICK)
def main(context: typer.Context, asked: BenchOptions) -> None:
    """Policies where a step costs more, and where costs are estimated wrongly."""
    run_experiments([sensitivities], asked.conditions, asked.out_dir, asked.json_file)


if __name__ == "__main__":
    typer.run(main)
