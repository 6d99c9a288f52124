"""The planner gives the split whose longer half is shortest, with reasons, or names what fails."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.core.costs.profile import NothingFits
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import (
    ALIKE,
    HEDGED,
    LARGE,
    MISSED,
    MISSED_ALONE,
    TURNS,
    PlannerSettings,
    Search,
    Times,
    least_regret,
    propose,
)
from libra_cli.core.planning.training_table import TrainedRanks
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile
from tests.research.changed_costs import with_kv_share

A800 = load_profile("a800-qwen3-14b")
ROOMY = replace(A800.training, facts=replace(A800.facts, gpu_gib=110.0))
PROFILE = replace(A800, training=ROOMY)
"""Its trainer has the memory for trajectories of 38,000 tokens on few GPUs: what is tested here is
who gets how many."""


def heavy_tailed(mean: float, *, seed: int = 0, number: int = 256, batch: int = 512) -> Workload:
    random = Random(seed)
    lengths = (int(mean * random.lognormvariate(-0.5, 1.0)) for _ in range(number))
    return Workload(
        tuple(TrajectorySample(500, min(38_000, max(1, n)), 1000, 5, 5.0) for n in lengths), batch
    )


@settings(max_examples=15, deadline=None)
@given(mean=st.floats(200, 15_000), gpus=st.integers(12, 24), seed=st.integers(0, 99))
def test_the_split_equals_exhaustive_search(mean: float, gpus: int, seed: int) -> None:
    work = heavy_tailed(mean, seed=seed, number=32)
    search = Search(PROFILE, work, gpus, PlannerSettings())
    every = []
    for split in range(1, gpus):
        training = search.training.best(gpus - split)
        if training is not None:
            equal_s = search.table.buckets_s(search.uniform(split), training.seconds)
            every.append(Times(equal_s, training.seconds).step_s)
    assert min(every) * (1 - 1e-9) <= search.best().times.step_s <= min(every) * (1 + ALIKE)


@given(rollout_s=st.floats(0, 1e6), train_s=st.floats(0, 1e6))
def test_halves_that_are_alike_wait_for_each_other(rollout_s: float, train_s: float) -> None:
    longer, step_s = max(rollout_s, train_s), Times(rollout_s, train_s).step_s
    assert longer <= step_s <= longer * 2 ** (1 / TURNS) * (1 + 1e-9)
    assert Times(longer, longer / 4).step_s == pytest.approx(longer, rel=1e-4)


def test_of_plans_as_good_the_one_with_the_largest_servers_is_proposed() -> None:
    search = Search(PROFILE, heavy_tailed(300), 48, PlannerSettings())
    least_s = min(times.step_s for _, times in search.layouts())
    good = [each for each, times in search.layouts() if times.step_s <= least_s * (1 + ALIKE)]
    assert max(search.best().layout.servers) == max(max(each.servers) for each in good)


@pytest.mark.parametrize("mean", [300, 3000])
def test_whatever_lengths_turn_out_a_first_plan_loses_as_little_as_may_be(mean: float) -> None:
    load, settings = heavy_tailed(mean), PlannerSettings()
    layouts = [layout for layout, _ in Search(PROFILE, load, 16, settings).layouts()]
    every = [Search(PROFILE, load.stretched(factor), 16, settings) for factor in HEDGED]
    steps = [[search.times(layout).step_s for search in every] for layout in layouts]
    least = [min(row) for row in zip(*steps, strict=True)]
    losses = [max(s / best for s, best in zip(row, least, strict=True)) for row in steps]
    chosen = least_regret(layouts, PROFILE, load, 16, settings)
    level = [at for at, loss in enumerate(losses) if loss <= min(losses) * (1 + ALIKE)]
    largest = max(min(max(layouts[at].servers), LARGE) for at in level)
    good = [at for at in level if min(max(layouts[at].servers), LARGE) == largest]
    assert layouts.index(chosen) == min(good, key=lambda at: losses[at])
    assert len(level) < len(layouts)


def test_lengths_with_which_nothing_runs_do_not_count() -> None:
    """Twice as long they fit no server, and no plan is to blame."""
    load, settings, tight = heavy_tailed(15_000), PlannerSettings(), with_kv_share(PROFILE, 0.02)
    with pytest.raises(NothingFits):
        Search(tight, load.stretched(2.0), 48, settings)
    layouts = [layout for layout, _ in Search(tight, load, 48, settings).layouts()]
    chosen = least_regret(layouts, tight, load, 48, settings)
    assert Search(tight, load, 48, settings).times(chosen).step_s < inf


@pytest.mark.parametrize(("overlap", "missed"), [(2.0, MISSED), (1.0, MISSED_ALONE)])
def test_unlike_servers_are_priced_above_their_table(overlap: float, missed: float) -> None:
    work = replace(heavy_tailed(2000), overlap=overlap)
    search = Search(PROFILE, work, 16, PlannerSettings())
    unlike = (PlannedBucket(1, 4, 2000, 128), PlannedBucket(4, 1, 38_000, 128))
    layout = replace(search.best().layout, buckets=unlike)
    table_s = search.table.buckets_s(unlike, search.times(layout).train_s)
    assert search.times(layout).rollout_s == pytest.approx(table_s * (1 + missed))


@settings(max_examples=25, deadline=None)
@given(
    mean=st.floats(200, 15_000),
    gpus=st.integers(12, 64),
    seed=st.integers(0, 99),
)
def test_a_proposal_fits_the_budget_and_every_memory(mean: float, gpus: int, seed: int) -> None:
    work = heavy_tailed(mean, seed=seed, number=64)
    layout = propose(PROFILE, work, gpus, PlannerSettings()).layout
    assert layout.rollout_gpus + layout.training_gpus <= gpus
    facts = PROFILE.facts
    for bucket in layout.buckets:
        held = PROFILE.servers[bucket.tensor_parallel].kv_tokens
        assert facts.server_gib(bucket.tensor_parallel, held) <= facts.usable_gib
    assert (
        PROFILE.training.memory_gib(layout.training_gpus, work.longest.context) <= facts.usable_gib
    )


@pytest.mark.parametrize("mean", [1000, 5000, 11_500])
def test_a_proposal_says_why_and_what_comes_second(mean: float) -> None:
    found = propose(PROFILE, heavy_tailed(mean), 48)
    assert found.times.step_s == Times(found.times.rollout_s, found.times.train_s).step_s
    assert f"{found.times.rollout_s:.1f} s" in found.reasons[1]
    assert found.binding.words in found.reasons[1]
    assert found.layout.rollout_gpus + found.layout.training_gpus == 48
    assert not any("left over" in reason for reason in found.reasons)
    assert found.runner_up is not None
    assert found.runner_up[0] != found.layout
    assert found.runner_up[1].step_s >= found.times.step_s / (1 + ALIKE)


def test_longer_trajectories_want_more_gpus_for_rollout() -> None:
    shares = [
        propose(PROFILE, heavy_tailed(mean), 48).layout.rollout_gpus for mean in (300, 1500, 5000)
    ]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_a_layout_that_cannot_run_takes_for_ever() -> None:
    search = Search(PROFILE, heavy_tailed(2000), 16, PlannerSettings())
    layout = search.best().layout
    tight = replace(layout, training_gpus=1)
    assert search.times(tight).train_s == float("inf")
    wrong = replace(layout, buckets=(PlannedBucket(16, 1, 9999, 8),))
    assert search.times(wrong).rollout_s == float("inf")


def test_a_base_group_and_each_gradient_worker_have_memory_of_their_own() -> None:
    """Of Qwen3-14B a base group fits on 6 GPUs of 80 GB and a worker on 3: together they have as
    many GPUs as would fit in one group."""
    search = Search(A800, heavy_tailed(1000), 24, PlannerSettings())
    alone = replace(search.best().layout, training_gpus=12)
    for workers, lacking in (
        ((), ""),
        ((4,), ""),
        ((2, 4), "each of the 2 ranks of a gradient worker would need 81 GiB"),
        ((8,), "each of 4 ranks would need 81 GiB"),
    ):
        layout = replace(alone, workers=workers)
        assert (search.times(layout).step_s == inf) == bool(lacking)
        if lacking:
            assert search.binding(layout).words == lacking


def test_ranks_that_have_trained_fit_also_where_the_law_denies_it_of_them() -> None:
    settings, short, long = PlannerSettings(), heavy_tailed(1000), heavy_tailed(9000)
    longest = short.longest.context
    small = replace(propose(A800, short, 24).layout, training_gpus=6, workers=(2,))
    for work in (short, long):
        assert Search(A800, work, 24, settings).times(small).step_s == inf
        trained = TrainedRanks(4, (2,), longest)
        assert Search(A800, work, 24, settings, trained=trained).times(small).step_s < inf
    # Of what has trained as it has them fit, longer trajectories are told by the law.
    large = replace(small, training_gpus=8, workers=())
    seen = Search(A800, long, 24, settings, trained=TrainedRanks(8, (), longest))
    assert Search(A800, short, 24, settings).times(large).step_s < inf
    assert seen.times(large).step_s == inf


def test_a_colocated_layout_adds_its_halves() -> None:
    search = Search(PROFILE, heavy_tailed(2000), 16, PlannerSettings())
    layout = search.best().layout
    apart = search.times(layout)
    together = search.times(replace(layout, colocated=True))
    assert together.step_s == pytest.approx(apart.rollout_s + apart.train_s)


def test_a_budget_too_small_for_the_trainer_says_what_it_lacks() -> None:
    with pytest.raises(NothingFits) as error:
        propose(PROFILE, heavy_tailed(2000), 3)
    assert error.value.constraint == "trainer memory"


def test_a_budget_too_small_for_both_says_the_least() -> None:
    work = heavy_tailed(2000)
    least = next(gpus for gpus in range(2, 48) if _fits(work, gpus))
    with pytest.raises(NothingFits, match="too few") as error:
        propose(PROFILE, work, least - 1)
    assert f"at least {least} GPUs" in error.value.hint


def test_weights_that_do_not_fit_a_gpu_leave_that_shape_out() -> None:
    facts = replace(A800.facts, parameters=40e9)
    profile = replace(A800, training=replace(A800.training, facts=facts))
    with pytest.raises(NothingFits) as error:
        propose(profile, heavy_tailed(2000), 16)
    assert error.value.constraint == "server memory"


def _fits(work: Workload, gpus: int) -> bool:
    try:
        propose(PROFILE, work, gpus)
    except NothingFits:
        return False
    return True
