"""The table gives the time of any servers, with the best boundaries, and names what cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.costs.profile import NothingFits
from libra_cli.core.costs.rollout import EqualServers, RolloutLoad
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.explanation import Constraint
from libra_cli.core.planning.rollout_table import PlannedBucket, RolloutTable
from libra_cli.core.scheduling.least_cost import PLAY_SHARE
from libra_cli.core.workload import TrajectorySample, Workload

SEATS = 8


def server(degree: int, kv_tokens: int = 100_000, step_s: float = 0.02) -> ServerCost:
    return ServerCost(
        tensor_parallel=degree,
        step_s=step_s / degree**0.7,
        sequence_s=5e-5 / degree**0.5,
        kv_token_s=1e-7 / degree,
        prefill_token_s=1e-4 / degree,
        prefill_pair_s=1e-9,
        kv_tokens=kv_tokens * degree,
    )


SERVERS = {degree: server(degree) for degree in (1, 2, 4)}


def load_of(cost: ServerCost, part: list[TrajectorySample], of: Workload) -> RolloutLoad:
    """What the module says of these trajectories, one at a time."""
    weight = of.trajectories / len(of.samples)

    def engine_s(sample: TrajectorySample) -> float:
        chunks = (sample.prompt + sample.observed) / cost.chunk_tokens
        return cost.step_s * (sample.generated + chunks)

    def prompt_s(sample: TrajectorySample) -> float:
        return cost.prefill_token_s * sample.prompt + cost.prefill_pair_s * sample.prompt**2 / 2

    def work_s(sample: TrajectorySample) -> float:
        work = cost.sequence_s * sample.generated + cost.prefill_token_s * sample.observed
        work += cost.kv_token_s * sample.generated * sample.mean_context
        return work + cost.prefill_pair_s * sample.observed * sample.mean_context

    def total(value: Callable[[TrajectorySample], float]) -> float:
        return weight * sum(map(value, part))

    part = sorted(part, key=lambda each: (each.generated, each.context))
    ordered = sorted(part, key=lambda each: -engine_s(each) - each.tool_s)
    chances = [exp(-weight * place) * (1 - exp(-weight)) for place in range(len(part))]

    def longest(value: Callable[[TrajectorySample], float]) -> float:
        pairs = zip(chances, ordered, strict=True)
        return sum(chance * value(each) for chance, each in pairs) / sum(chances)

    return RolloutLoad(
        count=weight * len(part),
        playing=1.0,
        work_s=total(work_s),
        prompt_s=total(prompt_s),
        engine_s=total(engine_s),
        tool_s=total(lambda each: each.tool_s),
        engine_context=total(lambda each: engine_s(each) * each.mean_context),
        tool_context=total(lambda each: each.tool_s * each.mean_context),
        boundaries=total(lambda each: (each.turns - 1) * each.mean_context),
        chunks_s=total(lambda each: cost.step_s * (each.prompt + each.observed) / 2048),
        longest_work_s=longest(lambda each: work_s(each) + prompt_s(each)),
        longest_engine_s=longest(engine_s),
        longest_tool_s=longest(lambda each: each.tool_s),
    )


def cost_s(cost: ServerCost, part: list[TrajectorySample], number: int, of: Workload) -> float:
    """Seconds of a bucket."""
    if max(sample.context for sample in part) > cost.kv_tokens:
        return inf
    servers = EqualServers(cost, number, SEATS, PLAY_SHARE)
    return float(servers.time(load_of(cost, part, of), of).seconds)


def cuts(
    parts: list[TrajectorySample], buckets: tuple[PlannedBucket, ...]
) -> Iterator[list[list[TrajectorySample]]]:
    """Every way to cut the parts into as many runs as there are buckets."""
    if not buckets:
        if not parts:
            yield []
        return
    for cut in range(len(parts) + 1):
        for rest in cuts(parts[cut:], buckets[1:]):
            yield [parts[:cut], *rest]


def least_s(workload: Workload, buckets: tuple[PlannedBucket, ...]) -> float:
    parts = sorted(workload.samples, key=lambda sample: (sample.generated, sample.context))
    return min(
        max(
            cost_s(SERVERS[bucket.tensor_parallel], part, bucket.servers, workload)
            for bucket, part in zip(buckets, cut, strict=True)
            if part
        )
        for cut in cuts(parts, buckets)
    )


SAMPLES = st.builds(
    TrajectorySample,
    prompt=st.integers(1, 3000),
    generated=st.integers(1, 30_000),
    observed=st.integers(0, 5000),
    turns=st.integers(1, 20),
    tool_s=st.floats(0, 100),
)
WORKLOADS = st.builds(
    Workload,
    samples=st.lists(SAMPLES, min_size=1, max_size=4).map(tuple),
    trajectories=st.integers(4, 64),
    overlap=st.sampled_from([1.0, 2.0, 3.0]),
    late=st.sampled_from([0.0, 1.0, inf]),
    group_size=st.sampled_from([1, 4]),
)


BUCKETS = st.lists(
    st.builds(
        PlannedBucket,
        tensor_parallel=st.sampled_from([1, 2, 4]),
        servers=st.integers(1, 4),
        up_to_tokens=st.just(0),
        max_num_seqs=st.just(SEATS),
    ),
    min_size=1,
    max_size=3,
).map(tuple)


@given(workload=WORKLOADS, buckets=BUCKETS)
def test_unlike_servers_have_the_best_of_all_boundaries(
    workload: Workload, buckets: tuple[PlannedBucket, ...]
) -> None:
    table = RolloutTable(SERVERS, workload, 16, max_num_seqs=SEATS)
    seconds = table.buckets_s(buckets)
    assert isclose(seconds, least_s(workload, buckets), rel_tol=1e-9)
    if seconds < inf:
        placed = table.boundaries(buckets)
        assert isclose(table.buckets_s(placed), seconds, rel_tol=1e-9)
        lengths = [bucket.up_to_tokens for bucket in placed]
        assert lengths == sorted(lengths)


@given(workload=WORKLOADS, degree=st.sampled_from([1, 2, 4]), servers=st.integers(1, 4))
def test_equal_servers_are_one_bucket(workload: Workload, degree: int, servers: int) -> None:
    table = RolloutTable(SERVERS, workload, 16, max_num_seqs=SEATS)
    bucket = PlannedBucket(degree, servers, 0, SEATS)
    assert isclose(table.equal_s(degree, servers), table.buckets_s((bucket,)), rel_tol=1e-9)


def test_short_trajectories_want_small_servers_and_long_ones_large() -> None:
    short = Workload(tuple(TrajectorySample(200, 100 + n) for n in range(64)), 512)
    long = Workload(tuple(TrajectorySample(200, 20_000 + n) for n in range(64)), 16, overlap=1.0)
    fastest = []
    for workload in (short, long):
        table = RolloutTable(SERVERS, workload, 8, max_num_seqs=32)
        fastest.append(min(SERVERS, key=lambda degree: table.equal_s(degree, 8 // degree)))
    assert fastest == [1, 4]


def test_a_trajectory_that_fits_no_server_is_named() -> None:
    workload = Workload((TrajectorySample(10, 10), TrajectorySample(1000, 500_000)), 8)
    with pytest.raises(
        NothingFits, match=r"trajectory 2 of 2 has 501,000 tokens.*400,000"
    ) as error:
        RolloutTable(SERVERS, workload, 8)
    assert error.value.constraint == "KV cache"


def test_a_budget_below_the_smallest_server_says_the_least_that_fits() -> None:
    workload = Workload((TrajectorySample(1000, 300_000),), 8)
    with pytest.raises(NothingFits, match="3 GPUs are too few") as error:
        RolloutTable(SERVERS, workload, 3)
    assert "4 GPUs" in error.value.hint


def test_servers_without_the_room_for_the_longest_do_not_get_it() -> None:
    workload = Workload((TrajectorySample(10, 100), TrajectorySample(1000, 300_000)), 8)
    table = RolloutTable(SERVERS, workload, 8)
    small, large = table.boundaries((PlannedBucket(1, 4, 0, SEATS), PlannedBucket(4, 1, 0, SEATS)))
    assert (small.up_to_tokens, large.up_to_tokens) == (100, 300_000)


def test_a_layout_that_lacks_the_room_takes_for_ever() -> None:
    table = RolloutTable(SERVERS, Workload((TrajectorySample(1000, 300_000),), 8), 8)
    assert table.buckets_s((PlannedBucket(1, 8, 0, 8),)) == inf
    assert table.buckets_s((PlannedBucket(4, 2, 0, 8),)) < inf
    assert table.buckets_s((PlannedBucket(8, 1, 0, 8),)) == inf, "no price for this shape"


def test_a_cap_on_seats_makes_a_server_slower() -> None:
    workload = Workload((TrajectorySample(100, 1000),), 256)
    table = RolloutTable(SERVERS, workload, 8)
    few, many = (table.buckets_s((PlannedBucket(1, 8, 0, seats),)) for seats in (2, 32))
    assert few > 2 * many


def test_what_binds_is_said_in_words() -> None:
    workload = Workload((TrajectorySample(100, 1000),), 256)
    table = RolloutTable(SERVERS, workload, 8, max_num_seqs=1)
    found = table.binding((PlannedBucket(1, 8, 1000, 1),))
    assert found.constraint is Constraint.SEATS
    assert "max_num_seqs" in found.words
