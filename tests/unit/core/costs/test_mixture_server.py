"""The law of a server of a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.costs.architecture import published
from libra_cli.core.costs.mixture_server import MixtureServerCost
from libra_cli.core.costs.mixture_transformer import MixtureTransformer, expected_experts
from libra_cli.core.costs.online import OnlineServerCost
from libra_cli.core.costs.profile import Profile, ProfileError
from libra_cli.sim.profiles import load_profile

COST = MixtureServerCost(
    tensor_parallel=1,
    step_s=0.007,
    sequence_s=1e-5,
    kv_token_s=5e-8,
    prefill_token_s=2e-5,
    prefill_pair_s=4e-9,
    kv_tokens=100_000,
    chunk_tokens=512,
    free_tokens=100,
    experts=128,
    chosen=8,
    expert_s=3e-4,
)
FUSED_EXPERTS = (
    (1, 8, 48.17),
    (2, 16, 129.95),
    (4, 32, 234.20),
    (8, 64, 433.76),
    (16, 64, 436.41),
    (16, 128, 829.49),
    (32, 128, 832.81),
    (128, 128, 841.54),
    (512, 128, 907.11),
    (2048, 128, 1091.33),
)
"""Tokens, distinct experts, and microseconds of vLLM's fused experts of one layer of Qwen3-30B-A3B
(LLMServingSim, MIT: profiler/perf/RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507/bf16/tp1/moe.csv)."""
DENSE_BYTES_S = 5120 * 2 * 25600 * 2 / 378.143e-6
"""What the same GPU reads a second in the first products of Qwen3-32B for one token (same)."""


@given(batch=st.integers(0, 512), kv=st.integers(0, 10**6), chunk=st.integers(0, 512))
def test_a_step_takes_longer_with_more_in_it(batch: int, kv: int, chunk: int) -> None:
    less = COST.mixed_step_s(batch, kv, chunk, 100)
    assert COST.mixed_step_s(batch + 1, kv, chunk, 100) >= less
    assert COST.mixed_step_s(batch, kv + 1, chunk, 100) > less
    assert COST.mixed_step_s(batch, kv, chunk + 1, 100) > less
    assert COST.mixed_step_s(batch, kv, 0, 0) == pytest.approx(COST.decode_step_s(batch, kv))


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    assert COST.decode_step_s(1, 0) == pytest.approx(0.007 + 8 * 3e-4 + 1e-5)
    assert COST.decode_step_s(1e4, 0) == pytest.approx(0.007 + 128 * 3e-4 + 0.1)
    both = COST.mixed_step_s(8, 0, 24, 0)
    assert both - COST.decode_step_s(8, 0) == pytest.approx(
        3e-4 * (expected_experts(128, 8, 32) - expected_experts(128, 8, 8)) + 4e-9 * 24 * 12
    )


def test_a_prefill_is_its_chunks() -> None:
    alone = COST.mixed_step_s(0, 0, 512, 0) + COST.mixed_step_s(0, 0, 100, 512)
    assert COST.prefill_s(612, 0) == pytest.approx(alone)


def test_a_share_of_a_step_is_what_its_batch_reads_of_all_experts() -> None:
    assert COST.step_share(1e6) == pytest.approx(1.0)
    assert COST.step_share(1) == pytest.approx((0.007 + 8 * 3e-4) / (0.007 + 128 * 3e-4))
    shares = COST.step_share(np.array([1.0, 8.0, 64.0]))
    assert (np.diff(shares) > 0).all()


@pytest.mark.parametrize("batch", [1, 3, 30, 400])
def test_no_step_is_below_the_floor_nor_above_all_experts(batch: int) -> None:
    step_s = COST.decode_step_s(batch, 1000)
    assert COST.floor().decode_step_s(batch, 1000) <= step_s * (1 + 1e-12)
    assert COST.linear().decode_step_s(batch, 1000) >= step_s


def test_what_an_expert_takes_is_learned_from_steps() -> None:
    true, learned = replace(COST, expert_s=6e-4), OnlineServerCost(COST)
    for number in range(300):
        batch, kv = 1 + number % 60, 500 * (1 + number % 7)
        learned.observe(batch, kv, true.decode_step_s(batch, kv))
    for batch in (1, 10, 60):
        found = learned.cost().decode_step_s(batch, 1500)
        assert found == pytest.approx(true.decode_step_s(batch, 1500), rel=0.05)


def test_the_law_follows_measured_experts_and_a_straight_line_does_not() -> None:
    tokens, met, seconds = np.array(FUSED_EXPERTS).T
    off = np.abs((6.70 * met + 0.110 * tokens) / seconds - 1)
    assert off.mean() < 0.06
    assert off.max() < 0.18
    rows = np.stack([np.ones_like(tokens), tokens], axis=1) / seconds[:, None]
    line = np.linalg.lstsq(rows, np.ones_like(seconds), rcond=None)[0]
    assert np.abs(rows @ line - 1).mean() > 0.4


def test_experts_are_read_as_fast_as_dense_weights() -> None:
    shape = published("Qwen3-30B-A3B")
    assert isinstance(shape, MixtureTransformer)
    assert 2 * shape.expert_parameters / DENSE_BYTES_S == pytest.approx(6.70e-6, rel=0.02)


@pytest.mark.parametrize(
    "wrong", [{"expert_s": -1e-9}, {"chosen": 0}, {"chosen": 129}, {"step_s": -1.0}]
)
def test_impossible_prices_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(COST, **wrong)  # type: ignore[arg-type]


def test_a_profile_keeps_the_law_in_its_file() -> None:
    profile = load_profile("a800-qwen3-30b-a3b")
    assert Profile.from_json(profile.to_json()) == profile
    assert isinstance(profile.servers[2], MixtureServerCost)
    with pytest.raises(ProfileError, match="chosen"):
        Profile.from_json(profile.to_json().replace('"chosen": 8', '"chosen": 800'))


def test_the_facts_of_a_profile_are_those_of_the_model() -> None:
    shape, told = published("Qwen3-30B-A3B"), load_profile("h100-qwen3-30b-a3b").facts.architecture
    assert shape is not None
    assert told.parameters == pytest.approx(shape.parameters, rel=1e-4)
    assert told.active_parameters == pytest.approx(shape.active_parameters, rel=1e-3)
    assert told.layer_bytes() == pytest.approx(shape.layer_bytes(), rel=1e-3)
    assert told.kv_bytes() == shape.kv_bytes()
