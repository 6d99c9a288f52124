"""Mends vLLM's rotary embedding on CPUs for models that give it a tensor of heads.

vLLM 0.32's CPU kernel (``torch.ops._C.rotary_embedding``) takes a query ``[tokens, heads, size]``
for ``tokens * heads`` tokens of one head: of these rows the first ``tokens`` are turned, row i by
position i, and the others stay as they are. The kernel for GPUs compares the dimensions of queries
and positions and turns every head by its token's position. LFM2 gives queries and keys in that
shape; without this its log-probabilities are off by 0.3 nats.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def with_heads_in_rows(tensor: Tensor | None, positions: Tensor) -> Tensor | None:
    """Return queries or keys ``[..., heads, size]`` as ``[..., heads * size]``, a view or, where
    strides allow none, a copy; what is in that shape already, and None, as it is."""
    if tensor is None or tensor.dim() != positions.dim() + 2:
        return tensor
    return tensor.reshape(*tensor.shape[:-2], -1)


def mend() -> None:
    """Let vLLM's own function turn such views, where vLLM runs on a CPU."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    theirs = _custom_ops.rotary_embedding

    def rotary_embedding(
        positions: Tensor, query: Tensor, key: Tensor | None, *others: Any, **named: Any
    ) -> None:
        """Turn queries and keys in place."""
        shaped = [with_heads_in_rows(one, positions) for one in (query, key)]
        theirs(positions, *shaped, *others, **named)
        for given, turned in zip((query, key), shaped, strict=True):
            if given is None or turned is None or turned.data_ptr() == given.data_ptr():
                continue
            given.copy_(turned.view_as(given))  # a copy was turned

    vars(_custom_ops)["rotary_embedding"] = rotary_embedding
