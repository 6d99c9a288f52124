"""The time of a step on equal servers is that of its limits, and grows with what there is to do."""

from __future__ import annotations

from dataclasses import replace
from math import expm1, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.costs.ranges import SortedParts
from libra_cli.core.costs.rollout import EqualServers, RolloutTime
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.workload import TrajectorySample, Workload

SERVER = ServerCost(1, 0.02, 5e-5, 1e-7, 1e-4, 0.0, kv_tokens=10**9)
#: Nothing to do but engine steps.
IDEAL = ServerCost(1, 0.02, 0.0, 0.0, 0.0, 0.0, kv_tokens=10**9, chunk_tokens=10**9)
SAMPLES = st.lists(
    st.builds(
        TrajectorySample,
        prompt=st.integers(1, 3000),
        generated=st.integers(1, 5000),
        observed=st.integers(0, 3000),
        turns=st.integers(1, 20),
        tool_s=st.floats(0, 300),
    ),
    min_size=1,
    max_size=8,
).map(tuple)


def time_of(cost: ServerCost, work: Workload, number: int = 1, seats: int = 64) -> RolloutTime:
    parts = SortedParts(work, 64)
    load = parts.load(cost).at((0, len(parts)))
    return EqualServers(cost, number, seats, 0.5).time(load, work)


def test_with_nothing_but_tools_places_are_held_for_as_long_as_these_take() -> None:
    work = Workload((TrajectorySample(1, 1, tool_s=100.0),), 256, overlap=9.0)
    assert time_of(IDEAL, work, seats=64).seats_s == pytest.approx(100.02 * 256 / 64)


def test_without_tools_a_step_is_the_work_and_the_engine_steps_of_full_batches() -> None:
    work = Workload((TrajectorySample(1, 1000),), 256, overlap=9.0)
    time = time_of(SERVER, work, seats=64)
    assert time.seats_s == pytest.approx(time.work_s + 256 * 0.02 * 1000 / 64, rel=1e-3)


def test_work_is_done_while_others_wait_for_tools() -> None:
    """Less than one after the other, and no less than either."""
    busy = Workload((TrajectorySample(1, 1000),), 256, overlap=9.0)
    both = Workload((TrajectorySample(1, 1000, tool_s=50.0),), 256, overlap=9.0)
    alone, together = (time_of(SERVER, work) for work in (busy, both))
    tools_s = 256 * 50.0 / 64
    assert max(alone.seconds, tools_s) < together.seconds < alone.seconds + tools_s


def test_a_batch_that_waits_for_nobody_is_not_held_by_the_longest() -> None:
    samples = (*[TrajectorySample(1, 100)] * 63, TrajectorySample(1, 20_000))
    hold = Workload(samples, 64, overlap=2.0)
    late, soft = replace(hold, late=1.0), replace(hold, late=inf)
    times = [time_of(SERVER, work, number=4) for work in (hold, late, soft)]
    assert times[0].longest_s > times[1].longest_s > times[2].longest_s
    assert times[2].seconds == pytest.approx(times[2].seats_s)


def test_the_longest_expected_is_shorter_than_the_longest_of_many_steps() -> None:
    samples = tuple(TrajectorySample(1, 100 * n) for n in range(1, 101))
    one, many = (
        float(time_of(IDEAL, Workload(samples, number)).longest_s) for number in (10, 1000)
    )
    assert one < 0.95 * many
    assert many == pytest.approx(0.02 * 10_000 / 2, rel=0.01)


def test_members_that_have_ended_hold_places_until_their_group_has() -> None:
    samples = tuple(TrajectorySample(1, 100 * n) for n in (1, 1, 1, 5))
    alone = Workload(samples, 64, overlap=3.0, late=inf, group_size=8)
    kept, closed = replace(alone, holders=8.0), replace(alone, holders=8**0.5)
    plays = [float(time_of(IDEAL, each, seats=10**6).places) for each in (kept, closed, alone)]
    assert plays == sorted(plays)
    longest = 500 - 400 * 0.75**8  # of eight, on average
    assert plays[0] == pytest.approx(plays[2] * 200 / longest)
    even = Workload((TrajectorySample(1, 100),), 64, overlap=3.0, late=inf)
    same = [time_of(IDEAL, replace(even, holders=n)).places for n in (1.0, 8.0)]
    assert same[0] == pytest.approx(same[1])


def test_siblings_on_one_server_compute_their_prompt_once() -> None:
    alone = Workload((TrajectorySample(3000, 10),), 64, overlap=1.0)
    siblings = replace(alone, group_size=8)
    assert time_of(SERVER, siblings).work_s < 0.2 * time_of(SERVER, alone).work_s
    spread = [float(time_of(SERVER, siblings, number=n).work_s) * n for n in (1, 8, 64)]
    assert spread == sorted(spread)


