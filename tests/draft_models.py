"""Tiny random policies with a peaked distribution, and heads that draft for them without training.

A head is given what it takes to be right where a policy's next token follows from the last one
alone: it hands the last token's embedding to the output layer, and its own layer adds nothing. A
random policy is so in part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer

WIDTH, INNER, HEAD = 64, 128, 32
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def _saved(model: Any, tokenizer: Any, directory: Path) -> Any:
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # peaked, so that texts repeat and drafts are often right
    model.save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=512)
    return model


def dense(directory: Path) -> Any:
    """Write a Qwen3 and return it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=tokenizer.get_vocab_size(), **SIZES)
    return _saved(Qwen3ForCausalLM(config).float().eval(), tokenizer, directory)


def mixture(directory: Path) -> Any:
    """Write a GLM 4.5 with an MTP layer, and return the model without that layer."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=tokenizer.get_vocab_size(),
        moe_intermediate_size=HEAD,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        num_nextn_predict_layers=1,
        **SIZES,
    )
    model = _saved(Glm4MoeForCausalLM(config).float().eval(), tokenizer, directory)
    save_file(_mtp_layer(directory), directory / "mtp.safetensors", metadata={"format": "pt"})
    return model


def _mtp_layer(directory: Path) -> dict[str, Tensor]:
    """The tensors of an MTP layer after the model's two, by the names that the hub has."""
    from libra_cli.node.weights.model_files import tensors_in

    last, mine = "model.layers.1.", "model.layers.2."
    tensors = {
        mine + name.removeprefix(last): tensor
        for name, tensor in tensors_in(directory, lambda name: name.startswith(last))
    }
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])  # so that the block adds nothing
    ones = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), torch.ones(WIDTH))
    tensors |= {f"{mine}{name}.weight": one.clone() for name, one in ones.items()}
    tensors[f"{mine}eh_proj.weight"] = torch.eye(WIDTH, 2 * WIDTH)
    return tensors


def eagle(directory: Path, policy: Any) -> Path:
    """Write an EAGLE head for a policy, and return its directory."""
    directory.mkdir()
    torch.manual_seed(1)
    tensors = _block("layers.0.", WIDTH)
    tensors["fc.weight"] = torch.eye(WIDTH, 2 * WIDTH)
    return _head(directory, policy, "LlamaForCausalLM", tensors)


def eagle3(directory: Path, policy: Any) -> Path:
    """Write a random EAGLE-3 head for a policy, that drafts the first 64 tokens; return its
    directory."""
    directory.mkdir()
    torch.manual_seed(1)
    layers, few, vocabulary = [0, 1, 2], 64, policy.config.vocab_size
    tensors = _block("midlayer.", 2 * WIDTH)
    tensors["midlayer.hidden_norm.weight"] = torch.ones(WIDTH)
    tensors["midlayer.input_layernorm.weight"] = torch.ones(WIDTH)
    tensors["norm.weight"] = torch.ones(WIDTH)
    tensors["fc.weight"] = 0.1 * torch.randn(WIDTH, len(layers) * WIDTH)
    tensors["lm_head.weight"] = 0.1 * torch.randn(few, WIDTH)
    tensors["d2t"] = torch.full((few,), vocabulary - few)
    tensors["t2d"] = torch.arange(vocabulary) >= vocabulary - few
    more = {
        "draft_vocab_size": few,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }
    return _head(directory, policy, "LlamaForCausalLMEagle3", tensors, **more)


def _block(prefix: str, width: int) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (2 * HEAD, width),
        "self_attn.k_proj": (HEAD, width),
        "self_attn.v_proj": (HEAD, width),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
    }
    tensors = {f"{prefix}{name}.weight": 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    tensors[f"{prefix}self_attn.o_proj.weight"] = torch.zeros(WIDTH, 2 * HEAD)
    tensors[f"{prefix}mlp.down_proj.weight"] = torch.zeros(WIDTH, INNER)
    tensors[f"{prefix}post_attention_layernorm.weight"] = torch.ones(WIDTH)
    return tensors


def _head(
    directory: Path, policy: Any, architecture: str, tensors: dict[str, Tensor], **more: Any
) -> Path:
    config = {
        **SIZES,
        "num_hidden_layers": 1,
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": policy.config.vocab_size,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "dtype": "float32",
        **more,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
