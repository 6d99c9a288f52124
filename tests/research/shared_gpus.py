"""What GPUs of the trainer earn in virtual time that serve while it waits (``serve: when-idle``).

    python -m tests.research.shared_gpus --trace tau2 moatless --bounds 1 2 --seeds 3

Static plans of every shape are simulated on the first seed, as ``libra bench regret`` does, and the
``BEST`` of them on every seed, each as it is and with a server on every node of the trainer beside
its ranks, which has ``--room`` of the KV cache of a server alone. Compared, seed by seed, are the
best of the plans as they are and the best of those with such servers, each the best in the mean.
Assumed: a server beside an idle trainer is as fast as one alone, and the weights of both stay in
memory, so that no time passes when they take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from libra_cli.bench.contenders import Future, contender
from libra_cli.bench.jobs import Job, longest_of, playable, world_of
from libra_cli.bench.regret import STEPS, StaticPlans
from libra_cli.bench.results import interval
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.planning.search import Layout
from libra_cli.core.types import Bucket, Pool, Slot
from libra_cli.sim.config import SimConfig
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace
from libra_cli.sim.world import World

BEST = 4
BESIDE = "beside the trainer"
PART = 99
"""The part of a node that such a server has in its name: no GPU's number."""


def throughput(job: Job, room: float) -> float:
    """Return generated tokens a second of trained trajectories; ``room`` 0 is the plan as it is."""
    scene = world_of(job).scene
    future = Future()
    policy = contender(job.policy, future, job.trace, job.seed)
    world = World(with_servers(scene, job, room) if room else scene, policy, job.groups())
    future.episode = world.episode
    tape = world.run()
    return sum(step.generated_tokens for step in tape.steps) / tape.ended_at


def with_servers(scene: SimConfig, job: Job, room: float) -> SimConfig:
    """Return the scene with a server beside the trainer's ranks of every node."""
    usual = scene.plan.servers[0][1]
    ranks = [slot for slot in scene.slots if slot.pool is Pool.TRAIN]
    fitting = [slot for slot in ranks if len(slot.gpus) in job.profile.servers]
    beside = tuple(Slot(f"{s.node}/{PART}", s.node, s.gpus, Pool.ROLLOUT) for s in fitting)
    shapes = (replace(usual, name=BESIDE, tensor_parallel=len(slot.gpus)) for slot in beside)
    servers = zip((slot.id for slot in beside), shapes, strict=True)
    share = {"rollout": 0.3, "train": 0.6, "serve": "when-idle"}
    told = scene.recipe.model_dump(mode="json", exclude_unset=True)
    told["nodes"] = [{"host": slot.node, "gpus": 1, "share": share} for slot in beside]

    def cost_of(bucket: Bucket) -> ServerLaw:
        cost = job.profile.servers[bucket.tensor_parallel]
        part = room if bucket.name == BESIDE else 1.0
        assert isinstance(cost, ServerCost), "a profile of a model without experts"
        return replace(cost, kv_tokens=int(part * cost.kv_tokens))

    return replace(
        scene,
        recipe=Recipe.model_validate(told) if beside else scene.recipe,
        plan=replace(scene.plan, servers=(*scene.plan.servers, *servers)),
        slots=(*scene.slots, *beside),
        cost_of=cost_of,
        guess_of=cost_of,
    )


def best_static(job: Job) -> list[Layout]:
    """Return the ``BEST`` static plans on the job's seed, the best first."""
    plans = StaticPlans(job)
    found: dict[Layout, float] = {}
    wanted: Sequence[Layout] = plans.first()
    while wanted:
        found |= {layout: throughput(replace(job, layout=layout), 0.0) for layout in wanted}
        wanted = plans.next(found)
    return sorted(found, key=lambda layout: -found[layout])[:BEST]


def compare(job: Job, seeds: int, room: float) -> str:
    """Return a line on the best plans of a trace and bound, as they are and with such servers."""
    layouts = best_static(job)
    every = [[replace(job, layout=one, seed=seed) for seed in range(seeds)] for one in layouts]
    plain = max(([throughput(one, 0.0) for one in jobs] for jobs in every), key=fmean)
    mixed = [[throughput(one, room) for one in jobs] for jobs in every]
    best = max(range(len(mixed)), key=lambda at: fmean(mixed[at]))
    gains = [then / now - 1 for then, now in zip(mixed[best], plain, strict=True)]
    low, high = interval(gains) or (float("nan"), float("nan"))
    return (
        f"{job.trace.name:20} bound {job.bound}: {fmean(plain):8,.0f} tok/s, {fmean(gains):+6.1%} "
        f"({low:+.1%} to {high:+.1%}) | {layouts[0]} | with servers: {layouts[best]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="servers beside a waiting trainer, simulated")
    parser.add_argument("--trace", nargs="+", default=["tau2", "moatless"])
    parser.add_argument("--bounds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--gpus", type=int, default=24)
    parser.add_argument("--profile", default="a800-qwen3-14b")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--room", type=float, default=0.5)
    asked = parser.parse_args()
    profile = load_profile(asked.profile)
    for name in asked.trace:
        trace, _ = playable(load_trace(name), longest_of(profile, asked.gpus))
        job = Job(trace, profile, profile, asked.gpus, "libra", "fixed", 0, steps=asked.steps)
        job = replace(job, groups_per_step=max(1, asked.gpus // 3))
        for bound in asked.bounds:
            found = compare(replace(job, bound=bound), asked.seeds, asked.room)
            sys.stdout.write(found + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
