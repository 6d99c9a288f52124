"""What a tenant's requests come to is what plain torch computes, whoever else is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from libra_cli.config.errors import TrainerError
from libra_cli.config.training import LoraSpec
from libra_cli.node.tenants.losses import LOSSES
from libra_cli.node.tenants.main import _read as read
from libra_cli.node.tenants.tenants import Tenants

SPEC = LoraSpec(rank=4, target_modules=("q_proj", "v_proj", "down_proj"))
ADAM = {
    "learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip
RNG = np.random.default_rng(0)


def tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 40}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


def tenants(*names: str, pass_tokens: int = 64) -> Tenants:
    made = Tenants(tiny(), dtype=torch.float32, pass_tokens=pass_tokens)
    for seed, name in enumerate(names):
        made.create(name, SPEC, seed=seed)
        moved(made, name, seed)
    return made


def moved(made: Tenants, name: str, seed: int) -> None:
    """Give the adapter factors that are not zero, so that it changes what the model says."""
    noise = torch.Generator().manual_seed(seed)
    for parameter in made._tenants[name].parameters.values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)


def test_a_model_that_caps_its_attention_is_read_with_code_that_does(tmp_path: Path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 40, "head_dim": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    for model, attention in (
        (Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)), "eager"),
        (tiny(), "sdpa"),
    ):
        model.save_pretrained(tmp_path)
        made = read({"model_dir": str(tmp_path), "dtype": "float32", "pass_tokens": 64})
        assert made._model.config._attn_implementation == attention


def datum(length: int) -> dict[str, Any]:
    floats = {
        "weights": RNG.random(length),
        "logprobs": -3.5 + 0.3 * RNG.random(length),
        "advantages": RNG.normal(size=length),
    }
    inputs = {name: ("float32", one.astype("f4").tobytes()) for name, one in floats.items()}
    inputs["target_tokens"] = ("int64", RNG.integers(0, 40, length).tobytes())
    return {"tokens": RNG.integers(0, 40, length).astype("i4").tobytes(), "inputs": inputs}


def published(loss: str, p: torch.Tensor, told: dict[str, Any]) -> torch.Tensor:
    """The loss of one sequence, by the formulas of Tinker's documentation."""
    give = {
        k: torch.from_numpy(np.frombuffer(v, "f4").copy())
        for k, (t, v) in told.items()
        if t == "float32"
    }
    adv, ratio = give["advantages"], torch.exp(p - give["logprobs"])
    if loss == "cross_entropy":
        return (-p * give["weights"]).sum()
    if loss == "importance_sampling":
        return -(ratio * adv).sum()
    if loss == "ppo":
        return -torch.min(ratio * adv, torch.clamp(ratio, 0.8, 1.2) * adv).sum()
    if loss == "cispo":
        return -(torch.clamp(ratio, 0.8, 1.2).detach() * p * adv).sum()
    return -(p * adv - 0.5 * 0.05 * (p - give["logprobs"]) ** 2).sum()


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_those_of_plain_torch(loss: str) -> None:
    data = [datum(length) for length in (5, 9, 3)]
    made = tenants("a")
    found, total = made.forward_backward("a", data, loss, settings={}, backward=True)
    parameters = list(made._tenants["a"].parameters.values())
    gradients = [one.grad.clone() for one in parameters if one.grad is not None]
    expected = torch.zeros(())
    for told, given in zip(data, found, strict=True):
        tokens = torch.from_numpy(np.frombuffer(told["tokens"], "i4").astype("i8"))
        targets = torch.from_numpy(np.frombuffer(told["inputs"]["target_tokens"][1], "i8").copy())
        logits = made._model(input_ids=tokens[None]).logits[0]
        p = torch.log_softmax(logits, -1)[torch.arange(len(targets)), targets]
        torch.testing.assert_close(given, p.detach(), atol=1e-5, rtol=0)
        expected = expected + published(loss, p, told["inputs"])
    assert total == pytest.approx(float(expected.detach()), abs=1e-4)
    wanted = torch.autograd.grad(expected, parameters)
    assert len(gradients) == len(wanted)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def trained(
    made: Tenants, names: tuple[str, ...], batches: dict[str, list[Any]]
) -> dict[str, bytes]:
    for number in range(3):
        for name in names:
            made.forward_backward(name, batches[name][number], "ppo", settings={}, backward=True)
        for name in names:
            made.step(name, ADAM)
    return {name: made.save(name, optimizer=True) for name in names}


def test_tenants_that_take_turns_are_trained_as_each_alone() -> None:
    batches = {name: [[datum(4), datum(7)] for _ in range(3)] for name in "ab"}
    both = trained(tenants("a", "b"), ("a", "b"), batches)
    first = trained(tenants("a", "b"), ("a",), batches)
    second = trained(tenants("a", "b"), ("b",), batches)
    assert both == {**first, **second}
    assert first["a"] != second["b"]


