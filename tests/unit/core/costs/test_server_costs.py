"""The linear law of an engine step."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.costs.server import ServerCost

A100_14B = ServerCost(
    tensor_parallel=1,
    step_s=0.0197,
    sequence_s=4.9e-5,
    kv_token_s=9.4e-8,
    prefill_token_s=9.6e-5,
    prefill_pair_s=3.8e-9,
    kv_tokens=246_974,
    free_tokens=118,
)
prices = st.floats(0, 1e-2, allow_subnormal=False)
costs = st.builds(
    ServerCost,
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
    step_s=prices,
    sequence_s=prices,
    kv_token_s=prices,
    prefill_token_s=prices,
    prefill_pair_s=prices,
    kv_tokens=st.integers(1, 10**6),
    chunk_tokens=st.integers(1, 4096),
    free_tokens=st.integers(0, 512),
)
sizes = st.integers(0, 100_000)


def test_a_decode_step_is_a_plus_b_batch_plus_c_kv() -> None:
    assert A100_14B.decode_step_s(64, 100_000) == pytest.approx(0.0197 + 0.003136 + 0.0094)


def test_the_first_tokens_of_a_step_ride_on_reading_the_weights() -> None:
    assert A100_14B.mixed_step_s(0, 0, 100, 0) == pytest.approx(0.0197 + 3.8e-9 * 5000)
    full = A100_14B.mixed_step_s(118, 0, 100, 0) - A100_14B.decode_step_s(118, 0)
    assert full == pytest.approx(100 * 9.6e-5 + 3.8e-9 * 5000)


@given(costs, sizes, sizes)
def test_a_prefill_is_the_sum_of_its_steps(cost: ServerCost, tokens: int, context: int) -> None:
    tokens %= 20 * cost.chunk_tokens
    steps = 0.0
    for start in range(0, tokens, cost.chunk_tokens):
        chunk = min(cost.chunk_tokens, tokens - start)
        steps += cost.mixed_step_s(0, 0, chunk, context + start)
    assert cost.prefill_s(tokens, context) == pytest.approx(steps, rel=1e-6)


@given(costs, sizes, sizes, sizes)
def test_a_run_of_steps_is_the_line_summed(
    cost: ServerCost, batch: int, kv_tokens: int, steps: int
) -> None:
    steps %= 50
    first, growth, holds = cost.decode_line(batch, kv_tokens)
    one_by_one = sum(cost.decode_step_s(batch, kv_tokens + i * batch) for i in range(steps))
    assert steps <= holds
    assert steps * first + growth * steps * (steps - 1) / 2 == pytest.approx(one_by_one)


@given(costs, sizes, sizes, sizes, sizes)
def test_more_work_never_costs_less(
    cost: ServerCost, batch: int, kv_tokens: int, chunk: int, context: int
) -> None:
    here = cost.mixed_step_s(batch, kv_tokens, chunk, context)
    slack = 1 + 1e-12
    assert here <= cost.mixed_step_s(batch + 1, kv_tokens, chunk, context) * slack
    assert here <= cost.mixed_step_s(batch, kv_tokens + 1, chunk, context) * slack
    assert here <= cost.mixed_step_s(batch, kv_tokens, chunk + 1, context) * slack
    assert here <= cost.mixed_step_s(batch, kv_tokens, chunk, context + 1) * slack


@pytest.mark.parametrize(
    "field",
    ["step_s", "sequence_s", "kv_token_s", "prefill_token_s", "prefill_pair_s", "free_tokens"],
)
def test_a_price_below_zero_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ServerCost(**{**asdict(A100_14B), field: -1})
    with pytest.raises(ValueError, match=field):
        ServerCost(**{**asdict(A100_14B), field: float("nan")})


@pytest.mark.parametrize("field", ["tensor_parallel", "kv_tokens", "chunk_tokens"])
def test_a_size_below_one_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ServerCost(**{**asdict(A100_14B), field: 0})
