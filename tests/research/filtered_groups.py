"""What dynamic sampling costs in virtual time, beside runs without it on the same trajectories.

    python -m tests.research.filtered_groups --trace tau2 --seeds 3 --mean 0.5 0.9

Lengths and tool times are played as recorded, on GPUs of a shipped profile with the roles that the
uniform split gives them. Rewards are drawn: each group has a success rate from a beta distribution
with this mean and with a + b = 1, so that most tasks are easy or hard. ``s/group`` are seconds for
each group with signal that was trained.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from statistics import fmean

from libra_cli.bench.contenders import Future, contender
from libra_cli.bench.jobs import Job, longest_of, playable, world_of
from libra_cli.config.recipe import Recipe
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import RecordedEpisode, load_trace
from libra_cli.sim.world import World

MORE = 12
"""Times as many groups are there as the steps train."""
COLUMNS = ("without", "filtered", "waited", "s/step", "s/group")


def with_rewards(
    groups: Iterator[tuple[RecordedEpisode, ...]], mean: float, seed: int
) -> Iterator[tuple[RecordedEpisode, ...]]:
    """The same groups, each with a success rate of its own."""
    random = Random(f"rewards/{seed}")
    for group in groups:
        rate = random.betavariate(mean, 1 - mean)
        yield tuple(replace(one, reward=float(random.random() < rate)) for one in group)


def played(job: Job, mean: float, *, sampling: bool) -> tuple[float, ...]:
    """One run: ``COLUMNS``."""
    drawn = world_of(job)
    told = drawn.scene.recipe.model_dump(mode="json")
    told["rollout"]["dynamic_sampling"] = sampling
    scene = replace(drawn.scene, recipe=Recipe.model_validate(told))
    groups = with_rewards(replace(job, steps=job.steps * MORE).groups(), mean, job.seed)
    policy = contender(job.policy, Future(), job.trace, job.seed)
    steps = World(scene, policy, groups).run().steps
    batches = [{name: value or 0.0 for name, value in step.batch.items()} for step in steps]
    seconds = (steps[-1].ended_at - steps[0].ended_at) / (len(steps) - 1)
    without = fmean(batch["share_without_signal"] for batch in batches)
    filtered = fmean(batch.get("share_filtered", 0.0) for batch in batches)
    waited = sum(step.waited_s for step in steps[1:]) / (steps[-1].ended_at - steps[0].ended_at)
    trained = job.groups_per_step * (1 - without)
    return without, filtered, waited, seconds, seconds / trained


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", default="tau2")
    parser.add_argument("--profile", default="a800-qwen3-14b")
    parser.add_argument("--gpus", type=int, default=24)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mean", type=float, nargs="+", default=[0.5, 0.9])
    given = parser.parse_args()
    profile = load_profile(given.profile)
    trace, _ = playable(load_trace(given.trace), longest_of(profile, given.gpus))
    blank = Job(trace, profile, profile, given.gpus, "libra", "uniform", 0, steps=given.steps)
    blank = replace(blank, bound=1, staleness="cut", groups_per_step=16)
    sys.stdout.write(f"{'mean':>5} {'seed':>4} {'sampling':>8}")
    sys.stdout.write("".join(f"{name:>9}" for name in COLUMNS) + "\n")
    for mean in given.mean:
        for seed in range(given.seeds):
            for sampling in (False, True):
                row = played(replace(blank, seed=seed), mean, sampling=sampling)
                sys.stdout.write(f"{mean:5} {seed:4} {sampling!s:>8}")
                sys.stdout.write("".join(f"{value:9.3f}" for value in row) + "\n")


if __name__ == "__main__":
    main()
