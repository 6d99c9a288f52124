"""A model that scores packed sequences gives what it gives for each of them alone, whole logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    MistralConfig,
    Qwen3Config,
)

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.node.batch.samples import TokenSample  # noqa: E402
from libra_cli.node.model.batching import collate  # noqa: E402
from libra_cli.node.model.logprobs import token_logprobs  # noqa: E402
from libra_cli.node.model.packed_attention import attention_of, packed_attention  # noqa: E402
from libra_cli.node.model.scoring import ScoringModel, one_sequence  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 128,
}


def sequences(*lengths: int) -> list[TokenSample]:
    rng = np.random.default_rng(3)
    made = []
    for member, length in enumerate(lengths):
        mask = (rng.random(length) < 0.6).astype(np.int8)
        mask[0], mask[-1] = 0, 1
        token_ids = rng.integers(3, 61, length).astype(np.int32)
        logprobs: NDArray[np.float32] = np.zeros(length, dtype=np.float32)
        made.append(TokenSample(0, member, token_ids, logprobs, mask, 0.0, False))
    return made


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # a fresh model is nearly uniform
    return model


def alone(model: Any, batch: list[TokenSample]) -> tuple[Any, Any, Any, Any]:
    """Log-probabilities, entropies, which tokens are the likeliest, and the gradient: one sequence
    at a time, with whole logits."""
    logprobs, entropies, greedy = [], [], []
    for sample in batch:
        token_ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0]
        (places,) = np.nonzero(sample.loss_mask)
        found = token_logprobs(logits[places - 1], token_ids[places], temperature=0.8)
        logprobs.append(found[0])
        entropies.append(found[1])
        greedy.append(found[2])
    got = torch.cat(logprobs)
    return got, torch.cat(entropies), torch.cat(greedy), gradient(model, got)


def gradient(model: Any, logprobs: Any) -> Any:
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Qwen3Config(**SIZES, tie_word_embeddings=False), id="untied"),
        pytest.param(Qwen3Config(**SIZES, tie_word_embeddings=True), id="tied"),
        pytest.param(MistralConfig(**SIZES, sliding_window=7), id="sliding window"),
    ],
)
def test_packed_sequences_score_as_they_do_alone(config: Any):
    model, batch = model_of(config), sequences(9, 31, 2, 14)
    wanted, entropies, greedy, wanted_gradient = alone(model, batch)
    scoring = ScoringModel(model, model, CPU)
    assert scoring.packs
    request = collate(batch, CPU).request
    got, got_entropies, got_greedy = scoring.logprobs(request, temperature=0.8)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_entropies, entropies, atol=1e-5, rtol=1e-5)
    assert got_greedy.tolist() == greedy.tolist()
    difference = gradient(model, got) - wanted_gradient
    assert float(difference.norm() / wanted_gradient.norm()) < 1e-5


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Qwen3Config(**SIZES), id="in blocks"),
        pytest.param(CohereConfig(**SIZES), id="whole logits"),
    ],
)
def test_hidden_states_are_those_before_the_first_token_of_each_turn(config: Any):
    model = model_of(config)
    batch = [
        replace(one, turns=tuple((turn, token, 0.0) for turn, token in enumerate(begins)))
        for one, begins in zip(sequences(9, 31, 5), [(1, 4), (7, 30), ()], strict=True)
    ]
    scoring = ScoringModel(model, model, CPU)
    scoring.logprobs(collate(batch, CPU, turns=True).request, temperature=1.0)
    wanted = []
    for one in batch:
        token_ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
        told = model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
        wanted += [told.hidden_states[-1][0, token - 1] for _, token, _ in one.turns]
    assert scoring.hidden is not None
    assert not scoring.hidden.requires_grad
    torch.testing.assert_close(scoring.hidden, torch.stack(wanted), atol=1e-5, rtol=1e-5)
    scoring.logprobs(collate(batch, CPU).request, temperature=1.0)
    assert scoring.hidden is None


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Qwen3Config(**SIZES, tie_word_embeddings=True), id="in blocks"),
        pytest.param(Gemma2Config(**SIZES, final_logit_softcapping=2.0), id="capped in blocks"),
    ],
)
def test_an_fp32_head_gives_the_logits_of_the_same_hidden_states(config: Any):
    model = model_of(config).bfloat16()
    kept: list[Any] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    scoring = ScoringModel(model, model, CPU, fp32_head=True)
    token_ids = torch.arange(3, 40)
    got = scoring.logprobs(one_sequence(token_ids), temperature=1.0).logprobs
    got.sum().backward()
    logits = kept[-1][0, :-1].double() @ model.get_output_embeddings().weight.double().T
    if config.model_type == "gemma2":
        logits = 2.0 * torch.tanh(logits / 2.0)
    wanted = torch.log_softmax(logits, -1).gather(1, token_ids[1:, None])[:, 0]
    assert float((got - wanted).detach().abs().max()) < 1e-5


def test_what_a_turn_says_is_not_in_the_hidden_state_before_it():
    model = model_of(Qwen3Config(**SIZES))
    (one,) = sequences(20)
    seen = []
    for token_ids in (one.token_ids, np.where(np.arange(20) < 8, one.token_ids, 5)):
        sample = replace(one, token_ids=token_ids.astype(np.int32), turns=((0, 8, 0.0),))
        scoring = ScoringModel(model, model, CPU)
        scoring.logprobs(collate([sample], CPU, turns=True).request, temperature=1.0)
        seen.append(scoring.hidden)
    torch.testing.assert_close(*seen, atol=0, rtol=0)


def test_no_tensor_of_tokens_times_vocabulary_is_made(monkeypatch: pytest.MonkeyPatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):  # type: ignore[misc]  # torch is Any here
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            made = func(*args, **(kwargs or {}))
            tensors = made if isinstance(made, tuple | list) else [made]
            sizes.extend(one.numel() for one in tensors if isinstance(one, torch.Tensor))
            return made

    monkeypatch.setattr("libra_cli.node.model.logprobs.BLOCK_LOGITS", 2000)
    sizes: list[int] = []
    model = model_of(Qwen3Config(**SIZES | {"vocab_size": 500}))
    scoring = ScoringModel(model, model, CPU)
    request = one_sequence(torch.arange(3, 83))
    with Largest():
        scoring.logprobs(request, temperature=1.0)[0].sum().backward()
    assert max(sizes) == 500 * 32  # the weight and its gradient


@pytest.mark.parametrize(
    ("config", "in_blocks"),
    [
        (Gemma2Config(**SIZES, final_logit_softcapping=0.1, attn_logit_softcapping=None), True),
        (CohereConfig(**SIZES, logit_scale=0.3), False),
    ],
)
def test_what_a_model_does_to_its_logits_is_done_in_blocks_or_it_is_asked_for_them_and_says_so(
    config: Any, in_blocks: bool, caplog: pytest.LogCaptureFixture
):
    model, batch = model_of(config), sequences(9, 5)
    wanted, entropies, _, wanted_gradient = alone(model, batch)
    scoring = ScoringModel(model, model, CPU)
    assert ("kept whole" in caplog.text) != in_blocks
    request = collate(batch, CPU).request
    got, found, _ = scoring.logprobs(request, temperature=0.8)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, entropies, atol=1e-5, rtol=1e-5)
    difference = gradient(model, got) - wanted_gradient
    assert float(difference.norm() / wanted_gradient.norm()) < 1e-5
    # The model itself still caps them, for others and in what is exported.
    torch.testing.assert_close(alone(model, batch)[0], wanted, atol=0, rtol=0)


def test_attention_whose_scores_are_capped_is_that_of_transformers_own(tmp_path: Path):
    caps = {"attn_logit_softcapping": 0.3, "final_logit_softcapping": None}
    config = Gemma2Config(**SIZES, **caps, query_pre_attn_scalar=8, sliding_window=7)
    model_of(config).save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained
    wanted, *_, wanted_gradient = alone(
        read(tmp_path, attn_implementation="eager").train(), batch := sequences(9, 31)
    )
    uncapped, *_ = alone(read(tmp_path, attn_implementation="sdpa"), batch)
    assert float((uncapped - wanted).detach().abs().max()) > 0.01
    model = read(tmp_path, attn_implementation=attention_of(config)).train()
    scoring = ScoringModel(model, model, CPU)
    assert not scoring.packs
    got = torch.cat(
        [scoring.logprobs(collate([one], CPU).request, temperature=0.8).logprobs for one in batch]
    )
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    difference = gradient(model, got) - wanted_gradient
    assert float(difference.norm() / wanted_gradient.norm()) < 1e-5


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_attention_that_would_leave_something_out_is_refused(name: str):
    row = torch.randn(1, 2, 5, 8)
    given: dict[str, Any] = {name: None}
    packed_attention(torch.nn.Identity(), row, row, row, None, **given)
    given[name] = torch.ones(2)
    with pytest.raises(TrainerError, match=f"Identity cannot be trained.*{name}"):
        packed_attention(torch.nn.Identity(), row, row, row, None, **given)
