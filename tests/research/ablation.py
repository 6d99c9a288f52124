"""libra built up part by part, and its scheduler with each part removed.

python -m tests.research.ablation [options as of libra bench plan]
"""

from __future__ import annotations

from dataclasses import replace

import typer

from libra_cli.bench.conditions import DRIFT
from libra_cli.bench.config import BenchError, ExperimentConfig, Progress
from libra_cli.bench.contenders import ABLATIONS
from libra_cli.bench.experiments import (
    blank_job,
    drifting_job,
    playable_traces,
    run_experiment,
    with_policies,
)
from libra_cli.bench.results import BASE_PLANNER, USUAL_POLICY, ExperimentResult
from libra_cli.cli.bench_options import ON, TO, UNDER, BenchOptions, taking
from libra_cli.cli.reports import run_experiments
from libra_cli.config.rollout import Shapes
from libra_cli.core.planning.search import propose

PARTS: tuple[tuple[str, str, str, Shapes], ...] = (
    ("static uniform", "uniform", USUAL_POLICY, "alike"),
    ("+ planner", BASE_PLANNER, USUAL_POLICY, "alike"),
    ("+ unlike servers", BASE_PLANNER, USUAL_POLICY, "mixed"),
    ("+ scheduler", BASE_PLANNER, "libra", "mixed"),
    ("+ elastic pool", "libra", "libra", "mixed"),
)
"""The ablation of Libra (arXiv 2606.03077), in its order: a name, a planner, a policy, and the
shapes of servers. Published on R2E-Gym: 423, 510, 551, 666 and 763 tokens a second."""


def ablation(config: ExperimentConfig, progress: Progress) -> ExperimentResult:
    """libra built up in the published order, then its scheduler with each part removed.

    Raises:
        BenchError: there is more than one drift; its parts are variants already.
    """
    if len(config.drifts) > 1:
        raise BenchError("an ablation has one drift", hint=f"--drift {DRIFT}")
    traces, notes = playable_traces(config)
    jobs = [
        replace(
            drifting_job(config, trace, config.drifts[0]),
            planner=planner,
            policy=policy,
            shapes=shapes,
            seed=seed,
            variant=name,
        )
        for trace in traces
        for seed in range(config.seeds)
        for name, planner, policy, shapes in PARTS
    ]
    for trace in traces:
        blank = replace(blank_job(config, trace), planner="fixed", variant="scheduler")
        layout = propose(config.profile, blank.workload, config.gpus, blank.settings).layout
        fixed = replace(blank, layout=layout)
        jobs += with_policies(fixed, ("libra", *ABLATIONS), config.seeds)
    return run_experiment("libra, part by part", jobs, notes, progress)


@taking(*ON, "drift", *UNDER, *TO)
def main(context: typer.Context, asked: BenchOptions) -> None:
    """libra built up part by part, and its scheduler with each part removed."""
    run_experiments([ablation], asked.conditions, asked.out_dir, asked.json_file)


if __name__ == "__main__":
    typer.run(main)
