"""Prices: training, memory and moves follow their formulas; a profile survives its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.training import TrainingSpec
from libra_cli.core.costs.architecture import DenseTransformer
from libra_cli.core.costs.profile import (
    WAKE_S,
    MemoryModel,
    MoveCost,
    NothingFits,
    Profile,
    ProfileError,
    TrainingCost,
    passes_of,
    shared_part,
)
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.evidence import Starts
from libra_cli.core.planning.rollout_table import RolloutTable
from libra_cli.core.planning.training_table import TrainingTable, together_s
from libra_cli.core.workload import BatchOverhead, TrajectorySample, Workload

FACTS = MemoryModel(
    parameters=8e9, layers=32, hidden=4096, vocabulary=150_000, kv_bytes=131_072, gpu_gib=74.5
)
TRAINING = TrainingCost(
    token_s=5e-4,
    pair_s=1e-8,
    step_s=5.0,
    facts=FACTS,
    node_bandwidth=2e11,
    network_bandwidth=1e11,
)
SERVERS = {
    degree: ServerCost(degree, 0.015, 3e-5, 9e-8, 5e-5, 1e-9, 300_000 * degree) for degree in (1, 2)
}
MOVES = MoveCost(to_training_s=8.0, to_rollout_s=11.0, resize_s=90.0, start_s={1: 36.0, 2: 28.0})
PROFILE = Profile("p", "A100", "M", SERVERS, TRAINING, MOVES, 0.004, {"servers": "measured"})


@pytest.mark.parametrize(
    ("starts", "sleep", "to_training_s", "to_rollout_s"),
    [
        (Starts(), True, 8.0, 11.0),
        (Starts(server_s=70.0, trainer_s=50.0), True, 8.0, 11.0),
        (Starts(server_s=70.0), False, 8.0, 11.0),
        (Starts(trainer_s=50.0, to_training_s=40.0), False, 40.0, 11.0),
        (Starts(to_training_s=40.0), False, 40.0, 11.0),
        (Starts(to_training_s=40.0), True, 40.0, WAKE_S),
        (Starts(to_training_s=40.0, to_rollout_s=7.0), True, 40.0, 7.0),
        (Starts(to_rollout_s=70.0), False, 8.0, 70.0),
        (Starts(to_training_s=0.0, to_rollout_s=0.0), False, 0.0, 0.0),
    ],
)
def test_moves_cost_what_a_run_has_seen_of_them_and_a_first_waking_what_is_estimated(
    starts: Starts, sleep: bool, to_training_s: float, to_rollout_s: float
) -> None:
    """A server sleeps only where one has left its GPUs: before that the next one starts cold."""
    seen = PROFILE.with_moves_seen(starts, sleep=sleep)
    moves = replace(MOVES, to_training_s=to_training_s, to_rollout_s=to_rollout_s)
    if starts.server_s is not None:
        moves = replace(moves, start_s=dict.fromkeys(SERVERS, starts.server_s))
    if starts.trainer_s is not None:
        moves = replace(moves, resize_s=starts.trainer_s)
    assert replace(seen, provenance=PROFILE.provenance) == replace(PROFILE, moves=moves)
    told = seen.provenance.get("moves", "")
    assert ("ESTIMATED" in told) == (to_rollout_s == WAKE_S)
    assert ("seen in this run: to training" in told) == (starts.to_training_s is not None)
    assert ("seen in this run: to rollout" in told) == (starts.to_rollout_s is not None)
    assert ("seen in this run: a server" in told) == (starts.server_s is not None)
    assert ("seen in this run: the trainer" in told) == (starts.trainer_s is not None)
    assert seen.provenance["servers"] == "measured"


def test_where_weights_are_quantized_there_is_room_for_more_tokens() -> None:
    """Of 8e9 parameters 1.23e9 are embeddings, which stay in bf16."""
    quantized = PROFILE.quantized("fp8_per_channel")
    outer = 2 * FACTS.vocabulary * FACTS.hidden
    for degree, cost in quantized.servers.items():
        before = PROFILE.servers[degree].kv_tokens
        spared = (FACTS.parameters - outer) / FACTS.kv_bytes
        assert cost.kv_tokens - before == pytest.approx(spared, rel=1e-3)
        taken = quantized.facts.server_gib(degree, cost.kv_tokens)
        assert taken == pytest.approx(FACTS.server_gib(degree, before))
    assert quantized.facts.weights_gib(1) == pytest.approx((8e9 + outer) / 2**30, rel=1e-3)
    assert PROFILE.quantized(None) == PROFILE


def workload(*generated: int, trajectories: int = 64) -> Workload:
    return Workload(tuple(TrajectorySample(500, tokens) for tokens in generated), trajectories)


def test_arithmetic_is_shared_and_the_fixed_part_is_not() -> None:
    work = workload(2000, 4000)
    one, two = (TRAINING.compute_s(ranks, work) for ranks in (1, 2))
    assert one == pytest.approx(5e-4 * 64 * 3500 + 1e-8 * 64 * (2500**2 + 4500**2) / 4)
    assert one == pytest.approx(2 * two)
    assert TRAINING.seconds(1, work) == pytest.approx(5.0 + one)


def test_no_rank_has_less_than_the_longest_trajectory() -> None:
    work = workload(40_000, trajectories=2)
    many = TRAINING.compute_s(64, work)
    assert many == pytest.approx(5e-4 * 40_500 + 1e-8 * 40_500**2 / 2)


def test_ranks_that_share_a_pass_share_the_longest_trajectory_and_wait_for_one_another() -> None:
    work = workload(120_000, trajectories=2)
    shared = replace(TRAINING, cp_size=4)
    longest = 5e-4 * 120_500 + 1e-8 * 120_500**2 / 2
    assert TRAINING.compute_s(8, work) == pytest.approx(longest)
    assert shared.compute_s(8, work) == pytest.approx(longest / 4)
    # 32 heads of 128, 8 of keys: forward, forward once more and backward, 3 of 4 parts in 2 bytes.
    a_token = 3 * 2 * 32 * (2 * 4096 + 2 * 1024) * 3 // 4
    waits_s = a_token * work.tokens / 8 / 2e11
    exchange_s = shared._exchange_s(8, work)
    assert shared.busy_s(8, work) == pytest.approx(longest / 4 + 0.3 * exchange_s + waits_s)
    near, far = (replace(TRAINING, cp_size=8, node_gpus=size)._attend_s(8, work) for size in (8, 6))
    assert far == pytest.approx(2 * near)
    assert TRAINING._attend_s(8, work) == 0.0


def test_more_micro_batches_are_gathered_for_where_ranks_share_them() -> None:
    work = workload(30_000, trajectories=64)
    alone, shared = (replace(TRAINING, cp_size=size)._exchange_s(8, work) for size in (1, 4))
    assert shared == pytest.approx(4 * alone)


@pytest.mark.parametrize("ranks", [8, 12])
def test_as_few_ranks_share_a_pass_as_have_the_memory(ranks: int) -> None:
    chosen = replace(TRAINING, cp_size=None)
    longest = {size: replace(TRAINING, cp_size=size).longest_context(ranks) for size in (1, 2, 4)}
    for fewer, more in ((1, 2), (2, 4)):
        assert chosen.sharing(ranks, longest[fewer]) == fewer
        assert chosen.sharing(ranks, longest[fewer] + 1) == more
    assert chosen.memory_gib(ranks, longest[4]) <= FACTS.usable_gib
    assert chosen.longest_context(ranks) == longest[4] * (2 if ranks == 8 else 1)
    assert replace(TRAINING, cp_size=8).sharing(12, 1) == 4


def test_ranks_that_part_experts_gather_less_and_wait_for_tokens() -> None:
    facts = MemoryModel(
        parameters=30.5e9,
        layers=48,
        hidden=2048,
        vocabulary=151_936,
        kv_bytes=98_304,
        gpu_gib=74.5,
        experts=128,
        chosen=8,
        expert_inner=768,
    )
    work = workload(2000)
    alone, parted, halves = (replace(TRAINING, facts=facts, ep_size=size) for size in (1, 8, 4))
    # Forward, forward once more and backward: 7 of 8 parts of 8 copies there and back in 2 bytes.
    a_token = 3 * 48 * 2 * 2 * 8 * 2048 * 7 / 8
    travels_s = parted._travel_s(8, work)
    assert travels_s == pytest.approx(a_token * work.tokens / 8 / 2e11)
    assert alone._travel_s(8, work) == 0.0
    assert replace(parted, node_gpus=4)._travel_s(8, work) == pytest.approx(2 * travels_s)
    spared = alone._exchange_s(8, work) - parted._exchange_s(8, work)
    micro_batches = max(1.0, work.tokens / 8 / 16384)
    routed = facts.architecture.routed_parameters
    assert spared == pytest.approx(micro_batches * 8 * routed * 7 / 8 / 2e11)
    # Of halves of the replica each gathers a fourth of the experts, from the other half.
    spared = alone._exchange_s(8, work) - halves._exchange_s(8, work)
    assert spared == pytest.approx(micro_batches * 8 * routed * (7 / 8 - 1 / 8) / 2e11)
    assert parted.memory_gib(8, 4000) < alone.memory_gib(8, 4000)
    exchange_s = parted._exchange_s(8, work)
    busy_s = parted.compute_s(8, work) + 0.3 * exchange_s + travels_s
    assert parted.busy_s(8, work) == pytest.approx(busy_s)


def test_a_plan_says_how_many_ranks_share_a_pass() -> None:
    work = workload(120_000, trajectories=2)
    table = TrainingTable(replace(TRAINING, cp_size=None), work, 8)
    assert (table.least(), table.plan(4).sharing, table.plan(8).sharing) == (4, 4, 2)
    alone = TrainingTable(TRAINING, work, 8)
    assert alone.least() is None


SHARES = st.floats(0.0, 8.0)


@given(filtered=SHARES, surplus=SHARES, replayed=SHARES, ranks=st.integers(1, 16))
def test_what_is_not_trained_is_played_and_what_is_replayed_is_trained(
    filtered: float, surplus: float, replayed: float, ranks: int
) -> None:
    plain = workload(2000, 4000)
    played = replace(plain, extras=BatchOverhead(filtered=filtered, surplus=surplus))
    again = replace(plain, extras=BatchOverhead(replayed=replayed))
    assert TRAINING.seconds(ranks, played) == TRAINING.seconds(ranks, plain)
    assert TRAINING.compute_s(1, again) == pytest.approx(
        (1 + replayed) * TRAINING.compute_s(1, plain)
    )
    seconds = [RolloutTable(SERVERS, work, 8).equal_s(1, 4) for work in (plain, again, played)]
    assert seconds[0] == seconds[1] <= seconds[2] * (1 + 1e-9)


def test_a_filtered_group_is_played_before_another_and_a_surplus_member_beside_it() -> None:
    """Where the places are those of the groups that may be open, one after the other takes as many
    times as long as there are, and side by side as long as before."""
    few = workload(2000, 2000, trajectories=4)
    one, two, beside = (
        RolloutTable({1: SERVERS[1]}, replace(few, extras=extras), 8).equal_s(1, 8)
        for extras in (BatchOverhead(), BatchOverhead(filtered=1.0), BatchOverhead(surplus=1.0))
    )
    assert two == pytest.approx(2 * one, rel=0.1)
    assert beside == pytest.approx(one, rel=0.1)


def test_nothing_is_filtered_less_than_not_at_all() -> None:
    with pytest.raises(ValueError, match="less than not at all"):
        BatchOverhead(filtered=-0.1)


@given(
    minibatches=st.integers(1, 8),
    epochs=st.integers(1, 8),
    kl_coef=st.sampled_from([0.0, 0.1]),
    loss=st.sampled_from(["dapo", "gspo"]),
)
def test_a_step_takes_as_long_as_its_passes(
    minibatches: int, epochs: int, kl_coef: float, loss: str
) -> None:
    training = TrainingSpec(minibatches=minibatches, epochs=epochs, kl_coef=kl_coef, loss=loss)
    later = 1.0 if epochs > 1 else 1 - 1 / minibatches
    passes = passes_of(training)
    assert passes == epochs + 0.25 * (later + (kl_coef > 0))
    work = workload(2000, 4000)
    cost = replace(TRAINING, passes=passes, updates=training.updates)
    assert cost.compute_s(8, work) == pytest.approx(passes * TRAINING.compute_s(8, work))
    assert cost.seconds(8, work) >= TRAINING.seconds(8, work)


def test_passes_of_losses_that_compare_trajectories() -> None:
    assert passes_of(TrainingSpec(loss="tba")) == 1.5
    assert passes_of(TrainingSpec(loss="tba", minibatches=4, epochs=2)) == 2.5 + 0.25 * 1.75
    assert passes_of(TrainingSpec(kl_coef=0.1, kl_in_reward=True)) == 1.5
    assert passes_of(TrainingSpec(advantage="gae", minibatches=2)) == 1.25


def test_workers_can_share_the_first_update_and_no_later_one() -> None:
    assert shared_part(TrainingSpec()) == 1.0
    assert shared_part(TrainingSpec(kl_coef=0.1, loss="tba")) == 1.0
    assert shared_part(TrainingSpec(minibatches=2)) == 0.5 / 1.125
    assert shared_part(TrainingSpec(epochs=2)) == 1 / 2.25
    assert shared_part(TrainingSpec(minibatches=2, epochs=2)) == 0.5 / 2.25
    assert shared_part(TrainingSpec(minibatches=2, loss="tba")) == 0.5 / 1.625
    assert shared_part(TrainingSpec(minibatches=2, kl_coef=0.1)) == 0.625 / 1.375
    assert shared_part(TrainingSpec(minibatches=2, epochs=2, kl_coef=0.1)) == 0.5 / 2.5
    assert shared_part(TrainingSpec(advantage="gae")) == 0.0


def test_matrices_of_scores_count_where_plans_are_made_and_no_ranks_share_a_row() -> None:
    long = replace(TRAINING, cp_size=None, micro_tokens=65_536)
    capped = replace(long, facts=replace(FACTS, scored_heads=32))
    # Of the layer that is at its backward: 14 bytes for each pair of tokens, in bfloat16.
    more = capped.memory_gib(8, 16_384) - replace(long, micro_tokens=1).memory_gib(8, 16_384)
    assert more == pytest.approx(14 * 32 * 16_384**2 / 2**30, rel=0.05)
    assert capped.sharing(8, 16_384) == 1 < long.sharing(8, 10**6)


def test_each_update_exchanges_and_fetches_moments() -> None:
    offloads = replace(TRAINING, facts=replace(FACTS, optimizer="adamw_offload"))
    four = replace(offloads, updates=4)
    later = four.seconds(8, workload(2000)) - offloads.seconds(8, workload(2000))
    assert later == pytest.approx(3 * 16 * 8e9 / 8 / 2e10)


def test_inputs_of_layers_travel_to_the_host_and_back() -> None:
    """Of two sequences in 64 trajectories, two bytes a number, at 2e10 bytes a second."""
    offloads = replace(TRAINING, facts=replace(FACTS, activation_offload=True))
    work = workload(2000, 4000)
    for ranks in (1, 8):
        later = offloads.seconds(ranks, work) - TRAINING.seconds(ranks, work)
        assert later == pytest.approx(2 * 2 * 32 * 4096 * work.tokens / ranks / 2e10)
    assert offloads.busy_s(8, work) > TRAINING.busy_s(8, work), "a worker takes its part of it"


def test_tiles_of_the_feed_forward_part_are_computed_once_more() -> None:
    work = workload(2000)
    once, again = (
        replace(TRAINING, pair_s=0.0, facts=replace(FACTS, tiled_mlp=tiled)).compute_s(8, work)
        for tiled in (False, True)
    )
    shape = FACTS.architecture
    assert isinstance(shape, DenseTransformer)
    share = 3 * 4096 * shape.inner * 32 / shape.parameters
    assert 0.4 < share < 0.9
    assert again / once == pytest.approx(1 + 0.25 * share)


def test_communication_grows_with_the_ranks() -> None:
    ratios = [TRAINING.communication_ratio(ranks, workload(2000)) for ranks in (1, 2, 8, 16)]
    assert ratios[0] == 0
    assert ratios == sorted(ratios)


def test_a_replica_on_each_node_sends_less_over_the_network_than_one_on_all() -> None:
    small = replace(TRAINING, facts=replace(FACTS, gpu_gib=30.0))  # a node does not hold one
    work = workload(8000)
    assert TRAINING.memory_gib(16, 4096) == TRAINING.memory_gib(8, 4096)
    assert small.memory_gib(16, 4096) < small.memory_gib(8, 4096)
    assert TRAINING.seconds(16, work) < small.seconds(16, work)
    assert TRAINING.memory_gib(12, 4096) < TRAINING.memory_gib(8, 4096), "uneven nodes share all"


def test_moments_in_the_host_s_memory_cost_seconds_and_spare_half_of_the_states() -> None:
    offloads = replace(TRAINING, facts=replace(FACTS, optimizer="adamw_offload"))
    spared = TRAINING.memory_gib(8, 4096) - offloads.memory_gib(8, 4096)
    assert spared == pytest.approx(8 * 8e9 / 8 / 2**30, rel=0.01)
    later = offloads.seconds(8, workload(2000)) - TRAINING.seconds(8, workload(2000))
    assert later == pytest.approx(16 * 8e9 / 8 / 2e10)


@given(
    alone=st.floats(1.0, 100.0),
    workers=st.lists(st.tuples(st.floats(0.0, 200.0), st.floats(1.0, 100.0)), max_size=4),
)
def test_workers_are_done_with_the_trainer_or_have_nothing(
    alone: float, workers: list[tuple[float, float]]
) -> None:
    end = together_s(alone, workers)
    done = end / alone + sum(max(0.0, end - transfer) / each for transfer, each in workers)
    assert done == pytest.approx(1)
    assert end <= alone * (1 + 1e-9)
    assert end == pytest.approx(together_s(alone, [one for one in workers if one[0] < alone]))


def test_a_worker_that_cannot_pay_says_what_it_would_send() -> None:
    table = TrainingTable(TRAINING, workload(2000), 16)
    assert table.unpaid(8) == ""
    assert table.seconds(16, (8,)) < table.seconds(8)
    slow = TrainingTable(replace(TRAINING, link_bandwidth=1e8), workload(2000), 16)
    assert slow.seconds(16, (8,)) == slow.seconds(8)
    assert "are 32.0 GB, 320.0 s at 0.1 GB/s, and 8 ranks compute a step in" in slow.unpaid(8)
    half = replace(TRAINING, link_bandwidth=1e8, gradient_bytes=2)
    assert half.transfer_s == 160.0


def test_memory_of_a_rank_falls_with_the_world_and_grows_with_the_longest() -> None:
    held = [TRAINING.memory_gib(ranks, 4096) for ranks in (1, 4, 16)]
    assert held == sorted(held, reverse=True)
    assert held[0] > 16 * 8e9 / 2**30, "weights, gradients and optimizer of one rank alone"
    assert TRAINING.memory_gib(4, 100_000) > held[1]


@given(ranks=st.integers(1, 64))
def test_the_longest_trajectory_that_fits_a_rank_is_the_last_that_does(ranks: int) -> None:
    longest, usable = TRAINING.longest_context(ranks), FACTS.usable_gib
    if longest == 0:
        assert TRAINING.memory_gib(ranks, 1) > usable
        return
    assert TRAINING.memory_gib(ranks, longest) <= usable
    assert TRAINING.memory_gib(ranks, longest + 1) > usable


def test_memory_of_a_server_is_weights_cache_and_overhead() -> None:
    assert FACTS.server_gib(2, 0) == pytest.approx(2 * 8e9 / 2 / 2**30 + FACTS.server_overhead_gib)
    room = 1000 * FACTS.kv_bytes / 2 / 2**30
    assert FACTS.server_gib(2, 1000) == pytest.approx(FACTS.server_gib(2, 0) + room)


@given(
    short=st.integers(1, 20_000),
    more=st.integers(0, 20_000),
    ranks=st.integers(1, 64),
)
def test_longer_trajectories_never_train_faster(short: int, more: int, ranks: int) -> None:
    assert TRAINING.seconds(ranks, workload(short)) <= TRAINING.seconds(
        ranks, workload(short + more)
    )


def test_the_table_gives_the_fastest_world_that_fits() -> None:
    table = TrainingTable(TRAINING, workload(4000, 8000), 16)
    for gpus in range(1, 17):
        plan = table.best(gpus)
        fitting = list(filter(table.fits, range(1, gpus + 1)))
        if not fitting:
            assert plan is None
            continue
        assert plan is not None
        assert plan.ranks <= gpus
        assert plan.seconds == min(table.plan(ranks).seconds for ranks in fitting)


def test_the_table_never_slows_down_with_more_gpus() -> None:
    table = TrainingTable(TRAINING, workload(4000), 32)
    plans = [table.best(gpus) for gpus in range(33)]
    assert plans[0] is None
    least = table.least()
    assert least is not None
    assert plans[least - 1] is None
    seconds = [plan.seconds for plan in plans if plan is not None]
    assert seconds == sorted(seconds, reverse=True)


def test_a_trainer_that_fits_nowhere_says_what_a_rank_needs() -> None:
    table = TrainingTable(TRAINING, workload(4000), 1)
    assert table.best(1) is None
    refusal = table.refusal(1)
    assert isinstance(refusal, NothingFits)
    assert refusal.constraint == "trainer memory"
    assert "a rank needs at least" in str(refusal)
    assert "67.0" in str(refusal), "what a GPU may use"


def test_a_profile_survives_its_json() -> None:
    assert Profile.from_json(PROFILE.to_json()) == PROFILE


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"servers": []}, "servers: must be a list"),
        ({"colour": 1}, "profile.colour: no such key"),
        ({"training": 3}, "training: must be an object"),
        ({"moves": {"start_s": {}, "to_training_s": -1}}, "moves.to_training_s"),
        ({"overhead_s": "4"}, "profile.overhead_s: must be a number"),
        ({"servers": [{"tensor_parallel": 0}]}, "servers: "),
    ],
)
def test_a_wrong_profile_is_refused_by_key(change: dict[str, object], told: str) -> None:
    body = json.loads(PROFILE.to_json()) | change
    with pytest.raises(ProfileError) as error:
        Profile.from_json(json.dumps(body))
    assert told in str(error.value)


def test_text_that_is_not_json_is_refused_with_its_line() -> None:
    with pytest.raises(ProfileError, match="line 2"):
        Profile.from_json("{\n oops")


def test_scaled_costs_are_others_only_where_it_says_so() -> None:
    assert PROFILE.scaled(2).servers[2].linear().kv_token_s == pytest.approx(1.8e-7)
    assert PROFILE.scaled(2).training == PROFILE.training
    work = workload(2000)
    slow = TRAINING.scaled(2).seconds(4, work)
    assert slow == pytest.approx(2 * TRAINING.seconds(4, work))


def test_an_unknown_shape_starts_like_the_slowest_known() -> None:
    assert MOVES.start(2) == 28.0
    assert MOVES.start(8) == 36.0


def test_the_longest_of_a_step_is_that_of_all_only_where_all_are_in_the_step() -> None:
    samples = tuple(TrajectorySample(1, tokens) for tokens in range(1, 101))
    assert Workload(samples, 100).longest_expected == 101
    assert Workload(samples, 50).longest_expected == pytest.approx(100, abs=0.1)
    assert Workload(samples, 10).longest_expected == pytest.approx(92, abs=0.1)


def test_a_workload_without_work_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Workload((), 8)
    with pytest.raises(ValueError, match="trajectories"):
        Workload((TrajectorySample(1, 1),), 0)
    with pytest.raises(ValueError, match="sample"):
        TrajectorySample(1, 0)
