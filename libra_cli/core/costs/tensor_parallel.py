"""Among how many GPUs a server can divide a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USUAL_DEGREES = (1, 2, 4, 8, 16)
WIDTHS = {
    "intermediate_size": "its feed-forward layer is {} wide",
    "moe_intermediate_size": "an expert of it is {} wide",
    "shared_expert_intermediate_size": "what all its tokens meet beside the experts is {} wide",
}
"""Keys of a config.json that must divide evenly, and what they say."""


def refused_degree(config: Mapping[str, Any], degree: int) -> str:
    """Why vLLM cannot divide a model among so many GPUs; empty if it can.

    ``config`` is the model's ``config.json``. Attention heads and the widths of feed-forward layers
    and of experts must divide evenly; heads of keys and values must, or be copied to equally many
    GPUs each (vLLM, ``QKVParallelLinear``, ``FusedMoE``).
    """
    config = config.get("text_config") or config
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads") or heads
    if isinstance(heads, int) and heads % degree:
        return f"it has {heads} attention heads"
    if isinstance(groups, int) and groups % degree and degree % groups:
        return f"it has {groups} heads of keys and values"
    for key, told in WIDTHS.items():
        width = config.get(key)
        if isinstance(width, int) and width % degree:
            return told.format(width)
    return ""


def allowed_degrees(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The usual degrees that the model can be divided by."""
    return tuple(degree for degree in USUAL_DEGREES if not refused_degree(config, degree))
