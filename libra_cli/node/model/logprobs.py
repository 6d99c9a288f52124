"""Log-probabilities of chosen tokens, the entropy of what they were chosen from, and whether they
are the likeliest of it.

``chosen_logprobs`` computes the output layer and the softmax over the vocabulary in blocks of rows
of the layer's weight, forward and backward, so that the logits of all tokens are never there at
once. Of a block with logits x_b it keeps, for each token,

    l_b = logsumexp(x_b)        H_b = entropy of softmax(x_b)        max x_b

and from all blocks l = logsumexp(l_b), log p(target) = x_target - l, and the entropy
H = sum over b of exp(l_b - l) (H_b + l - l_b). The backward pass computes the logits of each block
again: one more product with the weight, in place of memory for tokens x vocabulary. With p the
softmax of x, it has d log p(target) / dx = [target] - p and dH / dx = -p (log p + H).

Logits z of the layer that are capped to c tanh(z / c), as Gemma's, are capped in each block; then
dx / dz = 1 - (x / c)^2, before they are divided by the temperature.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

LOGIT_ROWS = 2048
"""Rows of whole logits that are widened to fp32 at a time."""
BLOCK_LOGITS = 2**25
"""Logits of a block, 128 MiB in fp32; two such tensors are there at once."""


class ChosenTokens(NamedTuple):
    """What the model says of each chosen token; every tensor has the shape ``[tokens]``."""

    logprobs: Tensor
    """Log-probabilities of the tokens, in nats."""
    entropy: Tensor
    """Entropy in nats of what the token is chosen from; mostly without gradient."""
    greedy: Tensor
    """1 where it is the likeliest token, else 0; without gradient."""


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float, entropy_gradient: bool = False
) -> ChosenTokens:
    """The scores of each target.

    ``logits`` is (tokens, vocabulary) and is scaled as the rollout scaled it, so that both sides
    speak of the distribution that was sampled from.
    """
    logprobs, entropies, greedy = [], [], []
    for rows, wanted in zip(logits.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        log_softmax = torch.log_softmax(rows.float() / temperature, dim=-1)
        chosen = log_softmax.gather(-1, wanted[:, None])[:, 0]
        logprobs.append(chosen)
        greedy.append((chosen >= log_softmax.amax(-1)).float())
        with contextlib.nullcontext() if entropy_gradient else torch.no_grad():
            entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return ChosenTokens(torch.cat(logprobs), torch.cat(entropies), torch.cat(greedy))


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool = False,
    fp32_head: bool = False,
    cap: float | None = None,
) -> ChosenTokens:
    """``token_logprobs`` of ``hidden @ weight.T``, whose logits are never there as a whole.

    ``hidden`` is (tokens, width), ``weight`` (vocabulary, width). Products are computed in the type
    of autocast, if that is on, else in the weight's; sums over the vocabulary in fp32. With
    ``fp32_head`` numbers of that type are multiplied into logits of fp32, as vLLM does with its
    ``head_dtype``, in place of logits that are rounded to it. Logits are capped to ``cap``.
    """
    dtype = _computed_in(weight)
    return ChosenTokens(
        *_ChosenLogprobs.apply(
            hidden, weight, targets, temperature, dtype, entropy_gradient, fp32_head, cap
        )
    )


class _ChosenLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is Any here
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
        entropy_gradient: bool,
        fp32_head: bool,
        cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        narrow, product = hidden.to(dtype), _fp32_product if fp32_head else linear
        chosen = torch.zeros(len(targets), device=hidden.device)
        best = torch.full_like(chosen, -torch.inf)
        sums, entropies = [], []
        for rows, start in _blocks(weight, len(targets)):
            logits = _capped(product(narrow, rows.to(dtype)).float(), cap).div_(temperature)
            places, inside = _places(targets, start, len(rows))
            chosen += logits.gather(1, places)[:, 0].masked_fill_(~inside, 0.0)
            best = torch.maximum(best, logits.amax(-1))
            total, entropy = _sum_up(logits)
            del logits  # or it would be there beside the next
            sums.append(total)
            entropies.append(entropy)
        by_block = torch.stack(sums)
        whole = by_block.logsumexp(0)
        above = whole - by_block
        entropy = ((-above).exp() * (torch.stack(entropies) + above)).sum(0)
        ctx.save_for_backward(hidden, weight, targets, whole, entropy)
        ctx.temperature, ctx.dtype, ctx.product, ctx.cap = temperature, dtype, product, cap
        ctx.entropy_gradient = entropy_gradient
        greedy = (chosen >= best).float()
        ctx.mark_non_differentiable(greedy, *(() if entropy_gradient else (entropy,)))
        return chosen - whole, entropy, greedy

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, of_entropy: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, whole, entropy = ctx.saved_tensors
        to_hidden, to_weight = ctx.needs_input_grad[:2]
        narrow = hidden.to(ctx.dtype)
        hidden_gradient = torch.zeros(hidden.shape, device=hidden.device)
        weight_gradient = torch.empty_like(weight) if to_weight else None
        scaled = gradient[:, None] / ctx.temperature
        bonus = of_entropy[:, None] / ctx.temperature if ctx.entropy_gradient else None
        for rows, start in _blocks(weight, len(targets)):
            block = rows.to(ctx.dtype)
            logits = _capped(ctx.product(narrow, block).float(), ctx.cap)
            slope = None if ctx.cap is None else 1 - (logits / ctx.cap).square_()
            logits.div_(ctx.temperature)
            pull = _pull(logits.sub_(whole[:, None]), scaled, bonus, entropy)
            places, inside = _places(targets, start, len(rows))
            pull.scatter_add_(1, places, scaled.masked_fill(~inside[:, None], 0.0))
            if slope is not None:
                pull.mul_(slope)
            del logits, slope
            pull = pull.to(ctx.dtype)
            if to_hidden:
                hidden_gradient += pull @ block
            if weight_gradient is not None:
                weight_gradient[start : start + len(rows)] = pull.T @ narrow
            del pull
        return hidden_gradient.to(hidden.dtype), weight_gradient, *(None,) * 6


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    """The logits, which are overwritten, capped."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _pull(log_softmax: Tensor, scaled: Tensor, bonus: Tensor | None, entropy: Tensor) -> Tensor:
    """What every logit of a block is pulled by, (tokens, rows), but for the targets' own part.

    ``scaled`` and ``bonus`` are the gradients of log-probability and entropy; log_softmax is
    overwritten.
    """
    if bonus is None:
        return log_softmax.exp_().mul_(-scaled)
    shares = log_softmax.exp()
    return log_softmax.add_(entropy[:, None]).mul_(-bonus).sub_(scaled).mul_(shares)


