"""Sizes of mixtures of experts: the law against transformers' own models, and what is published."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from libra_cli.config.training import LoraSpec
from libra_cli.core.costs.architecture import architecture_of, published
from libra_cli.core.costs.memory import parting, rank_memory
from libra_cli.core.costs.mixture_transformer import MixtureTransformer, expected_experts

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
    "vocab_size": 96,
    "pad_token_id": 0,
    "eos_token_id": 0,
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**TINY, "model_type": "qwen3_moe", "num_experts": 8},
    "qwen3 with dense layers": {
        **TINY,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "mlp_only_layers": [0, 3],
        "decoder_sparse_step": 2,
    },
    "qwen2": {
        **TINY,
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "shared_expert_intermediate_size": 48,
    },
    "olmoe": {**TINY, "model_type": "olmoe", "num_experts": 8, "moe_intermediate_size": None},
    "mixtral": {
        **TINY,
        "model_type": "mixtral",
        "num_local_experts": 8,
        "moe_intermediate_size": None,
    },
    "deepseek": {
        **TINY,
        **LATENT,
        "model_type": "deepseek_v3",
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "deepseek without a low rank of queries": {
        **TINY,
        **LATENT,
        "q_lora_rank": None,
        "model_type": "deepseek_v3",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    "glm": {
        **TINY,
        "model_type": "glm4_moe",
        "attention_bias": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt-oss": {
        **TINY,
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "moe_intermediate_size": None,
    },
    "Qwen3-30B-A3B": QWEN3,
    "OLMoE-1B-7B": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "vocab_size": 151552,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
    },
}
BILLIONS = {
    "Qwen3-30B-A3B": (30.5, 3.3),
    "OLMoE-1B-7B": (6.9, 1.3),
    "Mixtral-8x7B": (46.7, 12.9),
    "gpt-oss-120b": (116.8, 5.1),
    "GLM-4.5-Air": (107, 12),
    "DeepSeek-V3": (671, 37),
}
"""In all, and met by a token, as their publishers round them."""
INSIDE = {"GLM-4.5-Air": 2, "gpt-oss-120b": 1}
"""Of embedding and output layer, how many these count as met by no token."""


def mixture(name: str) -> MixtureTransformer:
    shape = architecture_of(CONFIGS[name], name)
    assert isinstance(shape, MixtureTransformer)
    return shape


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model_that_transformers_makes(name: str) -> None:
    given = {key: value for key, value in CONFIGS[name].items() if value is not None}
    given |= {key: None for key, value in CONFIGS[name].items() if key in LATENT and value is None}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given))
    counted = sum(
        parameter.numel() for name, parameter in model.named_parameters() if "norm" not in name
    )
    assert mixture(name).parameters == counted


@pytest.mark.parametrize("name", BILLIONS)
def test_a_published_model_has_the_parameters_that_are_published(name: str) -> None:
    shape, (every, active) = mixture(name), BILLIONS[name]
    met = shape.active_parameters - INSIDE.get(name, 0) * shape.vocabulary * shape.hidden
    assert shape.parameters / 1e9 == pytest.approx(every, abs=0.06 if every % 1 else 0.5)
    assert met / 1e9 == pytest.approx(active, abs=0.06 if active % 1 else 0.65)


def test_what_is_published_under_a_name_is_known_without_a_file() -> None:
    assert published("Qwen3-30B-A3B") == mixture("Qwen3-30B-A3B")
    assert published("Qwen3-8B") is not None
    assert published("Qwen3-30B-B3A") is None


@pytest.mark.parametrize(("tokens", "chosen"), [(1, 8), (4, 8), (32, 8), (8, 2)])
def test_as_many_experts_are_expected_as_uniform_routers_choose(tokens: int, chosen: int) -> None:
    random = np.random.default_rng(0)
    drawn = random.random((400, tokens, 128)).argpartition(chosen, axis=-1)[..., :chosen]
    met = np.mean([len(np.unique(step)) for step in drawn])
    assert expected_experts(128, chosen, tokens) == pytest.approx(met, rel=0.02)


def test_a_step_reads_no_more_than_all_weights_and_no_less_than_those_of_one_token() -> None:
    shape = mixture("Qwen3-30B-A3B")
    embedding = shape.vocabulary * shape.hidden
    assert shape.read_bytes(1) == pytest.approx(2 * (shape.active_parameters - embedding))
    assert shape.read_bytes(1e6) == pytest.approx(2 * (shape.parameters - embedding))
    assert shape.read_bytes(16) < shape.read_bytes(17)


def test_a_token_leaves_keys_and_values_or_what_both_are_made_of() -> None:
    assert mixture("Qwen3-30B-A3B").kv_bytes() == 2 * 2 * 48 * 4 * 128
    assert mixture("DeepSeek-V3").kv_bytes() == 2 * 61 * (512 + 64)


def test_states_are_of_all_experts_and_activations_of_those_chosen() -> None:
    shape = mixture("Qwen3-30B-A3B")
    use = rank_memory(shape, world=48, tokens=16384, choice="full")
    for state in ("weights", "gradients"):
        assert use.parts[state] == pytest.approx(4 * shape.parameters / 48)
    assert use.parts["moments"] == pytest.approx(8 * shape.parameters / 48)
    more = architecture_of({**QWEN3, "num_experts_per_tok": 16}, "more")
    assert more.layer_bytes() > 1.5 * shape.layer_bytes()
    wider = architecture_of({**QWEN3, "num_experts": 256}, "wider")
    assert wider.layer_bytes() == pytest.approx(shape.layer_bytes(), rel=0.02)


def test_the_largest_tensor_has_the_first_matrices_of_all_experts_of_a_layer() -> None:
    shape = mixture("Qwen3-30B-A3B")
    assert shape.largest_parameter == 128 * 2 * 768 * 2048
    offloads = rank_memory(shape, world=8, tokens=16, choice="full", optimizer="adamw_offload")
    assert offloads.parts.get("update", 0.0) in (0.0, 12.0 * shape.largest_parameter / 8)


def test_an_adapter_on_all_linear_layers_has_none_on_experts() -> None:
    shape = mixture("qwen3")
    adapted = shape.with_adapter(LoraSpec(rank=4))
    assert adapted.trained == 4 * 4 * ((64 + 64) + 2 * (64 + 32) + (64 + 64))
    with_shared = mixture("glm").with_adapter(LoraSpec(rank=4))
    assert with_shared.trained == 4 * (4 * 448 + 3 * 3 * (64 + 32) + 3 * (64 + 128))
    of_experts = shape.with_adapter(LoraSpec(rank=8, experts=True))
    sparse = shape.layers - shape.dense_layers
    assert of_experts.trained == 2 * adapted.trained + sparse * shape.experts * 8 * 3 * (
        shape.hidden + shape.expert_inner
    )


def test_ranks_that_part_experts_hold_the_same_states_and_gather_less() -> None:
    shape = mixture("Qwen3-30B-A3B")
    alone, parted = (
        rank_memory(shape, world=8, tokens=65536, choice="full", ep_size=size).parts
        for size in (1, 8)
    )
    for state in ("weights", "gradients", "moments"):
        assert alone[state] == parted[state]
    experts = 128 * shape.expert_parameters
    assert alone["gathered weights"] - parted["gathered weights"] == 2 * 2 * experts * 7 / 8
    assert alone["buffers"] - parted["buffers"] == (2 + 4) * experts * 7 / 8
    more = parted["activations"] - alone["activations"]
    assert more == 65536 * 2 * 2 * shape.chosen * shape.hidden
    step = rank_memory(shape, world=8, tokens=16, choice="full", ep_size=8).parts
    assert step.get("update", 0.0) <= 8.0 * shape.largest_parameter / 8


@pytest.mark.parametrize(
    ("wanted", "shards", "experts", "found"),
    [
        (8, 8, 128, 8),
        (8, 4, 128, 4),
        (8, 12, 128, 1),
        (4, 2, None, 2),
        (8, 8, 0, 1),
        (1, 8, 128, 1),
        (2, 16, 8, 1),
    ],
)
def test_as_many_part_experts_as_divide_both(
    wanted: int, shards: int, experts: int | None, found: int
) -> None:
    assert parting(wanted, shards, experts) == found


def test_a_token_in_a_layer_keeps_what_autograd_saves() -> None:
    few, many = (_saved_bytes(layers) for layers in (2, 3))
    assert architecture_of(SAVED, "m").layer_bytes() == pytest.approx(many - few, rel=0.06)


SAVED = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
    "intermediate_size": 512,
    "vocab_size": 96,
}


def _saved_bytes(layers: int, tokens: int = 128) -> float:
    """Bytes a token that autograd keeps of a model with so many layers."""
    config = AutoConfig.for_model(**{**SAVED, "num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(torch.zeros(1, tokens, dtype=torch.int64))
    return float(sum(storage.nbytes() for storage in held.values())) / tokens
