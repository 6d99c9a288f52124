"""What servers earn that take requests while the trainer on their GPUs waits, and their prices.

Static plans are simulated on recorded trajectories with and without a server on each node of eight
that trains as a whole, which has the part of a KV cache that the memory law leaves
(``bench.idle_servers``). For each plan the seconds of a step, from the step on by which the
pipeline has filled, beside those that the planner predicts; then the best plan with such servers
beside the best without, paired by seed.

    python -m tests.research.shared_gpus --trace tau2 moatless mint taubench --bounds 0 1 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

from libra_cli.bench.idle_servers import with_idle_servers
from libra_cli.bench.jobs import Job, longest_of, playable, world_of
from libra_cli.bench.regret import STEPS, StaticPlans
from libra_cli.bench.results import interval
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.types import Seconds
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import RecordedEpisode, load_trace

BEST = 4


@dataclass(frozen=True, slots=True)
class Simulated:
    """A plan that stays: seconds of a step once the pipeline has filled, by seed, and predicted."""

    layout: Layout
    steps_s: tuple[Seconds, ...]
    priced_s: Seconds
    throughputs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds of a step."""
        return fmean(self.steps_s) / self.priced_s


def simulated(job: Job, layout: Layout, seeds: Sequence[int]) -> Simulated:
    """Simulate a plan on these seeds, and predict its steps for the work of the run."""
    steps_s, throughputs = [], []
    for seed in seeds:
        tape = world_of(replace(job, layout=layout, seed=seed)).run()
        first = max(1, min(round(job.overlap), len(tape.steps) // 2))
        took = tape.steps[-1].ended_at - tape.steps[first - 1].ended_at
        steps_s.append(took / (len(tape.steps) - first))
        throughputs.append(sum(step.generated_tokens for step in tape.steps) / tape.ended_at)
    every = [group for seed in seeds for group in played(replace(job, seed=seed))]
    search = Search(job.profile, job.work_of(every), job.gpus, PlannerSettings())
    priced_s = search.times(layout).step_s
    return Simulated(layout, tuple(steps_s), priced_s, tuple(throughputs))


def played(job: Job) -> list[tuple[RecordedEpisode, ...]]:
    """The groups of as many steps as the run has."""
    return list(islice(job.groups(), job.steps * job.groups_per_step))


def best_static(job: Job) -> list[Layout]:
    """Return the ``BEST`` static plans on the job's seed, the best first."""
    plans = StaticPlans(job)
    found: dict[Layout, float] = {}
    wanted: Sequence[Layout] = plans.first()
    while wanted:
        found |= {one: simulated(job, one, [job.seed]).throughputs[0] for one in wanted}
        wanted = plans.next(found)
    return sorted(found, key=lambda layout: -found[layout])[:BEST]


def compare(job: Job, seeds: Sequence[int]) -> Iterator[str]:
    """Yield a line for each of the best plans of a trace and bound, without such servers and with,
    and one on what they earn."""
    longest = job.work_of(played(job)).longest.context
    plain, mixed = [], []
    for layout in best_static(job):
        plain.append(simulated(job, layout, seeds))
        yield _line(job, plain[-1])
        beside = with_idle_servers(layout, job.profile, job.gpus, longest)
        if beside is not None:
            mixed.append(simulated(job, beside, seeds))
            yield _line(job, mixed[-1])
    if not mixed:
        yield f"{job.trace.name} bound {job.bound}: no such servers beside any of these"
        return
    then, now = (max(some, key=lambda one: fmean(one.throughputs)) for some in (mixed, plain))
    gains = [a / b - 1 for a, b in zip(then.throughputs, now.throughputs, strict=True)]
    low, high = interval(gains) or (float("nan"), float("nan"))
    yield f"{job.trace.name} bound {job.bound}: {fmean(gains):+.1%} ({low:+.1%} to {high:+.1%})"


def _line(job: Job, one: Simulated) -> str:
    measured = " ".join(f"{step_s:.1f}" for step_s in one.steps_s)
    return (
        f"{job.trace.name:12} {job.bound} {one.priced_s:8.1f} s priced, ratio {one.ratio:.2f}, "
        f"{measured} s | {fmean(one.throughputs):,.0f} tok/s | {one.layout}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="servers beside a waiting trainer, simulated")
    parser.add_argument("--trace", nargs="+", default=["tau2", "moatless"])
    parser.add_argument("--bounds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--gpus", type=int, default=24)
    parser.add_argument("--profile", default="a800-qwen3-14b")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    profile = load_profile(asked.profile)
    for name in asked.trace:
        trace, _ = playable(load_trace(name), longest_of(profile, asked.gpus))
        job = Job(trace, profile, profile, asked.gpus, "libra", "fixed", 0, steps=asked.steps)
        job = replace(job, groups_per_step=max(1, asked.gpus // 3))
        for bound in asked.bounds:
            for line in compare(replace(job, bound=bound), range(asked.seeds)):
                sys.stdout.write(line + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
