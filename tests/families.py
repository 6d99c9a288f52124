"""Tiny random models of current families, in directories with the names that the hub's files have.

The names are written here by hand and not by transformers' ``save_pretrained``, which would undo
its own conversions and so agree with itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

Named: TypeAlias = Iterator[tuple[str, Tensor]]
Rule: TypeAlias = Callable[[str, Tensor], Named]
"""What of the files a tensor in memory is."""

VOCABULARY, WIDTH, LAYERS = 256, 128, 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def same(name: str, tensor: Tensor) -> Named:
    """The name in memory is the hub's."""
    yield name, tensor


def behind(prefix: str, head: str = "lm_head") -> Rule:
    """The language model is a part: ``model.layers`` is ``PREFIX.layers``."""

    def rule(name: str, tensor: Tensor) -> Named:
        if name.startswith("lm_head"):
            yield name.replace("lm_head", head, 1), tensor
        else:
            yield name.replace("model", prefix, 1), tensor

    return rule


def split(
    gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", mlp: str = "mlp"
) -> Rule:
    """Experts are matrices of their own: ``experts.0.gate_proj.weight``."""

    def rule(name: str, tensor: Tensor) -> Named:
        fused = re.fullmatch(r"(.*\.)\w+(\.experts\.)(gate_up_proj|down_proj)", name)
        if fused is None:
            yield re.sub(r"(layers\.\d+\.)mlp\.", rf"\1{mlp}.", name), tensor
            return
        before = f"{fused[1]}{mlp}{fused[2]}"
        for number, expert in enumerate(tensor):
            if fused[3] == "down_proj":
                yield f"{before}{number}.{down}.weight", expert
            else:
                first, second = expert.chunk(2)
                yield f"{before}{number}.{gate}.weight", first
                yield f"{before}{number}.{up}.weight", second

    return rule


def renamed(**parts: str) -> Rule:
    """A part of the name is another; ``_`` stands for a dot."""

    def rule(name: str, tensor: Tensor) -> Named:
        for old, new in parts.items():
            name = name.replace(old.replace("__", "."), new.replace("__", "."))
        yield name, tensor

    return rule


def then(first: Rule, second: Rule) -> Rule:
    def rule(name: str, tensor: Tensor) -> Named:
        for one, part in first(name, tensor):
            yield from second(one, part)

    return rule


@dataclass(frozen=True)
class Family:
    """A family: what its config.json says, and what its tensors are called on the hub."""

    name: str
    architecture: str
    model_type: str
    """Of the language model."""
    config: dict[str, Any] = field(default_factory=dict)
    rule: Rule = same
    whole: str = ""
    """The model type of the model that the language model is a part of."""
    beside: dict[str, Any] = field(default_factory=dict)
    """The configurations of its other parts, where the whole has none of its own."""
    example: str = ""
    """One name that the hub's files have."""
    dtype: str = "float32"
    """What it is served in: some of vLLM's CPU kernels have bfloat16 alone."""
    extra: tuple[str, ...] = ()
    """Names of tensors of other parts, which the language model lacks."""

    def text_config(self) -> Any:
        given = {key: value for key, value in (COMMON | self.config).items() if value is not ...}
        return AutoConfig.for_model(self.model_type, **given)

    def write(self, directory: Path, *, seed: int = 0, std: float = 0.08) -> dict[str, Tensor]:
        """Make the directory; return the tensors in memory by name."""
        torch.manual_seed(seed)
        config = self.text_config()
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, one in model.named_parameters():
                if one.ndim > 1:
                    one.normal_(0, std)
                elif "norm" in name or "bias" in name:
                    one.add_(torch.randn_like(one) * 0.05)
        held = model.state_dict()
        first = {id(one): name for name, one in reversed(model.state_dict(keep_vars=True).items())}
        once = {first[id(one)] for one in model.state_dict(keep_vars=True).values()}
        files = {
            name: part.clone().contiguous()
            for memory, tensor in held.items()
            if memory in once
            for name, part in self.rule(memory, tensor)
        }
        files |= {name: torch.full((3,), 0.5) for name in self.extra}
        directory.mkdir(parents=True, exist_ok=True)
        half = len(files) // 2
        parts = [dict(list(files.items())[:half]), dict(list(files.items())[half:])]
        index: dict[str, str] = {}
        for number, part in enumerate(parts, 1):
            name = f"model-{number:05d}-of-00002.safetensors"
            save_file(part, directory / name, metadata={"format": "pt"})
            index |= dict.fromkeys(part, name)
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )
        (directory / "config.json").write_text(json.dumps(self.written(config)))
        return {name: held[name].clone() for name in once}

    def written(self, config: Any) -> dict[str, Any]:
        """What config.json has."""
        told: dict[str, Any] = config.to_dict()
        told |= {"architectures": [self.architecture], "dtype": "float32"}
        if self.whole:
            beside = {"text_config": config, **self.beside}
            whole = AutoConfig.for_model(self.whole, **beside).to_dict()
            told = whole | {"architectures": [self.architecture], "dtype": "float32"}
            told["tie_word_embeddings"] = config.tie_word_embeddings
        return told


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
}
_MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_GRANITE = {
    "head_dim": ...,
    "attention_multiplier": 0.05,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
    "position_embedding_type": "rope",
}
_ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}

