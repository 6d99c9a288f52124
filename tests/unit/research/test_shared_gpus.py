"""Servers beside a trainer that waits, in virtual time."""

from __future__ import annotations

from dataclasses import replace

from libra_cli.bench.jobs import Job, longest_of, playable, world_of
from libra_cli.bench.regret import StaticPlans
from libra_cli.core.planning.search import Layout
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace
from tests.research.shared_gpus import BESIDE, best_static, throughput, with_servers


def a_job(steps: int = 3) -> Job:
    profile = load_profile("a800-qwen3-14b")
    trace, _ = playable(load_trace("mint"), longest_of(profile, 24))
    job = Job(trace, profile, profile, 24, "libra", "fixed", 0, steps=steps)
    return replace(job, groups_per_step=4, bound=1)


def waiting(job: Job) -> Layout:
    """A plan whose trainer waits most of the time: few servers, and much that trains."""
    return min(StaticPlans(job).first(), key=lambda layout: layout.rollout_gpus)


def test_more_is_played_where_the_trainer_waits_most_of_the_time() -> None:
    job = a_job()
    job = replace(job, layout=waiting(job))
    assert throughput(job, 0.5) > 1.1 * throughput(job, 0.0)


def test_such_a_server_has_all_gpus_of_its_node_and_less_room() -> None:
    job = a_job()
    job = replace(job, layout=waiting(job))
    alone = world_of(job).scene
    scene = with_servers(alone, job, 0.5)
    added = dict(scene.plan.servers[len(alone.plan.servers) :])
    assert added
    for slot in scene.slots[len(alone.slots) :]:
        bucket = added[slot.id]
        assert (bucket.name, bucket.tensor_parallel) == (BESIDE, len(slot.gpus))
        whole = job.profile.servers[bucket.tensor_parallel]
        assert scene.cost_of(bucket).kv_tokens == int(0.5 * whole.kv_tokens)


def test_static_plans_come_best_first() -> None:
    job = a_job(steps=2)
    found = [throughput(replace(job, layout=layout), 0.0) for layout in best_static(job)]
    assert len(found) > 1
    assert found == sorted(found, reverse=True)
