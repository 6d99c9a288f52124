"""What takes less memory changes no gradient."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig  # noqa: E402

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.node.model import tiled_mlp  # noqa: E402
from libra_cli.node.model.activations import checkpoint_activations  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def gradients(model: Any) -> Any:
    token_ids = torch.arange(3, 53)[None]
    logits = model(input_ids=token_ids, use_cache=False).logits
    torch.log_softmax(logits, -1)[..., 7].sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


class Copied(saved_tensors_hooks):  # type: ignore[misc]  # torch is Any here
    """In place of ``save_on_cpu``, which pins memory and so needs a GPU: a copy that is kept, and
    another that is used."""

    copies = 0

    def __init__(self, **_: Any) -> None:
        super().__init__(self.away, lambda kept: kept.clone())

    def away(self, tensor: Any) -> Any:
        Copied.copies += 1
        return tensor.clone()


@pytest.mark.parametrize("choice", ["selective", "full"])
def test_inputs_of_layers_that_come_back_from_the_host_give_the_same_gradients(
    choice: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", Copied)
    monkeypatch.setattr(Copied, "copies", 0)
    found = []
    for offload in (False, True):
        model = model_of(Qwen3Config(**SIZES))
        checkpoint_activations(model, choice, on_gpu=True, offload=offload)
        found.append(gradients(model))
        assert Copied.copies == LAYERS * offload
    torch.testing.assert_close(*found, atol=0, rtol=0)


def test_without_a_gpu_nothing_is_copied(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", Copied)
    monkeypatch.setattr(Copied, "copies", 0)
    model = model_of(Qwen3Config(**SIZES))
    checkpoint_activations(model, "full", on_gpu=False, offload=True)
    gradients(model)
    assert Copied.copies == 0


@pytest.mark.parametrize("choice", ["none", "full"])
@pytest.mark.parametrize("tile", [16, 25, 49, 50])
def test_tiles_of_a_feed_forward_part_give_the_same_gradients(
    choice: str, tile: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tiled_mlp, "TILE_TOKENS", tile)
    longest = 0

    def seen(module: Any, inputs: tuple[Any, ...]) -> None:
        nonlocal longest
        longest = max(longest, inputs[0].shape[1])

    found = []
    for tiled in (False, True):
        model = model_of(Qwen3Config(**SIZES))
        checkpoint_activations(model, choice, on_gpu=False)
        if tiled:
            tiled_mlp.tile_mlp(model)
            for layer in model.model.layers:
                layer.mlp.down_proj.register_forward_pre_hook(seen)
        found.append(gradients(model))
    assert longest == tile
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-6


def test_a_mixture_of_experts_has_nothing_to_tile():
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    with pytest.raises(TrainerError, match="no dense feed-forward part"):
        tiled_mlp.tile_mlp(model_of(config))
