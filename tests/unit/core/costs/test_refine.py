"""Prices follow what is seen, keep to the prior where that says nothing, and never turn odd."""

from __future__ import annotations

import heapq
from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from libra_cli.core import events as e
from libra_cli.core.costs.observed import (
    measured_profile,
    server_cost,
    training_cost,
    unchecked_facts,
)
from libra_cli.core.costs.online import ForgettingLeastSquares, LearnedCosts, OnlineServerCost
from libra_cli.core.costs.server import ServerCost, guessed_cost
from libra_cli.core.evidence import PlayedTurn, Starts, TrainedStep
from libra_cli.core.types import Bucket
from tests.world import World

BUCKET = Bucket("all", 1, 64, 512)
PRIOR = guessed_cost(BUCKET)
TRUE = replace(PRIOR, step_s=0.004, sequence_s=5e-5, kv_token_s=2e-7)


def loads(random: Random, number: int) -> list[tuple[int, int]]:
    return [
        (batch := random.randint(1, 64), batch * random.randint(50, 400)) for _ in range(number)
    ]


def refined(number: int, *, noise: float = 0.0, seed: int = 0) -> ServerCost:
    random, refiner = Random(seed), OnlineServerCost(PRIOR)
    for batch, kv in loads(random, number):
        step_s = TRUE.decode_step_s(batch, kv) * random.lognormvariate(-(noise**2) / 2, noise)
        refiner.observe(batch, kv, step_s)
    return refiner.cost().linear()


def test_before_anything_is_seen_the_prior_holds() -> None:
    assert OnlineServerCost(PRIOR).cost() == PRIOR


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_varied_loads_teach_the_true_step_time(batch: int) -> None:
    cost, kv = refined(400, noise=0.2), batch * 200
    assert cost.decode_step_s(batch, kv) == pytest.approx(TRUE.decode_step_s(batch, kv), rel=0.08)


def test_a_prior_wrong_by_one_factor_is_mended_by_a_few_readings() -> None:
    refiner = OnlineServerCost(PRIOR)
    for batch, kv in loads(Random(1), 20):
        refiner.observe(batch, kv, PRIOR.decode_step_s(batch, kv) / 10)
    cost = refiner.cost().linear()
    assert cost.step_s == pytest.approx(PRIOR.step_s / 10, rel=0.05)
    assert cost.prefill_token_s == pytest.approx(PRIOR.prefill_token_s / 10, rel=0.15)


def test_a_load_that_never_changes_keeps_the_proportions_of_the_prior() -> None:
    refiner = OnlineServerCost(PRIOR)
    for _ in range(300):
        refiner.observe(30, 6000, PRIOR.decode_step_s(30, 6000) * 3)
    cost = refiner.cost().linear()
    assert cost.decode_step_s(30, 6000) == pytest.approx(
        3 * PRIOR.decode_step_s(30, 6000), rel=0.01
    )
    assert cost.sequence_s / cost.step_s == pytest.approx(PRIOR.sequence_s / PRIOR.step_s, rel=0.1)


def test_what_has_changed_is_followed() -> None:
    refiner = OnlineServerCost(PRIOR)
    for factor in (1.0, 4.0):
        for batch, kv in loads(Random(2), 2500):
            refiner.observe(batch, kv, factor * TRUE.decode_step_s(batch, kv))
    cost = refiner.cost().linear()
    assert cost.decode_step_s(32, 6400) == pytest.approx(4 * TRUE.decode_step_s(32, 6400), rel=0.1)


def test_one_hang_does_not_spoil_the_prices() -> None:
    refiner = OnlineServerCost(PRIOR)
    for batch, kv in loads(Random(3), 300):
        refiner.observe(batch, kv, TRUE.decode_step_s(batch, kv))
    calm = refiner.cost().linear().decode_step_s(32, 6400)
    refiner.observe(32, 6400, 600.0)
    assert refiner.cost().linear().decode_step_s(32, 6400) == pytest.approx(calm, rel=0.05)


def test_a_reading_weighs_by_the_steps_that_are_in_it() -> None:
    """Half of the time steps of 10 ms, half of it steps of 40 ms: 16 ms a step, not 25."""
    refiner = OnlineServerCost(PRIOR)
    for step_s in (0.010, 0.040) * 200:
        refiner.observe(20, 4000, step_s)
    assert refiner.cost().linear().decode_step_s(20, 4000) == pytest.approx(0.016, rel=0.03)


@given(
    readings=st.lists(
        st.tuples(
            st.floats(0.01, 1e4),
            st.floats(0, 1e7),
            st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-6, 1e3),
        ),
        max_size=40,
    )
)
@example(readings=[(1.0, 0.0, 3.6e306)])
@example(readings=[(1.0, 0.0, 1e308)])
@example(readings=[(1e4, 1e7, 5e-324)])
@example(readings=[(1.0, 0.0, float("nan"))])
def test_no_reading_makes_a_price_negative_or_endless(readings) -> None:
    refiner = OnlineServerCost(PRIOR)
    for running, kv, step_s in readings:
        refiner.observe(running, kv, step_s)
    cost = refiner.cost().linear()
    for price in (cost.step_s, cost.sequence_s, cost.kv_token_s, cost.prefill_token_s):
        assert 0 <= price < float("inf")