def _blocks(weight: Tensor, tokens: int) -> Iterator[tuple[Tensor, int]]:
    """The rows of a weight in blocks, each with the number of its first row."""
    size = max(1, BLOCK_LOGITS // max(1, tokens))
    for start in range(0, len(weight), size):
        yield weight[start : start + size], start


def fp32_logits(hidden: Tensor, head: nn.Linear) -> Tensor:
    """What an output layer gives, (..., vocabulary), in fp32 of numbers in the type of compute."""
    dtype = _computed_in(head.weight)
    with torch.autocast(hidden.device.type, enabled=False):
        weight = head.weight.to(dtype).float()
        return linear(hidden.to(dtype).float(), weight, head.bias)


def _computed_in(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _fp32_product(hidden: Tensor, rows: Tensor) -> Tensor:
    """A block's logits, (tokens, rows), in fp32 of narrow numbers, whose products are exact."""
    with torch.autocast(hidden.device.type, enabled=False):
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, rows.T, out_dtype=torch.float32)
        return linear(hidden.float(), rows.float())


def _sum_up(logits: Tensor) -> tuple[Tensor, Tensor]:
    """l_b and H_b of a block, (tokens,); the logits are overwritten."""
    highest = logits.amax(-1, keepdim=True)
    shares = logits.sub_(highest).exp()
    total = shares.sum(-1)
    entropy = total.log() - shares.mul_(logits).sum(-1) / total
    return total.log() + highest[:, 0], entropy


def _places(targets: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Where targets are in a block, (tokens, 1), and for which tokens that is true, (tokens,)."""
    places = targets - start
    return places.clamp(0, size - 1)[:, None], (places >= 0) & (places < size)