def test_a_saved_state_goes_on_as_the_one_that_was_never_saved() -> None:
    made, batch = tenants("a", "b"), [datum(6)]
    made.forward_backward("a", batch, "cross_entropy", settings={}, backward=True)
    made.step("a", ADAM)
    made.load("b", made.save("a", optimizer=True), optimizer=True)
    for name in "ab":
        made.forward_backward(name, batch, "cross_entropy", settings={}, backward=True)
        made.step(name, ADAM)
    assert made.save("a", optimizer=True) == made.save("b", optimizer=True)


def test_a_state_of_more_matrices_is_refused_and_changes_nothing() -> None:
    made = tenants("a")
    made.create("b", LoraSpec(rank=4, target_modules=("q_proj", "v_proj")), seed=5)
    before = made.save("b", optimizer=True)
    with pytest.raises(TrainerError, match=r"down_proj.* which this adapter has not"):
        made.load("b", made.save("a", optimizer=True), optimizer=True)
    assert made.save("b", optimizer=True) == before


def test_passes_that_fail_half_way_add_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [datum(6) for _ in range(5)]
    made = tenants("a", pass_tokens=6)
    whole, passes = made._logprobs, 0

    def play(count: int) -> None:
        made.forward_backward("a", batch[:count], "ppo", settings={}, backward=True)

    def failing(data: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise torch.OutOfMemoryError("out of memory")
        return whole(data)

    parameters = made._tenants["a"].parameters.values()
    monkeypatch.setattr(made, "_logprobs", failing)
    with pytest.raises(torch.OutOfMemoryError):
        play(5)
    assert all(one.grad is None for one in parameters)
    passes = -100  # so that none fails
    play(2)
    before = [one.grad.clone() for one in parameters if one.grad is not None]
    passes = 0
    with pytest.raises(torch.OutOfMemoryError):
        play(5)
    after = [one.grad for one in parameters if one.grad is not None]
    assert len(before) == len(after) == len(parameters)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_takes_no_step_and_is_gone(limit: float) -> None:
    made = tenants("a")
    parameters = made._tenants["a"].parameters.values()
    before = made.save("a", optimizer=True)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float("inf"))
    with pytest.raises(TrainerError, match=r"not finite.*no step was taken"):
        made.step("a", {**ADAM, "grad_clip_norm": limit})
    assert made.save("a", optimizer=True) == before
    assert all(parameter.grad is None for parameter in parameters)


def test_a_forward_pass_leaves_no_gradient_and_an_unloaded_adapter_nothing() -> None:
    made = tenants("a")
    made.forward_backward("a", [datum(3)], "cross_entropy", settings={}, backward=False)
    assert all(one.grad is None for one in made._tenants["a"].parameters.values())
    made.unload("a")
    assert not [name for name, _ in made._model.named_parameters() if "tenant" in name]
    with pytest.raises(TrainerError, match="no model a"):
        made.step("a", ADAM)


@pytest.mark.parametrize(
    ("loss", "left_out", "words"),
    [("gspo", "weights", "no loss is called"), ("ppo", "advantages", "no advantages")],
)
def test_what_cannot_be_trained_is_refused_in_words(loss: str, left_out: str, words: str) -> None:
    told = datum(3)
    del told["inputs"][left_out]
    with pytest.raises(TrainerError, match=words):
        tenants("a").forward_backward("a", [told], loss, settings={}, backward=True)


@pytest.mark.parametrize("saved", [b"", b"half of a file", bytes(8)])
def test_a_file_that_is_no_adapter_is_refused_in_words(saved: bytes) -> None:
    made = tenants("a")
    before = made.save("a", optimizer=True)
    with pytest.raises(TrainerError, match="what was saved cannot be read"):
        made.load("a", saved, optimizer=True)
    assert made.save("a", optimizer=True) == before


@pytest.mark.parametrize("token", [-100, 40])
@pytest.mark.parametrize("name", ["tokens", "target_tokens"])
def test_a_token_that_the_model_does_not_have_is_refused_in_words(name: str, token: int) -> None:
    """On a GPU an index out of bounds ends all work of the process, whoever it is for."""
    told = datum(3)
    if name == "tokens":
        told["tokens"] = np.array([1, token, 2], "i4").tobytes()
    else:
        told["inputs"][name] = ("int64", np.array([1, token, 2], "i8").tobytes())
    words = f"token {token} is none of the model's 40"
    with pytest.raises(TrainerError, match=words):
        tenants("a").forward_backward("a", [told], "cross_entropy", settings={}, backward=True)
