"""Servers beside a trainer that waits, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra_cli.bench.idle_servers import BESIDE, with_idle_servers
from libra_cli.bench.jobs import Job, longest_of, playable, world_of
from libra_cli.bench.regret import StaticPlans
from libra_cli.core.planning.search import Layout
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace
from tests.research.shared_gpus import best_static, simulated

LONGEST = 20_000


def a_job(steps: int = 3) -> Job:
    profile = load_profile("a800-qwen3-14b")
    trace, _ = playable(load_trace("mint"), longest_of(profile, 24))
    job = Job(trace, profile, profile, 24, "libra", "fixed", 0, steps=steps)
    return replace(job, groups_per_step=4, bound=1)


def waiting(job: Job) -> Layout:
    """A plan whose trainer waits most of the time: few servers, and much that trains."""
    return min(StaticPlans(job).first(), key=lambda layout: layout.rollout_gpus)


def beside(job: Job, layout: Layout) -> Layout:
    found = with_idle_servers(layout, job.profile, job.gpus, LONGEST)
    assert found is not None
    return found


def test_more_is_played_where_the_trainer_waits_most_of_the_time() -> None:
    job = a_job()
    layout = waiting(job)
    alone, shared = (simulated(job, one, [0]) for one in (layout, beside(job, layout)))
    assert shared.throughputs[0] > 1.1 * alone.throughputs[0]
    assert shared.priced_s < alone.priced_s


def test_such_a_server_has_all_gpus_of_its_node_and_what_the_memory_law_leaves() -> None:
    job = a_job()
    layout = beside(job, waiting(job))
    world = world_of(replace(job, layout=layout))
    world.run()
    added = {slot: one for slot, one in world.scene.plan.servers if one.name == BESIDE}
    assert [(one.tensor_parallel, one.number) for one in layout.idle] == [(8, len(added))]
    cost = job.profile.sharing(8, layout.idle[0].memory)
    assert cost is not None
    assert cost.kv_tokens < job.profile.servers[8].kv_tokens
    ended = dict(world.servers.retired)
    for slot in added:
        assert ended[slot].busy_s > 0
        assert ended[slot].cost.kv_tokens == cost.kv_tokens
    believed = [world.scene.guess_of(bucket).kv_tokens for bucket in added.values()]
    assert believed == [cost.kv_tokens] * len(added)


def test_nodes_that_also_serve_have_none() -> None:
    job = a_job()
    layout = StaticPlans(job).layout((4, 3))
    assert layout is not None
    assert [one.number for one in beside(job, layout).idle] == [1], "of twelve ranks eight"
    layout = StaticPlans(job).layout((1, 17))
    assert layout is None or with_idle_servers(layout, job.profile, 24, LONGEST) is None


def test_static_plans_come_best_first() -> None:
    job = a_job(steps=2)
    found = [simulated(job, layout, [0]).throughputs[0] for layout in best_static(job)]
    assert len(found) > 1
    assert found == sorted(found, reverse=True)


def test_prices_are_those_of_what_is_simulated() -> None:
    job = a_job(steps=6)
    layout = waiting(job)
    for one in (layout, beside(job, layout)):
        assert simulated(job, one, [0]).ratio == pytest.approx(1.0, abs=0.25)
