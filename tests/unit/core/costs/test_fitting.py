from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.costs.fitting import FittingError, Observed, fit
from libra_cli.core.costs.loads import (
    Batch,
    ServerLoad,
    fit_server,
    fit_training,
    server_loads,
    sharing_loads,
    training_batches,
)

SERVER = (0.004, 2e-4, 3e-8, 1e-4, 1e-8, 9e-4, 2e-3)
TRAINING = (0.05, 9e-5, 1.5e-7)


def times(prices, amounts, random, noise=0.0):
    seconds = sum(price * amount for price, amount in zip(prices, amounts, strict=True))
    return seconds * random.gauss(1, noise)


def measured_loads(noise=0.0, seed=0):
    random = Random(seed)
    loads = list(server_loads(64, 4096, 200_000)) * 2
    return [(load, times(SERVER, load.amounts(2048), random, noise)) for load in loads]


def fitted(noise=0.0, seed=0):
    found = fit_server(
        measured_loads(noise, seed), tensor_parallel=1, kv_tokens=200_000, chunk_tokens=2048
    )
    return found, found.fit.prices


def test_exact_times_give_the_prices_back():
    found, prices = fitted()
    assert prices == pytest.approx(SERVER, rel=1e-4)
    assert found.fit.worst_error < 1e-6
    assert found.cost.request_s == pytest.approx(SERVER[5], rel=1e-4)
    assert found.turn_s == pytest.approx(SERVER[6], rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_three_percent_moves_what_it_predicts_by_less(seed):
    _, prices = fitted(0.03, seed)
    random = Random(0)
    for players, generate, cached in ((3, 10, 100), (48, 6, 500), (1, 100, 3000), (20, 2, 50)):
        amounts = ServerLoad(players, cached, 20, generate).amounts(2048)
        true = times(SERVER, amounts, random)
        assert times(prices, amounts, random) == pytest.approx(true, rel=0.03)


def test_the_residuals_of_a_fit_are_those_of_the_noise():
    found, _ = fitted(0.05)
    assert 0.02 < found.fit.mean_error < 0.06
    assert found.fit.worst_error < 0.25
    assert "measurements" in found.fit.summary()


def test_training_prices_come_back_whatever_the_ranks():
    random = Random(0)
    batches = list(training_batches(128, 512))
    points = [(batch, times(TRAINING, batch.amounts(), random)) for batch in batches]
    assert fit_training(points, ranks=1).prices == pytest.approx(TRAINING, rel=1e-4)
    once, token, pair = fit_training(points, ranks=4).prices
    assert (once, token, pair) == pytest.approx((0.05, 4 * 9e-5, 4 * 1.5e-7), rel=1e-4)


def test_too_few_points_are_refused_with_what_is_needed():
    points = [(Batch(8, 32), 0.1), (Batch(8, 64), 0.2)]
    with pytest.raises(FittingError, match="2 measurements are too few for 3 prices") as error:
        fit_training(points, ranks=1)
    assert "5 are needed" in str(error.value)
    assert error.value.hint


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(seconds):
    points = [Observed((1.0,), 1.0), Observed((2.0,), 2.0), Observed((3.0,), seconds)]
    with pytest.raises(FittingError, match="took no time"):
        fit("a thing", ["a"], points)


def test_times_without_amounts_are_refused():
    with pytest.raises(FittingError, match="do not depend"):
        fit("a thing", ["a"], [Observed((0.0,), 1.0)] * 4)


@given(
    st.lists(
        st.tuples(*[st.floats(0, 1e3)] * 3, st.floats(1e-3, 1e3)), min_size=5, max_size=12
    ).filter(lambda rows: any(any(row[:3]) for row in rows))
)
def test_prices_are_never_negative(rows):
    points = [Observed(row[:3], row[3]) for row in rows]
    try:
        found = fit("a thing", ["a", "b", "c"], points)
    except FittingError:
        return
    assert all(price >= 0 for price in found.prices)


def test_what_would_be_negative_is_nothing_and_the_rest_is_best_without_it():
    rows = [(float(x), float(y)) for x in range(1, 5) for y in range(1, 5)]
    points = [Observed(row, 2 * row[0] - 0.1 * row[1]) for row in rows]
    found = fit("a thing", ["a", "b"], points)
    alone = fit("a thing", ["a"], [Observed(point.amounts[:1], point.seconds) for point in points])
    assert found.prices[1] == 0
    assert found.prices[0] == pytest.approx(alone.prices[0])


def test_columns_that_rise_together_do_not_break_it():
    points = [Observed((float(x), 2.0 * x), 3.0 * x) for x in range(1, 8)]
    found = fit("a thing", ["a", "b"], points)
    assert found.worst_error < 1e-9


# -- what is measured ----------------------------------------------------------------------------


@given(st.integers(1, 256), st.integers(64, 131_072), st.integers(2_000, 10_000_000))
def test_loads_fit_the_server(max_num_seqs, max_len, kv_tokens):
    for load in server_loads(max_num_seqs, max_len, kv_tokens):
        assert 1 <= load.players <= max_num_seqs
        longest = load.cached + load.fresh + max(1, 2 * load.generate - 1)
        assert longest <= max_len
        assert load.players * (load.cached + load.fresh) <= kv_tokens


@pytest.mark.parametrize("max_num_seqs", [1, 4, 8, 64])
def test_even_a_small_server_has_loads_enough_for_its_prices(max_num_seqs):
    loads = list(server_loads(max_num_seqs, 512, 700_000))
    random = Random(1)
    points = [(load, times(SERVER, load.amounts(2048), random)) for load in loads]
    found = fit_server(points * 2, tensor_parallel=1, kv_tokens=700_000, chunk_tokens=2048)
    assert found.fit.worst_error < 0.01


def test_the_loads_beside_training_are_the_fullest_and_a_quarter_of_it():
    assert [load.players for load in sharing_loads(64, 512)] == [64, 16]
    assert [load.players for load in sharing_loads(1, 512)] == [1]


def test_batches_grow_to_a_whole_step():
    batches = list(training_batches(128, 512))
    assert max(batch.trajectories for batch in batches) == 128
    assert len({batch.length for batch in batches}) == 3


def test_a_load_is_priced_by_what_a_server_does_in_a_turn():
    steps, decoded, read, computed, pairs, requests, turns = ServerLoad(
        players=2, cached=100, fresh=30, generate=11.0
    ).amounts(chunk_tokens=20)
    assert steps == 10 + 2
    assert decoded == 2 * 10
    assert read == 20 * (100 + 30 + 5.5)
    assert computed == 2 * 30
    assert pairs == 60 * (100 + 15)
    assert (requests, turns) == (2, 1.0)


@pytest.mark.parametrize(
    ("trajectories", "max_len", "numbers", "lengths"),
    [(24, 128, (3, 8, 24), (8, 16, 32)), (2, 16, (1, 2), (8,))],
)
def test_a_trainer_is_measured_with_an_eighth_a_third_and_all_of_a_step(
    trajectories: int, max_len: int, numbers: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    batches = [Batch(number, length) for number in numbers for length in lengths]
    assert list(training_batches(trajectories, max_len)) == batches
