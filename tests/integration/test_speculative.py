"""Speculative decoding on a real server: the same tokens and log-probabilities, in fewer steps."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from libra_cli.core.actions import Generate
from libra_cli.core.events import TurnFailed, TurnGenerated
from libra_cli.core.types import TrajectoryId, WeightVersion
from libra_cli.node.weights.tensor_rows import whole
from libra_cli.node.weights.versions import ProbeResult, publish
from libra_cli.runtime.rollout.connection import Sampling
from tests.vllm_server import Bench, bench_of, published

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(300)]
torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 3
TURNS = 4
TOKENS = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Any, Any]:
    """A random model whose policy is peaked, and its directory."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer

    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # peaked, so that texts repeat and drafts are often right
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=512)
    return model, directory


@pytest.fixture(scope="module")
def bench(model, tmp_path_factory):
    rollout = {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}
    root = tmp_path_factory.mktemp("versions")
    probe = ProbeResult([1, 2], [0.0])
    named = model[0].state_dict().items()
    done = publish(whole(named), root, version=1, trainer_incarnation=1, probe=probe, keep=1)
    with bench_of(model[1], tmp_path_factory.mktemp("host"), rollout=rollout) as bench:
        directory, version = str(root / done.name), published(1)
        bench.play(lambda: bench.server.load(directory, version, timeout_s=60))
        yield bench


def turn(number: int, tokens: int) -> Generate:
    return Generate(
        request=number,
        trajectory=TrajectoryId(0, number),
        slot="local/0",
        incarnation=0,
        prompt_ids=array("i", PROMPT),
        max_tokens=tokens,
        cache_key=WeightVersion(1, 1),
        priority=0,
    )


def played(bench: Bench, temperature: float, *, turns: int = TURNS) -> list[TurnGenerated]:
    sampling = Sampling(temperature=temperature, top_p=1.0, stop_token_ids=())

    async def scene() -> list[TurnGenerated | TurnFailed]:
        calls = [bench.server.generate(turn(n, TOKENS), sampling) for n in range(turns)]
        return [*await asyncio.gather(*calls)]

    ended = bench.play(scene)
    generated = [one for one in ended if isinstance(one, TurnGenerated)]
    assert len(generated) == turns, ended
    return generated


def logprobs_of(model: Any, token_ids: list[int], temperature: float) -> Any:
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1)[range(len(token_ids) - 1), token_ids[1:]]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probabilities_of_drafted_tokens_equal_transformers(bench, model, temperature):
    for done in played(bench, temperature):
        tokens = [*PROMPT, *done.token_ids]
        expected = logprobs_of(model[0], tokens, temperature)[len(PROMPT) - 1 :]
        gap = (expected - torch.tensor(list(done.logprobs))).abs()
        assert len(done.token_ids) == TOKENS
        assert float(gap.max()) < 1e-3


def test_the_likeliest_tokens_are_those_without_drafts(bench, model):
    expected = list(PROMPT)
    with torch.no_grad():
        for _ in range(TOKENS):
            expected.append(int(model[0](torch.tensor([expected])).logits[0, -1].argmax()))
    for done in played(bench, 0.0):
        assert [*PROMPT, *done.token_ids] == expected


def test_tokens_are_drawn_as_often_as_the_policy_says(bench, model):
    """The mean log-probability of what is drawn is minus the entropy of the policy there."""
    drawn = played(bench, 1.0, turns=8)
    means, variances = [], []
    for done in drawn:
        tokens = [*PROMPT, *done.token_ids]
        with torch.no_grad():
            logits = model[0](torch.tensor([tokens])).logits[0, len(PROMPT) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1)
        surprise = logprobs[range(TOKENS), tokens[len(PROMPT) :]]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        means.append((surprise + entropy).sum())
        spread = (logprobs.exp() * logprobs**2).sum(-1) - entropy**2
        variances.append(spread.sum())
    # A sum of martingale differences: its standard deviation is known.
    assert abs(float(sum(means))) < 4 * float(sum(variances)) ** 0.5


def test_drafts_are_accepted_and_told(bench):
    """Of one turn, which no test before has played alone: both kinds of steps are tried."""

    async def sample() -> Any:
        return await bench.server.sample()

    bench.play(sample)
    played(bench, 0.0, turns=1)
    metrics = bench.play(sample).metrics
    assert metrics["draft_acceptance"] > 0.2
    assert 0 < metrics["draft_steps"] <= 1
