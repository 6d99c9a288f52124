"""Gradients and versions take their time on the network, in simulated runs and in the law."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from libra_cli.bench.jobs import Job, playable, world_of
from libra_cli.core.costs.profile import CHANGED, Profile
from libra_cli.core.planning.gpu_placement import GpuPlacement
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout
from libra_cli.core.planning.training_table import SMALLER, TrainingTable
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace
from libra_cli.sim.world import World

PROFILE = load_profile("a800-qwen3-14b")
TRACE, _ = playable(load_trace("mint"), 20_000)
LAYOUT = Layout((PlannedBucket(2, 4, 20_000, 128),), 16)
WORK = Workload(tuple(TrajectorySample(500, 500 * n, 500, 4, 2.0) for n in range(1, 17)), 256)


def world(profile: Profile, base: int) -> World:
    """Four servers, a base group of so many GPUs, and the rest of 16 a gradient worker."""
    job = Job(
        TRACE,
        profile,
        profile,
        24,
        "libra",
        "libra",
        0,
        start=LAYOUT,
        steps=3,
        groups_per_step=8,
        group_size=4,
        bound=4,
        script=(replace(LAYOUT, training_gpus=base),),
    )
    return world_of(job)


def test_a_link_says_how_long_gradients_and_versions_travel() -> None:
    linked = PROFILE.on_network(200.0)
    parameters = PROFILE.facts.parameters
    assert linked.training.transfer_s == pytest.approx(4 * parameters / 25e9)
    changed_s = CHANGED * 2 * parameters / 25e9
    assert linked.surroundings.sync_s == pytest.approx(PROFILE.surroundings.sync_s + changed_s)
    assert PROFILE.training.transfer_s == 0.0


def test_a_step_with_a_worker_is_as_much_longer_as_its_gradients_travel() -> None:
    steps: dict[float, float] = {}
    for gigabits in (20.0, 200.0, 1e6):
        run = world(PROFILE.on_network(gigabits), 8)
        assert len(run.machine.plan.gradient) == 1
        recording = run.run()
        began, ended = recording.trained[0]
        steps[gigabits] = ended - began
    assert steps[1e6] < steps[200.0] < steps[20.0]
    longer_s = PROFILE.on_network(20.0).training.transfer_s
    assert steps[20.0] - steps[1e6] == pytest.approx(longer_s, rel=0.05), "dealt as if it were none"


@pytest.mark.parametrize("gigabits", [1e6, 200.0])
def test_a_simulated_step_takes_what_the_law_says_of_workers(gigabits: float) -> None:
    """Each computes its part at once; what a step costs whatever is in it is paid once."""
    profile = PROFILE.on_network(gigabits)
    run = world(profile, 8)
    plan, slots = run.machine.plan, tuple(run.scene.slots)
    layout = GpuPlacement(24, 8, 20_000).layout_of(plan, slots)
    assert layout.workers == (8,)
    began, ended = run.run().trained[-1]
    groups = islice(TRACE.groups(Random("run/0"), 4), 24)
    work = Workload(tuple(one.sample(20_000) for group in groups for one in group), 32)
    table = TrainingTable(profile.training, work, 24)
    assert ended - began == pytest.approx(table.seconds(16, layout.workers), rel=0.05)


def test_the_base_group_is_as_large_as_what_travels_makes_worth() -> None:
    sizes = {}
    for gigabits in (1.0, 200.0, 1e9):
        cost = replace(PROFILE.on_network(gigabits).training, reload_s=0.0)
        table = TrainingTable(cost, WORK, 48)
        sizes[gigabits] = base = table.base_group(40, 8, 8)
        best = min(table.seconds(40, [8] * n) for n in range(5))
        chosen = table.seconds(40, [8] * ((40 - base) // 8))
        assert chosen <= best * (1 + SMALLER) * 1.001
    assert sizes[1.0] == 40
    assert sizes[1e9] == 8
    assert 8 <= sizes[200.0] <= 40
