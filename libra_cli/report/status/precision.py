"""Which numbers servers compute with, and what gap to the trainer is usual with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from libra_cli.config.errors import StateError
from libra_cli.config.recipe import NodeSpec
from libra_cli.runtime.store.run_directory import recipe_of

USUAL_GAP: Mapping[str, float] = {
    "float32": 1e-5,
    "bfloat16": 1e-3,
    "fp8_per_channel": 5e-3,
    "int8_per_channel": 3e-3,
}
"""Mean |difference| of log-probabilities between servers and trainer, in nats: the order of what
the quickstart has on CPUs. A larger model, or one whose policy is less sure, may have a few times
as much; ten times as much is something else than rounding."""


def served_in(run_dir: Path) -> str | None:
    """Return the number format or the quantization of a run's servers, by its recipe.

    None without a readable recipe, and where servers with GPUs and without have different ones.
    """
    try:
        recipe = recipe_of(run_dir)
    except StateError:
        return None
    return recipe.rollout.quantization or _format(recipe.model.dtype, recipe.slot_nodes)


def _format(dtype: str, nodes: Sequence[NodeSpec]) -> str | None:
    if dtype != "auto":
        return dtype
    on_gpus = {node.gpus > 0 for node in nodes}
    if len(on_gpus) > 1:
        return None
    return "bfloat16" if on_gpus == {True} else "float32"
