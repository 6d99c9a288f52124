"""What vLLM's own layers hold of published tensors, at any number of ranks; without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm", reason="needs the [cpu] extra")

import torch
from torch import nn

from libra_cli.node.rollout import cpu_rotary
from libra_cli.node.rollout.held_tensors import held_parts, layers_with, own_names
from libra_cli.node.rollout.proof import Proof, prove
from libra_cli.node.weights.checksum import checksum

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
HIDDEN, HEAD, HEADS, KV_HEADS, INNER, VOCABULARY = 64, 16, 8, 2, 96, 203


class Layers(nn.Module):  # type: ignore[misc]
    """One of each kind of layer that a dense model has, as vLLM makes them."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self) -> None:
        from vllm.model_executor.layers import linear
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(VOCABULARY, HIDDEN)
        self.qkv_proj = linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, bias=True)
        self.o_proj = linear.RowParallelLinear(HEADS * HEAD, HIDDEN, bias=True)
        self.gate_up_proj = linear.MergedColumnParallelLinear(HIDDEN, [INNER] * 2, bias=False)
        self.down_proj = linear.RowParallelLinear(INNER, HIDDEN, bias=False)
        self.fc = linear.ColumnParallelLinear(HIDDEN, INNER, bias=False)
        self.router = linear.ReplicatedLinear(HIDDEN, 4, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.lm_head = ParallelLMHead(VOCABULARY, HIDDEN)


@contextmanager
def rank(number: int, ranks: int) -> Iterator[None]:
    """Have vLLM's layers believe that they are one of several ranks."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):
        for module in (linear, vocab_parallel_embedding, parameter):
            patch.setattr(module, "get_tensor_model_parallel_rank", lambda: number)
            patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
        yield


def published() -> dict[str, torch.Tensor]:
    """The tensors, under their Hugging Face names."""
    shapes = {
        "embed_tokens.weight": (VOCABULARY, HIDDEN),
        "q_proj.weight": (HEADS * HEAD, HIDDEN),
        "k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "q_proj.bias": (HEADS * HEAD,),
        "k_proj.bias": (KV_HEADS * HEAD,),
        "v_proj.bias": (KV_HEADS * HEAD,),
        "o_proj.weight": (HIDDEN, HEADS * HEAD),
        "o_proj.bias": (HIDDEN,),
        "gate_proj.weight": (INNER, HIDDEN),
        "up_proj.weight": (INNER, HIDDEN),
        "down_proj.weight": (HIDDEN, INNER),
        "fc.weight": (INNER, HIDDEN),
        "router.weight": (4, HIDDEN),
        "norm.weight": (HIDDEN,),
        "norm.bias": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def proof_of(tensors: dict[str, torch.Tensor], models: list[Layers]) -> Proof:
    manifest: dict[str, dict[str, Any]] = {
        name: {"shape": list(t.shape), "dtype": "float32", "checksum": f"{checksum(t):016x}"}
        for name, t in tensors.items()
    }
    dtypes = dict.fromkeys(tensors, "float32")
    return prove(manifest, [held_parts(model, dtypes) for model in models])


@pytest.fixture(scope="module", params=[1, 2, 4, 8])
def models(request) -> list[Layers]:
    """Of every rank, loaded by vLLM's own loader; with 4 and 8, key and value heads are shared."""
    from vllm.model_executor.models.qwen2 import Qwen2Model
    from vllm.model_executor.models.utils import AutoWeightsLoader

    made = []
    for number in range(request.param):
        with rank(number, request.param), torch.no_grad():
            model = Layers()
            named = [(f"x.{name}", tensor) for name, tensor in published().items()]
            outer = nn.Module()
            outer.x = model
            AutoWeightsLoader(outer).load_weights(named, mapper=Qwen2Model.hf_to_vllm_mapper)
            made.append(model)
    return made


def test_what_all_ranks_hold_is_what_was_published(models):
    proof = proof_of(published(), models)
    assert not proof.untraced
    assert not proof.different


def test_a_rank_that_holds_another_version_of_any_tensor_is_noticed(models):
    for name, tensor in published().items():
        other = published() | {name: tensor.clone()}
        other[name].view(-1)[-1] += 1e-6
        (said,) = proof_of(other, models).different
        assert said.startswith(f"{name} ")


def test_a_layer_is_brought_with_all_that_it_holds(models):
    names, layer = published().keys(), {f"{one}_proj" for one in "qkv"}
    wanted = {f"{one}.{kind}" for one in layer for kind in ("weight", "bias")}
    assert layers_with(models[0], names, {"q_proj.weight"}) == wanted
    assert layers_with(models[0], names, {"up_proj.weight", "o_proj.weight"}) == {
        *("gate_proj.weight", "up_proj.weight", "o_proj.weight", "o_proj.bias")
    }
    assert layers_with(models[0], names, {"experts.0.up_proj.weight"}) is None


def test_what_the_files_have_as_one_layer_is_found_in_each_of_its_parts():
    from libra_cli.node.rollout.held_tensors import Slice, _stacked

    assert _stacked(["qkv"], [(1, 8), (0, 4), (0, 4)], [16, 4, 4]) == [
        Slice("qkv", 0, (8, 16)),
        Slice("qkv", 8, (16, 20)),
        Slice("qkv", 12, (20, 24)),
    ]
    assert _stacked(["q", "k"], [(1, 8), (0, 4), (0, 4)], [16, 4, 4]) == []


def test_a_name_is_mapped_until_it_is_a_parameter_s():
    """LFM2-MoE has a mapping, and so has its inner model, which would do to it the same again."""
    from vllm.model_executor.models.lfm2_moe import Lfm2MoeForCausalLM, Lfm2MoeModel

    whole, part = nn.Module(), nn.Module()
    whole.model, part.short_conv = part, nn.Module()
    part.short_conv.conv = nn.Linear(2, 2, bias=False)
    part.short_conv.in_proj = nn.Linear(2, 2, bias=False)
    whole.hf_to_vllm_mapper = Lfm2MoeForCausalLM.hf_to_vllm_mapper
    part.hf_to_vllm_mapper = Lfm2MoeModel.hf_to_vllm_mapper
    names = ["model.conv.conv.weight", "model.conv.in_proj.weight"]
    assert own_names(whole, names) == {
        "model.short_conv.conv.weight": names[0],
        "model.short_conv.in_proj.weight": names[1],
    }


@pytest.mark.parametrize("mended", [True, False])
def test_heads_are_turned_by_the_position_of_their_token(
    mended: bool, monkeypatch: pytest.MonkeyPatch
):
    """Without the mend vLLM's kernel takes the heads of a token for tokens of their own."""
    from vllm import _custom_ops

    # Undone at the end: the mend stays in a server for as long as it lives.
    monkeypatch.setattr(_custom_ops, "rotary_embedding", _custom_ops.rotary_embedding)
    if mended:
        cpu_rotary.mend()
    torch.manual_seed(0)
    positions, heads = torch.arange(5), torch.randn(5, 3, 8)
    angles = positions[:, None] / torch.tensor([1.0, 10.0, 100.0, 1000.0])
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads.chunk(2, -1)
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
    query, key = heads.clone(), torch.cat([heads, heads], -1)[..., :8]  # of which no view can be
    cache = torch.cat([angles.cos(), angles.sin()], -1)
    _custom_ops.rotary_embedding(positions, query, key, 8, cache, True)
    same = [torch.allclose(one, turned, atol=1e-6) for one in (query, key)]
    assert same == [mended, mended]
