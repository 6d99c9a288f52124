"""Token-level GRPO as pure functions of tensors, on the generated tokens only.

Three policies meet at every generated token t: the **rollout** policy that produced it (its
log-probability travels with the token), the **proximal** policy, which is the trainer's at the
start of the step, and the **current** one, which is being moved. With A the advantage of t's
trajectory within its group::

    r_t = current / proximal              w_t = min(proximal / rollout, tis_cap)
    L_t = -w_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A) + kl_coef r_t k3_t
    L   = sum over every generated token of the global batch of L_t  /  their number
    k3_t = reference / current - log(reference / current) - 1

w corrects for stale and in-flight versions and for the numerical difference between the engine and
the trainer; it carries no gradient. The factor r of the last term makes its gradient that of the
reverse KL, also where r is 1. The number that L is divided by is known before the backward pass, so
a share of the batch contributes the same gradient whoever computes it and however it is cut. With
one update a batch, proximal is current without its gradient: r is 1 and the clip idle.

All functions here take flat vectors with one entry a generated token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STD_FLOOR = 1e-4
"""Added to a group's standard deviation; the value TRL uses."""
LOGIT_ROWS = 2048
"""Rows of logits that are widened to fp32 at a time."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The recipe's ``training`` values that shape the loss."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float = 2.0
    kl_coef: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What one share of the batch gives; every field is a sum over its tokens."""

    loss: Tensor
    """With gradient; not yet divided."""
    kl: Tensor
    clipped: Tensor
    """Tokens whose update the clip or the truncation bounded."""
    weight: Tensor
    """Importance weights w, after truncation."""


def group_advantages(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """Each reward against the mean of its group, optionally over its standard deviation."""
    _, index = torch.unique(groups, return_inverse=True)
    advantages = torch.empty_like(rewards)
    for group in range(int(index.max()) + 1 if len(index) else 0):
        members = index == group
        centred = rewards[members] - rewards[members].mean()
        if normalize_std:
            centred = centred / (_std(rewards[members]) + STD_FLOOR)
        advantages[members] = centred
    return advantages


def _std(values: Tensor) -> Tensor:
    return values.std() if len(values) > 1 else values.new_zeros(())


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and, without gradient, the entropy of its distribution.

    ``logits`` is (tokens, vocabulary) and is scaled as the rollout scaled it, so that both sides
    speak of the distribution that was sampled from.
    """
    logprobs, entropies = [], []
    for rows, wanted in zip(logits.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        log_softmax = torch.log_softmax(rows.float() / temperature, dim=-1)
        logprobs.append(log_softmax.gather(-1, wanted[:, None])[:, 0])
        with torch.no_grad():
            entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def truncated_weights(proximal: Tensor, rollout: Tensor, cap: float) -> Tensor:
    """proximal / rollout, at most ``cap``; no gradient."""
    return torch.exp(proximal.detach() - rollout).clamp(max=cap)


def k3(reference: Tensor, current: Tensor) -> Tensor:
    """Schulman's low-variance estimate of KL(current || reference), per token; never negative."""
    log_ratio = reference - current
    return torch.exp(log_ratio) - log_ratio - 1


def grpo_loss(
    current: Tensor,
    *,
    proximal: Tensor,
    rollout: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    reference: Tensor | None = None,
) -> TokenLoss:
    """The sum of L_t over these tokens. Divide by the global number of generated tokens."""
    ratio = torch.exp(current - proximal.detach())
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    weight = truncated_weights(proximal, rollout, settings.tis_cap)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    per_token = -weight * surrogate
    kl = torch.zeros_like(current)
    if reference is not None:
        kl = k3(reference, current)
        per_token = per_token + settings.kl_coef * ratio * kl
    clipped = (bounded * advantages < ratio * advantages) | (weight >= settings.tis_cap)
    return TokenLoss(
        loss=per_token.sum(),
        kl=kl.detach().sum(),
        clipped=clipped.sum(),
        weight=weight.sum(),
    )
