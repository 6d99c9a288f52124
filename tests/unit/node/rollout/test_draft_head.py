"""What vLLM's modules call a head's tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="needs torch")

from libra_cli.node.rollout.draft_head import eagle_name, mtp_name

GLM = SimpleNamespace(num_hidden_layers=46)


@pytest.mark.parametrize(
    ("file", "held"),
    [
        ("midlayer.self_attn.q_proj.weight", "model.midlayer.self_attn.q_proj.weight"),
        ("fc.weight", "model.fc.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("d2t", "d2t"),
        ("t2d", ""),
    ],
)
def test_tensors_of_an_eagle_head_are_behind_a_prefix(file: str, held: str):
    assert eagle_name(file, None) == held


@pytest.mark.parametrize(
    ("file", "held"),
    [
        ("model.layers.45.self_attn.q_proj.weight", ""),
        ("model.norm.weight", ""),
        ("model.layers.46.enorm.weight", "model.layers.46.enorm.weight"),
        ("model.layers.46.shared_head.norm.weight", "model.layers.46.shared_head.norm.weight"),
        ("model.layers.46.shared_head.head.weight", ""),
        ("model.layers.46.embed_tokens.weight", ""),
        ("model.layers.46.mlp.gate.weight", "model.layers.46.mtp_block.mlp.gate.weight"),
        ("mtp.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_tensors_of_mtp_layers_are_those_behind_the_model_s(file: str, held: str):
    assert mtp_name(file, GLM) == held
