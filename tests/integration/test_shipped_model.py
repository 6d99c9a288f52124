"""The command that made the small model that comes with libra makes it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.shipped_model import SHIPPED, made_in

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]

SUCCESS_APART = 0.1
"""Share of 256 episodes: three standard errors of a share of 0.3."""


def test_it_is_made_again(tmp_path: Path) -> None:
    """Bit for bit on a processor like the one it was made on. Another one sums in another order,
    which grows over the steps: then it still plays as well."""
    made = made_in(tmp_path)
    names = {file.name for file in SHIPPED.iterdir()}
    assert {file.name for file in made.iterdir()} == names
    for name in names - {"libra.json", "model.safetensors"}:
        one, other = (json.loads((each / name).read_text()) for each in (made, SHIPPED))
        for said in (one, other):
            said.pop("transformers_version", None)
        assert one == other, name
    again, before = (json.loads((each / "libra.json").read_text()) for each in (made, SHIPPED))
    for key in ("hash", "build", "parameters"):
        assert again[key] == before[key]
    weights, kept = (load_file(each / "model.safetensors") for each in (made, SHIPPED))
    assert {name: one.shape for name, one in weights.items()} == {
        name: one.shape for name, one in kept.items()
    }
    if not all(torch.equal(weights[name], kept[name]) for name in kept):
        for key in ("success", "greedy_success"):
            assert again[key] == pytest.approx(before[key], abs=SUCCESS_APART)
