"""Models that cannot be trained, by their ``config.json``: told before anything starts.

``python -m tests.research.families`` takes a small model of each family from the trainer over a
published version to a server; ``libra help models`` has its table. What no CPU kernel of vLLM
serves (latent attention) is refused by reading: its kernels use matrices that no checksum sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra_cli.config.vision import SEEING

_DERIVED = "vLLM computes with {} that it derives from the files, and a version could not be proved"
_UNPROVED = {
    "deepseek_v2": _DERIVED.format("matrices of its latent attention"),
    "deepseek_v3": _DERIVED.format("matrices of its latent attention"),
    "deepseek_v32": _DERIVED.format("matrices of its latent attention"),
    "falcon_h1": _DERIVED.format("decay rates of its Mamba layers"),
    "glm4_moe_lite": _DERIVED.format("matrices of its latent attention"),
    "gpt_oss": "vLLM turns its experts and sinks, and a version could not be proved",
    "granitemoehybrid": _DERIVED.format("decay rates of its Mamba layers"),
    "nemotron_h": _DERIVED.format("decay rates of its Mamba layers"),
}
"""Why servers cannot prove which version they hold, by ``model_type``."""
_DENSE = "a dense model, or a mixture such as Qwen3-MoE, GLM 4.5, OLMoE or Mixtral"


@dataclass(frozen=True, slots=True)
class RefusedFamily:
    """Why a model cannot be trained, and what can be."""

    why: str
    instead: str


def refused_family(config: Mapping[str, Any], *, images: bool = False) -> RefusedFamily | None:
    """Why a model with this config.json is refused; None if it is not. ``images`` tells whether it
    is shown some."""
    sees = config.get("model_type") in SEEING
    if images and not sees:
        named = ", ".join(SEEING.values())
        return RefusedFamily(
            f"model.images is true, and {config.get('model_type')} is no family whose images are "
            "known",
            f"model.path: a model of {named}, or model: {{images: false}}",
        )
    if sees and not images:
        return RefusedFamily(
            f"{config.get('model_type')} is trained with its vision tower", "model: {images: true}"
        )
    inner = config.get("text_config") or {}
    method = _method(config) or _method(inner)
    if method:
        return RefusedFamily(
            f"its weights are quantised ({method}), and gradients need numbers that are not",
            "model.path: the directory of the same model in bfloat16 (libra help models)",
        )
    kind = str(inner.get("model_type") or config.get("model_type") or "")
    why = _UNPROVED.get(kind, "")
    if kind == "granitemoehybrid" and "mamba" not in (config.get("layer_types") or ()):
        why = ""
    return RefusedFamily(f"{kind}: {why}", f"model.path: {_DENSE}") if why else None


def _method(config: Mapping[str, Any]) -> str:
    quantised = config.get("quantization_config")
    return str(quantised.get("quant_method", "?")) if isinstance(quantised, Mapping) else ""
