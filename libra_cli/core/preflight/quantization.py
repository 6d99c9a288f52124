"""What cannot be served with ``rollout.quantization``: models by config.json, GPUs by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from libra_cli.config.rollout import Quantization
from libra_cli.core.costs.mixtures import experts_of
from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.findings import ALL, Finding, Remedy

CHECK = "quantization"
_BEFORE_ADA = re.compile(
    r"\b(A100|A800|A40|A30|A10G?|A16|A2|V100S?|T4|P100|P40|P4"
    r"|RTX A\d{4}|RTX [23]0\d\d|GTX|TITAN|Quadro)\b"
)
"""Names of NVIDIA GPUs below compute capability 8.9 (developer.nvidia.com/cuda-gpus): vLLM has a
kernel in FP8 for them, which keeps weights in an order that cannot be read back."""
_OUTSIDE_TURING_TO_HOPPER = re.compile(
    r"\b(G?B[123]00|RTX 50\d\d|RTX PRO \d+|V100S?|P100|P40|P4|GTX 10\d\d)\b"
)
"""Names of NVIDIA GPUs below compute capability 7.5 or from 10.0 on, for which vLLM's CUTLASS
kernel in int8 is not built."""
_COMPUTED_IN: Mapping[Quantization, tuple[str, re.Pattern[str]]] = {
    "fp8_per_channel": ("FP8", _BEFORE_ADA),
    "int8_per_channel": ("INT8", _OUTSIDE_TURING_TO_HOPPER),
}
"""What a GPU must compute in, and the names of those that do not."""


def refused_quantization(config: Mapping[str, Any]) -> str:
    """Return why servers cannot hold a model with this config.json quantized; empty if they can."""
    if experts_of(config):
        return "how vLLM holds quantized experts was not tried, and a version could not be proved"
    inner = config.get("text_config") or config
    if {"linear_attention", "conv"} & {*(inner.get("layer_types") or ())}:
        return "linear attention and convolutions were not tried with quantized weights"
    return ""


def quantization(case: PreflightCase) -> Iterator[Finding]:
    """Check that servers can hold their weights as the recipe wants them, and prove it."""
    wanted = case.recipe.rollout.quantization
    if wanted is None:
        return
    config = case.model.config if case.model is not None else {}
    if reason := refused_quantization(config):
        yield _refused(ALL, f"rollout.quantization is not for this model: {reason}")
        return
    computed_in, without = _COMPUTED_IN[wanted]
    for node, facts in case.of_half("rollout"):
        old = sorted({gpu.name for gpu in facts.gpus[: node.gpus] if without.search(gpu.name)})
        if old:
            yield _refused(node.name, f"{', '.join(old)} cannot compute in {computed_in}")
        else:
            yield Finding(CHECK, node.name, "fine", f"serves {wanted}")


def _refused(where: str, what: str) -> Finding:
    return Finding(
        CHECK,
        where,
        "stops",
        what,
        "servers would be refused at the first version that they load",
        Remedy("recipe", "rollout: {quantization: null}"),
    )
