"""Causal attention over sequences that lie one after the other in one row, without padding.

A packed row is ``[1, T]`` with positions that begin at 0 in every sequence; ``PackedSequences``
says where they begin. On GPUs, in half precision, torch's ``varlen_attn`` (Flash Attention) takes
the row as it is. Elsewhere each sequence is attended to by itself with torch's causal kernel. No
mask is made: one of all sequences would take T squared entries, and the kernels compute all of them
(on two cores, 9,617 tokens in 40 sequences: 21 s forward and backward, this way 8). Where ranks
share a row (``context_parallel``), each attends to all of it with its share of the heads.

Under autocast norms and rotary embeddings return float32, so queries and keys are cast to what
autocast computes in: a rank that holds float32 weights uses the same kernel as sharded ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from libra_cli.node.model.context_parallel import ContextGroup
from libra_cli.node.model.weight_names import auto_class

NAME = "libra_packed"
HALF = (torch.bfloat16, torch.float16)
PACKABLE = {"full_attention", "sliding_attention"}
"""Kinds of layers through which sequences in one row do not see one another."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Where the sequences of a packed row are."""

    lengths: tuple[int, ...]
    """Number of tokens of each sequence."""
    starts: Tensor
    """int32, ``[sequences + 1]``: where each begins, and the end of the last."""
    context: ContextGroup | None = None
    """The ranks that have a part of the row each; None if it is here as a whole."""


def attention_of(config: PreTrainedConfig) -> str:
    """Return the attention that a model is made with: torch's kernels, where its class has them.

    gpt-oss has none: its heads attend to learned sinks besides.
    """
    model = auto_class(config)._model_mapping[type(config)]
    return "sdpa" if model._supports_sdpa else "eager"


def use_packed_attention(model: nn.Module) -> bool:
    """Let a transformers model attend as above, and return True, if every layer of it can."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    able = getattr(model, "_supports_attention_backend", False) and model._supports_sdpa
    if not (able and kinds <= PACKABLE):
        return False
    AttentionInterface.register(NAME, packed_attention)
    # Of a model that sees, its tower attends to whole images.
    sees = "text_config" in model.config.sub_configs
    model.set_attn_implementation({"text_config": NAME} if sees else NAME)
    return True


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedSequences | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers; tensors are ``[1, heads, T, width of a head]``.

    Without ``packed`` every row is one sequence.
    """
    query, key, value = _as_computed(query, key, value)
    if packed is None or packed.context is None:
        return _attend(query, key, value, packed, dropout, scaling, sliding_window), None
    query, key, value = packed.context.to_heads(query, key, value)
    output = _attend(query, key, value, packed, dropout, scaling, sliding_window)
    return packed.context.to_tokens(output), None


def _as_computed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the format of autocast, where that is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences | None,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Attend within each sequence: ``[1, heads, T, width]`` gives ``[1, T, heads, width]``."""
    if packed is not None and query.is_cuda and query.dtype in HALF and not dropout:
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        longest = max(packed.lengths)
        window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
        starts = packed.starts
        output = varlen_attn(
            *rows, starts, starts, longest, longest, scale=scaling, window_size=window,
            enable_gqa=True,
        )  # fmt: skip
        return output[None]
    lengths = list(packed.lengths) if packed is not None else [query.shape[2]]
    parts = [
        scaled_dot_product_attention(
            one_query,
            one_key,
            one_value,
            attn_mask=_band(one_query, sliding_window),
            dropout_p=dropout,
            is_causal=not _is_cut(one_query, sliding_window),
            scale=scaling,
            enable_gqa=True,
        )
        for one_query, one_key, one_value in zip(
            *(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True
        )
    ]
    return torch.cat(parts, 2).transpose(1, 2).contiguous()


def _is_cut(query: Tensor, window: int | None) -> bool:
    """Whether the sequence is longer than a token sees."""
    return window is not None and query.shape[2] > window


def _band(query: Tensor, window: int | None) -> Tensor | None:
    """The mask of a sequence that is longer than the window."""
    if window is None or not _is_cut(query, window):
        return None
    length = query.shape[2]
    whole = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return whole.tril().triu(1 - window)
