"""What becomes of attention heads where ranks share a forward pass."""

from __future__ import annotations

import pytest

from libra_cli.core.costs.architecture import PUBLISHED, published
from libra_cli.core.costs.heads import Heads
from libra_cli.core.costs.memory import rank_memory

EIGHT = PUBLISHED["Qwen3-8B"].heads
"""32 heads, 8 of keys."""


def test_ranks_that_divide_the_heads_can_share():
    assert [n for n in range(1, 33) if EIGHT.divides(n)] == [1, 2, 4, 8, 16, 32]
    assert [n for n in range(1, 41) if PUBLISHED["Qwen3-14B"].heads.divides(n)] == [
        *(1, 2, 4, 5, 8, 10, 20, 40)
    ]
    mixture = published("Qwen3-30B-A3B")
    assert mixture is not None
    assert (mixture.heads.query, mixture.heads.key, mixture.heads.width) == (4096, 512, 128)


@pytest.mark.parametrize(
    ("ranks", "times"), [(1, 1), (2, 1), (8, 1), (16, 2), (32, 4), (3, 3), (12, 3)]
)
def test_heads_of_keys_are_repeated_until_each_rank_has_whole_ones(ranks: int, times: int):
    heads = Heads(query=96 * 128, key=8 * 128, width=128)
    assert heads.repeated(ranks) == 2 * 1024 * (times - 1)


def test_what_is_exchanged_is_all_but_a_rank_s_own_part():
    assert EIGHT.exchanged(1) == 0
    assert EIGHT.exchanged(2) == (2 * 4096 + 2 * 1024) / 2
    assert EIGHT.exchanged(16) == (2 * 4096 + 2 * 2048) * 15 / 16


def test_ranks_that_share_a_pass_hold_what_a_shorter_one_takes_and_repeated_keys():
    shape = PUBLISHED["Qwen3-8B"]
    shorter = rank_memory(shape, world=16, tokens=8192, choice="full")
    for sharing in (8, 16):
        shared = rank_memory(shape, world=16, tokens=8192 * sharing, choice="full", cp_size=sharing)
        repeated = 2 * 8192 * EIGHT.repeated(sharing)
        assert shared.total == shorter.total + repeated
