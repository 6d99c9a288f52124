"""What stands in for vLLM's own expansion of requests' values to their drafted tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from libra_cli.node.rollout.cpu_sampler import expand_batch_to_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_every_token_has_the_value_of_its_request(dtype):
    values = torch.tensor([0, 2, 3, 4]).to(dtype)
    counts = torch.tensor([2, 2, 5, 6], dtype=torch.int32)  # the second request has no draft
    expanded = expand_batch_to_tokens(values, counts, 6, 0, 1)
    assert expanded.dtype == dtype
    assert expanded.tolist() == [1, 1, 3, 3, 3, 4]
    assert expand_batch_to_tokens(values, counts, 6).tolist() == [0, 0, 3, 3, 3, 4]
