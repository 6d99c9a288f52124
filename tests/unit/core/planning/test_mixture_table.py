"""The best mixtures equal exhaustive search; mixed plans have several shapes where any fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf, isclose
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.mixture_table import KEPT, MixtureTable, best_mixtures, server_numbers
from libra_cli.core.planning.rollout_table import PlannedBucket, RolloutTable
from libra_cli.core.planning.search import ALIKE, PlannerSettings, Search, least_regret, propose
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile
from tests.unit.core.planning.test_rollout_table import SEATS, SERVERS, WORKLOADS

GPUS = 8
A800 = load_profile("a800-qwen3-14b")


def numbers_of(gpus: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to have exactly so many GPUs in servers of two shapes or more."""
    for numbers in product(*(range(gpus // degree + 1) for degree in SERVERS)):
        servers = tuple((d, n) for d, n in zip(SERVERS, numbers, strict=True) if n)
        if len(servers) > 1 and sum(d * n for d, n in servers) == gpus:
            yield servers


def least_s(table: RolloutTable, servers: tuple[tuple[int, int], ...], train_s: float) -> float:
    """The least time over all ways to give each shape at least one part."""
    costs = [table.costs(degree, np.array([number]), train_s)[0] for degree, number in servers]
    parts = costs[0].shape[-1] - 1
    found = [inf]
    for inner in combinations(range(1, parts), len(servers) - 1):
        edges = [0, *inner, parts]
        ranges = zip(costs, edges, edges[1:], strict=False)
        found.append(max(float(cost[start, end]) for cost, start, end in ranges))
    return min(found)


@given(workload=WORKLOADS, train_s=st.sampled_from([0.0, 30.0]))
def test_the_best_mixture_equals_exhaustive_search(workload: Workload, train_s: float) -> None:
    table = RolloutTable(SERVERS, workload, GPUS, max_num_seqs=SEATS)
    mixtures = MixtureTable(table.degrees, GPUS, lambda d, n: table.costs(d, n, train_s))
    for gpus in range(1, GPUS + 1):
        every = {servers: least_s(table, servers, train_s) for servers in numbers_of(gpus)}
        least = min(every.values(), default=inf)
        assert isclose(mixtures.seconds(gpus), least, rel_tol=1e-9)
        if least < inf:
            servers = mixtures.servers(gpus)
            assert isclose(every[servers], least, rel_tol=1e-9)


@given(workload=WORKLOADS)
def test_one_shape_is_no_mixture(workload: Workload) -> None:
    table = RolloutTable({2: SERVERS[2]}, workload, GPUS, max_num_seqs=SEATS)
    mixtures = MixtureTable(table.degrees, GPUS, lambda d, n: table.costs(d, n, 0.0))
    assert all(mixtures.seconds(gpus) == inf for gpus in range(GPUS + 1))
    assert not list(best_mixtures(table, dict.fromkeys(range(1, GPUS), 5.0)))


def test_the_numbers_of_servers_grow_by_a_fifth_at_most() -> None:
    numbers = server_numbers(1024)
    assert numbers[:8] == tuple(range(1, 9))
    assert numbers[-1] == 1024
    assert all(1 < b / a <= 1.25 for a, b in pairwise(numbers[7:]))
    assert server_numbers(0) == ()


def skewed(*, overlap: float = 2.0, late: float = 0.0) -> Workload:
    """One of 40 trajectories generates twenty times as much as the others."""
    random = Random(3)
    lengths = [random.randint(800, 1200) for _ in range(250)]
    lengths += [random.randint(15_000, 25_000) for _ in range(6)]
    samples = tuple(TrajectorySample(300, length, 0, 1, 0.0) for length in lengths)
    return Workload(samples, 512, overlap, late)


@pytest.mark.parametrize("shapes", ["alike", "mixed", "auto"])
@pytest.mark.parametrize("overlap", [1.0, 2.0, 5.0])
def test_plans_have_the_shapes_that_are_asked_for(shapes: str, overlap: float) -> None:
    settings = PlannerSettings(shapes=shapes)  # type: ignore[arg-type]
    search = Search(A800, skewed(overlap=overlap), 32, settings)
    several = [len(layout.servers) > 1 for layout, _ in search.layouts()]
    assert all(several) if shapes == "mixed" else any(several) == (shapes == "auto")
    assert not all(several) or shapes == "mixed"
    for layout, times in search.mixed:
        assert layout.rollout_gpus + layout.training_gpus <= 32
        assert times == search.times(layout)
        lengths = [bucket.up_to_tokens for bucket in layout.buckets]
        assert lengths == sorted(lengths)
        assert lengths[-1] == max(sample.generated for sample in search.workload.samples)
    assert 0 < len(search.mixed) <= KEPT


def test_with_one_degree_mixed_plans_are_those_of_alike_servers() -> None:
    work = skewed()
    one = PlannerSettings(degrees=(4,))
    alike, mixed, auto = (
        propose(A800, work, 32, replace(one, shapes=shapes))
        for shapes in ("alike", "mixed", "auto")
    )
    assert alike == mixed == auto
    search = Search(A800, work, 32, replace(one, shapes="auto"))
    assert "no servers of two shapes fit" in search.compared(alike.layout)


def where_large_servers_have_short_steps() -> Profile:
    """A step of eight GPUs takes a sixth of one's, and each sequence in it as long as on one."""
    small = replace(A800.servers[1].linear(), kv_token_s=0.0)
    large = replace(small, tensor_parallel=8, step_s=small.step_s / 6)
    return replace(A800, servers={1: small, 8: large})


@pytest.mark.parametrize("overlap", [2.0, 3.0])
def test_auto_takes_a_mixture_where_its_step_is_the_shorter_one(overlap: float) -> None:
    profile, work = where_large_servers_have_short_steps(), skewed(overlap=overlap)
    search = Search(profile, work, 48, PlannerSettings(shapes="auto"))
    best = search.best()
    alike_s = min(times.step_s for _, times in search.alike)
    assert set(best.layout.servers) == {1, 8}
    assert best.times.step_s * (1 + ALIKE) < alike_s
    told = search.compared(best.layout)
    mixed_s = best.times.step_s
    words = f"mixed {best.layout.served}: {mixed_s:.1f} s a step against {alike_s:.1f} s alike"
    assert told == words
    kept = search.compared(search.alike[0][0])
    assert kept.startswith("alike: mixtures would gain")


def test_auto_keeps_alike_servers_where_a_mixture_would_lose() -> None:
    search = Search(A800, skewed(), 32, PlannerSettings(shapes="auto"))
    best = search.best()
    assert len(best.layout.servers) == 1
    assert best.times.step_s <= min(times.step_s for _, times in search.layouts()) * (1 + ALIKE)
    assert search.compared(best.layout).startswith("alike: mixtures would ")


def test_a_run_begins_with_a_mixture_only_where_it_loses_less_than_alike_servers() -> None:
    profile, auto = where_large_servers_have_short_steps(), PlannerSettings(shapes="auto")
    work = skewed()
    known, level = Search(profile, work, 48, auto), Search(A800, skewed(overlap=5.0), 32, auto)
    mixed, _ = min(known.mixed, key=lambda one: one[1].step_s)
    poor = next(layout for layout, _ in known.alike if layout.servers == {8: 1})
    assert least_regret([poor, mixed], profile, work, 48, auto) == mixed
    found, _ = min(level.alike, key=lambda one: one[1].step_s)
    twice = replace(found, buckets=(*found.buckets, replace(found.buckets[0], tensor_parallel=1)))
    assert least_regret([twice, found], A800, skewed(overlap=5.0), 32, auto) == found


def test_alike_plans_say_nothing_of_mixtures() -> None:
    search = Search(A800, skewed(), 32, PlannerSettings())
    assert search.compared(search.best().layout) == ""
    assert all(len(bucket.buckets) == 1 for bucket, _ in search.layouts())


def test_a_mixture_is_priced_by_its_buckets() -> None:
    search = Search(A800, skewed(), 32, PlannerSettings(shapes="mixed"))
    layout, times = search.mixed[0]
    assert all(isinstance(bucket, PlannedBucket) for bucket in layout.buckets)
    assert times.rollout_s >= search.table.buckets_s(layout.buckets, times.train_s)
