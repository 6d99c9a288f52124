"""Log-probabilities from hidden states in blocks of the vocabulary: exact, and small in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.node.model import logprobs as module  # noqa: E402
from libra_cli.node.model.logprobs import chosen_logprobs, token_logprobs  # noqa: E402

TOKENS, WIDTH, VOCABULARY = 37, 16, 101


def made(dtype: Any = torch.float32) -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    with torch.no_grad():
        targets[::3] = (hidden @ weight.T).argmax(-1)[::3]
    pull = torch.randn(TOKENS, generator=generator)
    return hidden, weight, targets, pull


@pytest.mark.parametrize("block", [1, 400, 2**25])
def test_the_gradient_of_the_entropy_is_autograds(block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BLOCK_LOGITS", block)
    hidden, weight, targets, pull = made()

    def gradients(results: tuple[Any, ...]) -> list[Any]:
        logprobs, entropy, *_ = results
        total = (logprobs * pull).sum() + (entropy * pull.flip(0)).sum()
        return list(torch.autograd.grad(total, (hidden, weight)))

    both: dict[str, Any] = {"temperature": 0.7, "entropy_gradient": True}
    log_softmax = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    wanted = gradients((log_softmax.gather(-1, targets[:, None])[:, 0], entropy))
    for got in (
        gradients(chosen_logprobs(hidden, weight, targets, **both)),
        gradients(token_logprobs(hidden @ weight.T, targets, **both)),
    ):
        for one, other in zip(got, wanted, strict=True):
            # An element is a sum whose terms are as large as the largest; their order is the CPU's.
            largest = float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("block", [1, 400, 2**25])
def test_values_and_gradients_are_those_of_whole_logits(
    block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "BLOCK_LOGITS", block)
    hidden, weight, targets, pull = made()
    wanted, entropy, greedy = token_logprobs(hidden @ weight.T, targets, temperature=0.7)
    (wanted * pull).sum().backward()
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    got, got_entropy, got_greedy = chosen_logprobs(hidden, weight, targets, temperature=0.7)
    (got * pull).sum().backward()
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_entropy, entropy, atol=1e-5, rtol=1e-5)
    assert not got_entropy.requires_grad
    likeliest = (hidden @ weight.T).argmax(-1) == targets
    assert greedy.tolist() == got_greedy.tolist() == likeliest.float().tolist()
    assert 0 < int(likeliest.sum()) < TOKENS
    assert not got_greedy.requires_grad
    for ours, theirs in zip((hidden.grad, weight.grad), gradients, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_in_bfloat16_the_gradient_is_as_near_to_the_exact_one_as_that_of_whole_logits():
    hidden, weight, targets, pull = made()

    def gradient(dtype: Any, score: Any) -> Any:
        narrow = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight)]
        (score(*narrow) * pull).sum().backward()
        return torch.cat([tensor.grad.float().flatten() for tensor in narrow])

    def whole(h: Any, w: Any) -> Any:
        return token_logprobs(h @ w.T, targets, temperature=1.0)[0]

    def blocks(h: Any, w: Any) -> Any:
        return chosen_logprobs(h, w, targets, temperature=1.0)[0]

    exact = gradient(torch.float32, whole)
    off = [float((gradient(torch.bfloat16, one) - exact).norm()) for one in (blocks, whole)]
    assert off[0] < 1.1 * off[1]


def test_under_autocast_products_are_in_half_precision_and_gradients_in_the_weight_s():
    hidden, weight, targets, _ = made()
    with torch.autocast("cpu", torch.bfloat16):
        got, *_ = chosen_logprobs(hidden, weight, targets, temperature=1.0)
        wanted, *_ = token_logprobs(
            torch.nn.functional.linear(hidden, weight), targets, temperature=1.0
        )
    got.sum().backward()
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert weight.grad.dtype == hidden.grad.dtype == torch.float32


@pytest.mark.parametrize("autocast", [False, True])
def test_an_fp32_head_multiplies_rounded_numbers_exactly(autocast: bool):
    """With the weights as a server has them, whatever format the trainer keeps them in."""
    made_in = torch.float32 if autocast else torch.bfloat16
    hidden, weight, targets, pull = made(made_in)
    narrow = [one.detach().bfloat16().double().requires_grad_() for one in (hidden, weight)]
    exact = torch.log_softmax(narrow[0] @ narrow[1].T / 0.7, -1).gather(1, targets[:, None])[:, 0]
    (exact * pull).sum().backward()
    errors = []
    for fp32_head in (True, False):
        hidden.grad = weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got, *_ = chosen_logprobs(hidden, weight, targets, temperature=0.7, fp32_head=fp32_head)
        (got * pull).sum().backward()
        errors.append(float((got - exact).detach().abs().mean()))
        for given, wanted in zip((hidden.grad, weight.grad), narrow, strict=True):
            assert given.dtype == made_in
            assert float((given - wanted.grad).norm() / wanted.grad.norm()) < 0.02
    assert errors[0] < 1e-6
    assert errors[1] > 1e-3, "logits that are rounded"


def test_a_frozen_weight_gets_no_gradient_and_no_tokens_give_zeros():
    hidden, weight, targets, _ = made()
    chosen_logprobs(hidden, weight.detach(), targets, temperature=1.0)[0].sum().backward()
    given: tuple[Any, Any] = hidden.grad, weight.grad
    assert given[0] is not None
    assert given[1] is None
    none = chosen_logprobs(hidden[:0], weight, targets[:0], temperature=1.0)[0]
    none.sum().backward()
    assert float(weight.grad.abs().sum()) == 0


TOKENS_OF_MANY, QWEN3_VOCABULARY, NARROW = 1024, 151_936, 256
"""Enough for several blocks of the true vocabulary; logits do not grow with the width."""
MEASURE = """
import json, resource, sys, torch
from libra_cli.node.model.logprobs import chosen_logprobs, token_logprobs
how, tokens, vocabulary, width = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
hidden = torch.randn(tokens, width).requires_grad_()
weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
targets = torch.randint(0, vocabulary, (tokens,))
hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if how == "whole":
    logprobs, entropy, _ = token_logprobs(hidden @ weight.T, targets, temperature=0.9)
else:
    logprobs, entropy, _ = chosen_logprobs(hidden, weight, targets, temperature=0.9)
(logprobs * torch.linspace(-1, 1, tokens)).sum().backward()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([peak * 1024, float(hidden.grad.norm()), float(weight.grad.norm())]))
"""


def measured(how: str, tokens: int, vocabulary: int, width: int) -> list[float]:
    """Bytes that forward and backward took at their peak, and the norms of both gradients."""
    sizes = map(str, (tokens, vocabulary, width))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, how, *sizes], capture_output=True, text=True, check=True
    )
    numbers: list[float] = json.loads(done.stdout)
    return numbers


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_blocks_take_at_most_a_quarter_of_the_memory():
    assert TOKENS_OF_MANY * QWEN3_VOCABULARY > 4 * module.BLOCK_LOGITS
    whole = measured("whole", TOKENS_OF_MANY, QWEN3_VOCABULARY, NARROW)
    blocks = measured("blocks", TOKENS_OF_MANY, QWEN3_VOCABULARY, NARROW)
    assert blocks[0] < whole[0] / 4, f"{whole[0] / 2**30:.2f} GiB whole, {blocks[0] / 2**30:.2f}"
    assert blocks[1:] == pytest.approx(whole[1:], rel=1e-5)
