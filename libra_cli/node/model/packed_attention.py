"""Causal attention over sequences that lie one after the other in one row, without padding.

A packed row is ``[1, T]`` with positions that begin at 0 in every sequence; ``PackedSequences``
says where they begin. On GPUs, in half precision, torch's ``varlen_attn`` (Flash Attention) takes
the row as it is. Elsewhere each sequence is attended to by itself with torch's causal kernel. No
mask is made: one of all sequences would take T squared entries, and the kernels compute all of them
(on two cores, 9,617 tokens in 40 sequences: 21 s forward and backward, this way 8). Where ranks
share a row (``context_parallel``), each attends to all of it with its share of the heads.

In a compiled layer (``compiled``) the loop over sequences is one operation that takes where they
begin as a tensor: a graph then holds for rows of however many sequences, of whatever lengths.

Under autocast norms and rotary embeddings return float32, so queries and keys are cast to what
autocast computes in: a rank that holds float32 weights uses the same kernel as sharded ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from libra_cli.config.errors import TrainerError
from libra_cli.node.model.context_parallel import ContextGroup
from libra_cli.node.model.weight_names import auto_class

NAME = "libra_packed"
HALF = (torch.bfloat16, torch.float16)
PACKABLE = {"full_attention", "sliding_attention"}
"""Kinds of layers through which sequences in one row do not see one another."""
CHANGES = ("softcap", "s_aux", "position_bias", "indices", "block_indices")
"""Arguments of layers that change what is attended to, or how much; most others say again what is
known here."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Where the sequences of a packed row are."""

    lengths: tuple[int, ...]
    """Number of tokens of each sequence."""
    starts: Tensor
    """int32, ``[sequences + 1]``: where each begins, and the end of the last."""
    context: ContextGroup | None = None
    """The ranks that have a part of the row each; None if it is here as a whole."""
    longest: int = 0
    """Tokens of the longest sequence, counted here whatever is given: a graph that looked at
    ``lengths`` would be of one number of sequences. FSDP2 makes a copy with every field."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest", max(self.lengths))


def attention_of(config: PreTrainedConfig) -> str:
    """Return the attention that a model is made with: torch's kernels, where they compute it.

    They do not for gpt-oss, whose heads attend to learned sinks besides, nor for Gemma 2.
    """
    model = auto_class(config)._model_mapping[type(config)]
    return "sdpa" if model._supports_sdpa and not _is_capped(config) else "eager"


def _is_capped(config: PreTrainedConfig) -> bool:
    """Whether scores are squeezed below a cap ahead of the softmax, as Gemma 2 does. transformers'
    classes name torch's kernels as theirs all the same, which leave out the cap."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def use_packed_attention(model: nn.Module) -> bool:
    """Let a transformers model attend as above, and return True, if every layer of it can."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    able = getattr(model, "_supports_attention_backend", False) and model._supports_sdpa
    if not (able and kinds <= PACKABLE) or _is_capped(model.config):
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
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers; tensors are ``[1, heads, T, width of a head]``.

    Without ``packed`` every row is one sequence.

    Raises:
        TrainerError: the layer attends otherwise than is computed here.
    """
    for name in CHANGES:
        if more.get(name) is not None:
            raise TrainerError(
                f"{type(module).__name__} cannot be trained: its attention takes {name!r}, which "
                "would be left out"
            )
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
        longest, starts = packed.longest, packed.starts
        window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
        output = varlen_attn(
            *rows, starts, starts, longest, longest, scale=scaling, window_size=window,
            enable_gqa=True,
        )  # fmt: skip
        return output[None]
    if packed is not None and torch.compiler.is_compiling() and not dropout:
        whole: Tensor = attend_each(query, key, value, packed.starts, scaling, sliding_window)
        return whole
    lengths = list(packed.lengths) if packed is not None else [query.shape[2]]
    return _attend_each(query, key, value, lengths, dropout, scaling, sliding_window)


def _attend_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Attend within one sequence after the other, as ``_attend`` says."""
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
            *(tensor.split(list(lengths), 2) for tensor in (query, key, value)), strict=True
        )
    ]
    return torch.cat(parts, 2).transpose(1, 2).contiguous()


@torch.library.custom_op("libra::attend_each", mutates_args=())  # type: ignore[untyped-decorator]
def attend_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """``_attend_each`` as one operation of a graph; ``starts`` are those of ``PackedSequences``."""
    lengths = starts.diff().tolist()
    return _attend_each(query, key, value, lengths, 0.0, scaling, sliding_window)


@attend_each.register_fake  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "libra::attend_each_backward", mutates_args=()
)
def attend_each_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    scaling: float | None,
    sliding_window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; what is attended to is computed once more."""
    lengths = starts.diff().tolist()
    # Operations of a library run below autograd, which is what they are differentiated with here.
    below = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.enable_grad(), below:
        q, k, v = (one.detach().requires_grad_() for one in (query, key, value))
        output = _attend_each(q, k, v, lengths, 0.0, scaling, sliding_window)
        of_query, of_key, of_value = torch.autograd.grad(output, (q, k, v), gradient)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()


@attend_each_backward.register_fake  # type: ignore[untyped-decorator]
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(one.new_empty(one.shape) for one in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scaling, ctx.sliding_window = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = attend_each_backward(gradient, *ctx.saved_tensors, ctx.scaling, ctx.sliding_window)
    return (*found, None, None, None)


attend_each.register_autograd(_differentiate, setup_context=_keep)


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
