"""Shares of the global batch and packed micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.node.batch.samples import TokenSample  # noqa: E402
from libra_cli.node.model.batching import collate, deal  # noqa: E402

LENGTHS = st.lists(st.integers(2, 500), max_size=80)


@given(lengths=LENGTHS, shares=st.integers(1, 5), budget=st.integers(1, 4000))
def test_every_trajectory_is_dealt_once_and_every_rank_runs_as_often(
    lengths: list[int], shares: int, budget: int
):
    dealt = deal(lengths, shares=shares, budget=budget)
    indices = [i for share in dealt for batch in share for i in batch]
    assert sorted(indices) == list(range(len(lengths)))
    assert len({len(share) for share in dealt}) == 1


@given(lengths=LENGTHS, shares=st.integers(1, 5), budget=st.integers(500, 4000))
def test_no_micro_batch_is_over_the_budget(lengths: list[int], shares: int, budget: int):
    for share in deal(lengths, shares=shares, budget=budget):
        for batch in share:
            assert sum(lengths[i] for i in batch) <= budget


@given(lengths=LENGTHS, budget=st.integers(500, 4000))
def test_no_two_micro_batches_would_have_fitted_into_one(lengths: list[int], budget: int):
    (cut,) = deal(lengths, shares=1, budget=budget)
    tokens = sorted(sum(lengths[i] for i in batch) for batch in cut)
    assert len(tokens) < 2 or tokens[0] + tokens[1] > budget


@given(lengths=st.lists(st.integers(2, 500), min_size=1, max_size=80), shares=st.integers(1, 5))
def test_shares_differ_by_at_most_one_trajectory_s_tokens(lengths: list[int], shares: int):
    tokens = [
        sum(lengths[i] for batch in share for i in batch)
        for share in deal(lengths, shares=shares, budget=1000)
    ]
    assert max(tokens) - min(tokens) <= max(lengths)


def sample(
    length: int, generated: list[int], *advantages: tuple[int, float], fresh: bool = False
) -> TokenSample:
    mask: NDArray[np.int8] = np.zeros(length, dtype=np.int8)
    mask[generated] = 1
    return TokenSample(
        group=0,
        member=0,
        token_ids=np.arange(10, 10 + length, dtype=np.int32),
        logprobs=np.linspace(0, -1, length, dtype=np.float32),
        loss_mask=mask,
        reward=0.0,
        advantages=advantages,
        fresh=fresh,
    )


def test_a_micro_batch_holds_exactly_the_generated_tokens():
    batch = collate(
        [sample(6, [2, 5], (0, 0.5)), sample(3, [1], (0, -2.0), fresh=True)], torch.device("cpu")
    )
    request = batch.request
    assert request.token_ids.tolist() == [[10, 11, 12, 13, 14, 15, 10, 11, 12]]
    assert request.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2]]
    assert request.packed.lengths == (6, 3)
    assert request.packed.starts.tolist() == [0, 6, 9]
    assert request.places.tolist() == [2, 5, 7]
    assert request.targets.tolist() == [12, 15, 11]
    assert batch.rows.tolist() == [0, 0, 1]
    assert batch.advantages.tolist() == [0.5, 0.5, -2.0]
    assert batch.rollout.tolist() == pytest.approx([-0.4, -1.0, -0.5])
    assert batch.fresh.tolist() == [False, False, True]


def test_an_empty_share_still_makes_a_forward_pass():
    batch = collate([], torch.device("cpu"))
    assert batch.request.token_ids.shape == (1, 2)
    assert batch.request.targets.numel() == 0
