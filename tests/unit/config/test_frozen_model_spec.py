"""What a recipe's words about a frozen model mean."""

from __future__ import annotations

import math

import pytest

from libra_cli.config.frozen_models import FrozenModelSpec


@pytest.mark.parametrize(
    ("arguments", "seats"),
    [
        ([], math.inf),
        (["--max-num-seqs", "8"], 8),
        (["--dtype=bfloat16", "--max-num-seqs=64"], 64),
        (["--max_num_seqs", "8"], 8),
        (["--max-num-seqs", "8", "--data-parallel-size", "2"], math.inf),
        (["--max-num-seqs", "many"], math.inf),  # vLLM itself refuses that
    ],
)
def test_seats_are_those_of_vllms_argument(arguments: list[str], seats: float) -> None:
    spec = FrozenModelSpec.model_validate(
        {"name": "judge", "path": "/judge", "vllm_args": arguments}
    )
    assert spec.seats == seats
