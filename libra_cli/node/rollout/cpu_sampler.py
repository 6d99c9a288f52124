"""Mends vLLM's rejection sampler on CPUs, which speculative decoding samples with.

vLLM 0.32 and 0.33 hand ``expand_kernel_impl`` (``vllm/utils/cpu_triton_utils.py``) an int64 copy of
the tensor that it is to fill whenever that tensor is not int64 itself, and drop the copy. So the
temperatures (float32) of drafted tokens are what happened to be in memory: tokens are drawn at some
other temperature, and their log-probabilities are often not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expand_batch_to_tokens(
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """Repeat the values ``x [requests]`` for each request's tokens: ``[num_tokens]``.

    ``cu_num_tokens [requests]`` are cumulative counts; ``replace_from`` becomes ``replace_to``.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = torch.repeat_interleave(x, counts, output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)


def mend() -> None:
    """Put the function above in the place of vLLM's, where vLLM runs on a CPU."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if current_platform.is_cpu():
        vars(rejection_sampler)["expand_batch_to_tokens"] = expand_batch_to_tokens