def test_a_price_the_prior_has_at_nothing_stays_nothing() -> None:
    line = ForgettingLeastSquares((1.0, 0.0))
    for amount in range(1, 50):
        line.observe((1.0, float(amount)), 1.0 + amount)
    assert line.prices()[1] == 0.0


def test_shapes_learn_apart_and_keep_their_own_cache() -> None:
    costs = LearnedCosts(guessed_cost)
    small, large = Bucket("s", 1, 8, 100), Bucket("l", 4, 8, 900)
    for _ in range(50):
        costs.observe(small, running=8, kv_tokens=400, step_s=0.1)
    assert costs.of(small).linear().step_s > 2 * PRIOR.step_s
    assert costs.of(large) == guessed_cost(large)
    wide = replace(small, up_to_tokens=1000)
    assert costs.of(wide).linear().step_s == costs.of(small).linear().step_s
    assert costs.of(wide).kv_tokens == guessed_cost(wide).kv_tokens


def test_a_run_teaches_its_lanes_what_its_servers_do() -> None:
    world = World(Random(4))
    servers, tokens = world.machine.servers, dict.fromkeys(world.machine.servers.replicas, 0)
    world.later(e.RunStarted())
    learned = 0.0
    while world.end is None and not learned:
        _advance(world)
        for slot, status in servers.replicas.items():
            tokens[slot] += 50
            reading = e.ServerSampled(slot, status.incarnation, 1, 0, 0.1, None, 0, tokens[slot])
            world.give(reading)
        prices = {queue.cost.linear().step_s for queue in world.machine.scheduler.queues}
        learned = max((price for price in prices if price != PRIOR.step_s), default=0.0)
    assert 0 < learned < PRIOR.step_s, "50 tokens between two events is faster than the guess"


def _advance(world: World) -> None:
    world.now, _, event = heapq.heappop(world._heap)
    world.give(event)


# -- from a journal --------------------------------------------------------------------------------


def played(cost: ServerCost, number: int, seed: int = 0) -> list[PlayedTurn]:
    """Turns that begin at random on one server, as long as its load while they begin says."""
    random, now = Random(seed), 0.0
    turns: list[PlayedTurn] = []
    for _ in range(number):
        now += random.expovariate(20.0)
        inside = [turn for turn in turns[-400:] if turn.ended > now]
        held = sum(turn.prompt for turn in inside)
        generated, fresh = random.randint(4, 60), random.randint(10, 300)
        prompt = fresh + random.randint(0, 400)
        step_s = cost.decode_step_s(len(inside) + 1, held + prompt)
        seconds = generated * step_s + fresh * cost.prefill_token_s
        turns.append(PlayedTurn("a/0", now, now + seconds, prompt, fresh, generated))
    return turns


def test_turns_alone_tell_what_a_server_costs() -> None:
    cost = server_cost(played(TRUE, 3000), PRIOR)
    for batch in (2, 10):
        true = TRUE.decode_step_s(batch, 300 * batch)
        assert cost.decode_step_s(batch, 300 * batch) == pytest.approx(true, rel=0.25)


def test_without_a_turn_the_guess_stays() -> None:
    assert server_cost([], PRIOR) == PRIOR


def test_steps_tell_what_training_costs() -> None:
    random = Random(0)
    steps = [
        TrainedStep(0.3 + 1e-4 * tokens, tokens, tokens * 60.0)
        for tokens in (random.randint(3000, 12_000) for _ in range(50))
    ]
    cost = training_cost(steps, 2, unchecked_facts(1e6), micro_tokens=4096)
    for tokens in (4000, 8000):
        predicted = cost.step_s + (cost.token_s * tokens + cost.pair_s * tokens * 60) / 2
        assert predicted == pytest.approx(0.3 + 1e-4 * tokens, rel=0.1)


def test_training_has_no_price_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="no step"):
        training_cost([], 1, unchecked_facts(1e6), micro_tokens=4096)


def test_prices_of_a_run_are_a_profile_like_any_other() -> None:
    training = training_cost(
        [TrainedStep(1.0, 100, 100.0)], 1, unchecked_facts(1e6), micro_tokens=8
    )
    profile = measured_profile(
        {1: PRIOR}, training, Starts(20.0, None), name="n", gpu="CPU", model="m", provenance={}
    )
    assert type(profile).from_json(profile.to_json()) == profile
    assert profile.moves.to_rollout_s == 20.0
    assert profile.facts.server_gib(1, PRIOR.kv_tokens) <= profile.facts.usable_gib
