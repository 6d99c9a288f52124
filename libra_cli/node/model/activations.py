"""Which activations of a forward pass are kept for the backward pass, layer by layer.

    none         all of them
    selective    results of matrix products and of attention; what is between them is computed again
    full         each layer's input; the whole layer is computed again

Recomputation gives the same numbers, so the choice is between memory and time alone. The inputs of
layers that are computed again may be kept in the host's memory, by transformers; without a GPU they
are there anyway.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.attention.varlen  # registers _varlen_attn
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from libra_cli.node.model import packed_attention  # noqa: F401 - registers attend_each

KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.libra.attend_each.default,
]
"""Operations whose results are kept when the choice is selective."""


selective_contexts = partial(create_selective_checkpoint_contexts, KEPT)
"""What ``torch.utils.checkpoint`` is given when the choice is selective."""


def checkpoint_activations(
    model: nn.Module, choice: str, *, on_gpu: bool, offload: bool = False
) -> None:
    """Apply ``training.activation_checkpointing`` and ``activation_offload`` to a transformers
    model."""
    if choice == "auto":
        choice = "full" if on_gpu else "none"
    if choice == "none":
        return
    how: dict[str, object] = {"use_reentrant": False}
    if choice == "selective":
        how["context_fn"] = selective_contexts
    model.gradient_checkpointing_enable(how, offload=offload and on_gpu)
