"""What servers of several shapes earn, by rule and bound, and whether ``auto`` knows it.

For each seed libra's first plan with alike servers, with mixed ones and with ``auto`` is kept for a
whole run in the simulator; the mixed one also with a scheduler that is told every length and keeps
trajectories on the servers that the plan means them for (``known-bucket``), and with the policies
asked for. Throughput is paired by seed with that of the alike plan.

    python -m tests.research.mixed_servers --trace tau2bench mint --bounds 0 1 2 4 --rules hold cut
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import log
from statistics import fmean

from libra_cli.bench.config import RULES
from libra_cli.bench.jobs import Job, first_layout_of, longest_of, playable, world_of
from libra_cli.bench.paper.workloads import WORKLOADS
from libra_cli.bench.regret import GPUS_A_GROUP
from libra_cli.bench.results import interval
from libra_cli.config.rollout import Shapes
from libra_cli.core.planning.search import Layout, Search
from libra_cli.core.types import Seconds
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace

ORACLE = "known-bucket"


def throughput(job: Job, layout: Layout, policy: str) -> tuple[float, Seconds]:
    """Generated tokens a second of a plan that stays, and seconds of a step once it has filled."""
    tape = world_of(replace(job, layout=layout, policy=policy)).run()
    first = max(1, min(round(job.overlap), len(tape.steps) // 2))
    steps_s = (tape.steps[-1].ended_at - tape.steps[first - 1].ended_at) / (len(tape.steps) - first)
    return sum(step.generated_tokens for step in tape.steps) / tape.ended_at, steps_s


def compare(job: Job, seeds: int, policies: Sequence[str]) -> Iterator[str]:
    """Yield a line of gains over the alike plan in percent, with their 95 % intervals."""
    contenders: list[tuple[str, Shapes, str]] = [
        *((f"mixed {policy}", "mixed", policy) for policy in (*policies, ORACLE)),
        ("auto", "auto", policies[0]),
    ]
    gains: dict[str, list[float]] = {name: [] for name, *_ in contenders}
    further: list[float] = []
    mixtures = 0
    every = [_Plans(replace(job, seed=seed)) for seed in range(seeds)]
    for plans in every:
        usual, alike_s = plans.played("alike", policies[0])
        for name, shapes, policy in contenders:
            tokens, step_s = plans.played(shapes, policy)
            gains[name].append(100 * (tokens / usual - 1))
            if (shapes, policy) == ("mixed", policies[0]):
                priced = plans.priced_s("mixed") / plans.priced_s("alike")
                further.append(log(step_s / alike_s / priced))
        mixtures += len(plans.layout("auto").servers) > 1
    told = ", ".join(f"{name} {_gain(found)}" for name, found in gains.items())
    yield (
        f"{job.trace.name:10} {job.staleness} {job.bound}: {told}; auto mixed {mixtures} of "
        f"{seeds}, mixed {100 * fmean(further):+.1f} % further above its price "
        f"({every[0].layout('alike')}; {every[0].layout('mixed')})"
    )


class _Plans:
    """libra's first plans of one seed, each simulated once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.layout = lru_cache(self._layout)
        self._throughput = lru_cache(partial(throughput, job))
        self._search = Search(job.profile, job.workload, job.gpus, job.settings)

    def _layout(self, shapes: Shapes) -> Layout:
        return first_layout_of(replace(self._job, shapes=shapes), self._job.workload)

    def played(self, shapes: Shapes, policy: str) -> tuple[float, Seconds]:
        """Throughput and seconds of a step of the plan with such servers."""
        return self._throughput(self.layout(shapes), policy)

    def priced_s(self, shapes: Shapes) -> Seconds:
        """Predicted seconds of its step."""
        return self._search.times(self.layout(shapes)).step_s


def _gain(found: Sequence[float]) -> str:
    low, high = interval(found) or (float("nan"), float("nan"))
    return f"{fmean(found):+.1f} ± {(high - low) / 2:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="servers of several shapes, simulated")
    parser.add_argument("--trace", nargs="+", default=["tau2bench", "taubench", "moatless", "mint"])
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=["hold", "cut"])
    parser.add_argument("--bounds", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--gpus", type=int, default=24)
    parser.add_argument("--profile", default="a800-qwen3-14b")
    parser.add_argument("--policies", nargs="+", default=["libra"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    asked = parser.parse_args()
    profile = load_profile(asked.profile)
    for bound in asked.bounds:
        for rule in asked.rules if bound else asked.rules[:1]:
            for name in asked.trace:
                found = WORKLOADS[name].trace if name in WORKLOADS else load_trace(name)
                trace, _ = playable(found, longest_of(profile, asked.gpus))
                job = Job(trace, profile, profile, asked.gpus, "libra", "static-best", 0)
                job = replace(job, bound=bound, staleness=RULES[rule], steps=asked.steps)
                job = replace(job, groups_per_step=max(1, asked.gpus // GPUS_A_GROUP))
                for line in compare(job, asked.seeds, asked.policies):
                    sys.stdout.write(line + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