def test_new_weights_make_turns_on_a_server_compute_their_contexts_once() -> None:
    """Who has no tools is always on one: what it computed again is there at its next turn."""
    one_turn = Workload((TrajectorySample(100, 500, 400, turns=1),), 64, overlap=4.0)
    many = replace(one_turn, samples=(TrajectorySample(100, 500, 400, turns=10),))
    kept = time_of(SERVER, replace(one_turn, keeps_kv=True)).work_s
    assert time_of(SERVER, many).work_s == pytest.approx(time_of(SERVER, one_turn).work_s)
    assert time_of(SERVER, many).work_s > 1.05 * kept
    for work in (replace(many, overlap=1.0), replace(many, keeps_kv=True)):
        assert time_of(SERVER, work).work_s == pytest.approx(kept)


def test_who_waits_for_tools_computes_a_context_once_for_new_weights() -> None:
    """Next to no time is on the servers, so no turn is pushed back."""
    slow = TrajectorySample(100, 500, 400, turns=10, tool_s=1e5)
    one_turn = replace(slow, turns=1)
    kept, at_once, twice = (
        time_of(SERVER, Workload((one,), 64, overlap=4.0, keeps_kv=keeps_kv)).work_s
        for one, keeps_kv in ((slow, True), (one_turn, False), (slow, False))
    )
    assert at_once == pytest.approx(kept, rel=0.01)
    assert twice > 1.05 * kept


@given(samples=SAMPLES, seats=st.integers(8, 64), overlap=st.sampled_from([1.0, 2.0, 5.0]))
def test_less_room_never_makes_a_step_shorter(
    samples: tuple[TrajectorySample, ...], seats: int, overlap: float
) -> None:
    work = Workload(samples, 128, overlap, group_size=4)
    more, fewer = (float(time_of(SERVER, work, 2, s).seats_s) for s in (seats, seats // 2))
    assert fewer >= more * 0.999


@given(samples=SAMPLES, factor=st.floats(1.0, 5.0))
def test_everything_slower_is_as_much_longer(
    samples: tuple[TrajectorySample, ...], factor: float
) -> None:
    """Prices and tools times a factor: the step times that factor."""
    slower = replace(
        SERVER,
        step_s=SERVER.step_s * factor,
        sequence_s=SERVER.sequence_s * factor,
        kv_token_s=SERVER.kv_token_s * factor,
        prefill_token_s=SERVER.prefill_token_s * factor,
    )
    waiting = tuple(replace(each, tool_s=each.tool_s * factor) for each in samples)
    before = time_of(SERVER, Workload(samples, 64)).seconds
    after = time_of(slower, Workload(waiting, 64)).seconds
    assert after == pytest.approx(before * factor, rel=1e-6)


def held_s(work: Workload, seats: int) -> tuple[float, float, float]:
    """Of one server: what a step's trajectories wait beside their own steps and tools, those in
    play, and the step, in seconds."""
    parts = SortedParts(work, 64)
    load = parts.load(SERVER).at((0, len(parts)))
    time = EqualServers(SERVER, 1, seats, 0.5).time(load, work)
    mine = load.of_one(1, work.group_size)
    step_s = float(time.seats_s)
    alone_s = float(mine.engine_s) / (1 - float(time.work_s) / step_s) + float(mine.tool_s)
    return float(time.places) * step_s - alone_s, float(time.places), step_s


def test_those_that_begin_with_new_weights_wait_for_each_others_prompts() -> None:
    """All 64 prompts of a step come at once, and find more in play than there are on average."""
    work = Workload((TrajectorySample(3000, 500),), 64, overlap=2.0, late=inf, keeps_kv=True)
    waits_s, live, step_s = held_s(work, seats=10**6)
    prompts_s = 64 * 3000 * SERVER.prefill_token_s
    left = 64 / expm1(64 / live)
    more = left + 64 - live
    assert 32 < more < 64
    assert waits_s == pytest.approx(more * prompts_s / (1 - prompts_s / step_s), rel=0.05)


def test_nobody_waits_for_a_burst_where_seats_let_one_begin_as_another_ends() -> None:
    work = Workload((TrajectorySample(3000, 500),), 64, overlap=5.0, late=inf, keeps_kv=True)
    waits_s, live, step_s = held_s(work, seats=16)
    assert live == pytest.approx(16)
    assert waits_s == pytest.approx(0.0, abs=1e-3 * live * step_s)


def test_what_is_left_of_trajectories_before_new_weights_computes_again() -> None:
    """With hardly one step's worth in flight next to nobody is, and with many nearly all are."""
    one = Workload((TrajectorySample(300, 500, 400, turns=10),), 64, overlap=2.0, late=inf)
    again = []
    for overlap in (2.0, 9.0):
        work = replace(one, overlap=overlap)
        kept = time_of(SERVER, replace(work, keeps_kv=True), seats=10**6)
        time = time_of(SERVER, work, seats=10**6)
        tokens = (time.work_s - kept.work_s) / SERVER.prefill_token_s
        again.append(float(tokens / time.places))
    assert again[0] < 0.8 * again[1]
