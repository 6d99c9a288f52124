"""The feed-forward part of a layer, computed for a few tokens at a time.

Each tile of tokens is computed again when its gradient is (``torch.utils.checkpoint``), so inner
units of a layer are never there for more than one tile: of Qwen3-8B they are 96 KiB a token. The
result is the same, since tokens do not see one another there. After ALST (arXiv 2506.13996).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from libra_cli.config.errors import TrainerError

TILE_TOKENS = 4096
"""Tokens of a tile, as in ``core.costs.memory``; products of fewer rows would leave a GPU idle."""


def tile_mlp(model: nn.Module) -> None:
    """Let every feed-forward part of a transformers model be computed so.

    Raises:
        TrainerError: the model has none that is dense.
    """
    dense = [
        module.mlp
        for module in model.modules()
        if isinstance(getattr(module, "mlp", None), nn.Module) and hasattr(module.mlp, "down_proj")
    ]
    if not dense:
        raise TrainerError(
            f"{type(model).__name__} has no dense feed-forward part that could be tiled",
            hint="set training.tiled_mlp: false",
        )
    for mlp in dense:
        mlp.forward = partial(_tiled, mlp.forward)


def _tiled(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Apply ``forward`` to ``hidden [1, tokens, width]`` tile by tile."""
    tiles = hidden.split(TILE_TOKENS, 1)
    if len(tiles) == 1:
        return forward(hidden)
    if not torch.is_grad_enabled():
        return torch.cat([forward(tile) for tile in tiles], 1)
    again = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(tile) for tile in tiles], 1)