FAMILIES = (
    Family("Qwen2.5", "Qwen2ForCausalLM", "qwen2"),
    Family("Qwen3", "Qwen3ForCausalLM", "qwen3"),
    Family("Qwen3, tied", "Qwen3ForCausalLM", "qwen3", {"tie_word_embeddings": True}),
    Family(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        MOE,
        split(),
        example="model.layers.1.mlp.experts.7.gate_proj.weight",
    ),
    Family(
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        "qwen3_next",
        MOE | _HYBRID | {"shared_expert_intermediate_size": 32},
        split(),
        example="model.layers.0.mlp.experts.0.up_proj.weight",
        dtype="bfloat16",
    ),
    Family(
        "Qwen3.5",
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5_text",
        _HYBRID,
        behind("model.language_model"),
        whole="qwen3_5",
        dtype="bfloat16",
        example="model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
        extra=("model.visual.patch_embed.proj.bias", "mtp.norm.weight"),
    ),
    Family(
        "Qwen3.5-MoE",
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe_text",
        MOE | _HYBRID | {"shared_expert_intermediate_size": 32},
        behind("model.language_model"),
        whole="qwen3_5_moe",
        dtype="bfloat16",
        example="model.language_model.layers.0.mlp.experts.gate_up_proj",
        extra=("mtp.norm.weight",),
    ),
    Family("Llama 3", "LlamaForCausalLM", "llama"),
    Family("Mistral", "MistralForCausalLM", "mistral"),
    Family(
        "Ministral 3",
        "Mistral3ForConditionalGeneration",
        "ministral3",
        {},
        behind("language_model.model", "language_model.lm_head"),
        whole="mistral3",
        example="language_model.model.layers.0.self_attn.q_proj.weight",
        extra=("vision_tower.ln_pre.weight",),
    ),
    Family(
        "Mixtral",
        "MixtralForCausalLM",
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        split("w1", "w3", "w2", "block_sparse_moe"),
        example="model.layers.0.block_sparse_moe.experts.3.w1.weight",
    ),
    Family(
        "Gemma 3 1B",
        "Gemma3ForCausalLM",
        "gemma3_text",
        _ALTERNATE | {"tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    ),
    Family(
        "Gemma 3",
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        _ALTERNATE | {"tie_word_embeddings": True, "query_pre_attn_scalar": 32},
        behind("language_model.model"),
        whole="gemma3",
        example="language_model.model.layers.0.self_attn.q_norm.weight",
        extra=("vision_tower.vision_model.post_layernorm.weight",),
    ),
    Family(
        "Gemma 4",
        "Gemma4ForConditionalGeneration",
        "gemma4_text",
        _ALTERNATE
        | {
            "tie_word_embeddings": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 256,
        },
        behind("model.language_model"),
        whole="gemma4",
        beside={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "head_dim": 32,
            }
        },
        example="model.language_model.layers.0.self_attn.q_norm.weight",
    ),
    Family(
        "GLM 4.5",
        "Glm4MoeForCausalLM",
        "glm4_moe",
        _DEEPSEEK | {"use_qk_norm": True, "partial_rotary_factor": 0.5},
        split(),
        example="model.layers.1.mlp.experts.5.down_proj.weight",
        extra=("model.layers.2.eh_proj.weight",),
    ),
    Family("GLM 4", "Glm4ForCausalLM", "glm4"),
    Family(
        "gpt-oss, bf16",
        "GptOssForCausalLM",
        "gpt_oss",
        _ALTERNATE | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
        example="model.layers.0.mlp.experts.gate_up_proj",
    ),
    Family("OLMo 3", "Olmo3ForCausalLM", "olmo3", _ALTERNATE),
    Family(
        "OLMoE",
        "OlmoeForCausalLM",
        "olmoe",
        {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": ...},
        split(),
        example="model.layers.1.mlp.experts.7.up_proj.weight",
    ),
    Family(
        "LFM2",
        "Lfm2ForCausalLM",
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "conv_dim": WIDTH,
            "block_dim": WIDTH,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": False,
            "head_dim": ...,
        },
        example="model.layers.0.conv.in_proj.weight",
    ),
    Family(
        "LFM2-MoE",
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        MOE
        | {
            "layer_types": ["conv", "full_attention"],
            "head_dim": ...,
            "num_dense_layers": 1,
            "tie_word_embeddings": True,
        },
        split("w1", "w3", "w2", "feed_forward"),
        example="model.layers.1.feed_forward.experts.7.w3.weight",
    ),
    Family(
        "Granite 4, dense",
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        _GRANITE
        | {
            "layer_types": ["attention", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
        },
    ),
    Family("Granite 3", "GraniteForCausalLM", "granite", _GRANITE),
    Family("SmolLM3", "SmolLM3ForCausalLM", "smollm3", {"head_dim": ...}),
    Family(
        "Phi 4",
        "Phi3ForCausalLM",
        "phi3",
        {"head_dim": ...},
        example="model.layers.0.self_attn.qkv_proj.weight",
    ),
    Family(
        "Nemotron-H",
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
        behind("backbone"),
        example="backbone.layers.0.mixer.A_log",
    ),
    Family(
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        _DEEPSEEK | _MLA,
        split(),
        example="model.layers.1.mlp.experts.5.down_proj.weight",
        extra=("model.layers.2.eh_proj.weight",),
    ),
    Family("Seed-OSS", "SeedOssForCausalLM", "seed_oss"),
    Family("EXAONE 4", "Exaone4ForCausalLM", "exaone4", _ALTERNATE),
    Family("ERNIE 4.5", "Ernie4_5ForCausalLM", "ernie4_5"),
    Family(
        "Command A", "Cohere2ForCausalLM", "cohere2", _ALTERNATE | {"tie_word_embeddings": True}
    ),
    Family("Hunyuan", "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
)


def named_family(name: str) -> Family:
    """Return the family of this name."""
    return next(family for family in FAMILIES if family.name == name)
