"""Which families are refused by their config.json, and which are not."""

from __future__ import annotations

from typing import Any

import pytest

from libra_cli.core.preflight.families import refused_family


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "qwen3_moe"}, ""),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, ""),
        ({"model_type": "deepseek_v3"}, "latent attention"),
        ({"model_type": "nemotron_h"}, "Mamba"),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"]}, ""),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, "Mamba"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
            "quantised (fp8)",
        ),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4"),
    ],
)
def test_a_family_is_refused_with_what_to_do_next(config: dict[str, Any], why: str):
    refused = refused_family(config)
    assert (refused is not None) == bool(why)
    if refused is not None:
        assert why in refused.why
        assert refused.instead.startswith("model.path:")


def test_a_family_that_sees_is_shown_images_and_no_other_is():
    seeing = {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}}
    assert refused_family(seeing, images=True) is None
    blind = refused_family(seeing)
    assert blind is not None
    assert blind.instead == "model: {images: true}"
    text = refused_family({"model_type": "qwen3"}, images=True)
    assert text is not None
    assert "qwen3 is no family whose images are known" in text.why
    assert text.instead.startswith("model.path: a model of Qwen3-VL")
