"""Token-level GRPO.

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
reverse KL, also where r is 1. With one update a batch, proximal is current without its gradient:
r is 1 and the clip idle.

    GRPO                              arXiv 2402.03300
    one mean over all tokens, and     DAPO, arXiv 2503.14476
    clip_high above clip_low
    w                                 truncated importance sampling, Ionides 2008
    w of at most 1 for tokens over    V-trace's truncation, arXiv 1802.01561
    the bound (over: weight)
    k3                                Schulman, "Approximating KL divergence", 2020
"""

from __future__ import annotations

import torch
from torch import Tensor

from libra_cli.config.recipe import TrainingSpec
from libra_cli.node.losses.protocol import LossInputs, LossOutputs


def grpo(inputs: LossInputs, training: TrainingSpec) -> LossOutputs:
    """The sum of L_t over these tokens.

    Metrics: ``clip_fraction``, the share of tokens whose update the clip or the truncation bounded;
    ``tis_mean``, the mean of w; ``kl``, the mean of k3 in nats, where there is a reference.
    """
    proximal, advantages = inputs.proximal.detach(), inputs.advantages
    ratio = torch.exp(inputs.logprobs - proximal)
    bounded = ratio.clamp(1 - training.clip_low, 1 + training.clip_high)
    caps = torch.full_like(proximal, training.tis_cap)
    if training.staleness.weighs:
        caps = caps.masked_fill(inputs.over, 1.0)
    weight = truncated_weights(proximal, inputs.rollout, caps)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    per_token = -weight * surrogate
    clipped = (bounded * advantages < ratio * advantages) | (weight >= caps)
    metrics = {"clip_fraction": clipped.sum(), "tis_mean": weight.sum()}
    if inputs.reference is not None:
        kl = k3(inputs.reference, inputs.logprobs)
        per_token = per_token + training.kl_coef * ratio * kl
        metrics["kl"] = kl.detach().sum()
    return LossOutputs(per_token.sum(), metrics)


def truncated_weights(proximal: Tensor, rollout: Tensor, caps: Tensor) -> Tensor:
    """proximal / rollout of every token, at most its cap; no gradient."""
    return torch.minimum(torch.exp(proximal.detach() - rollout), caps)


def k3(reference: Tensor, current: Tensor) -> Tensor:
    """Schulman's low-variance estimate of KL(current || reference), per token; never negative."""
    log_ratio = reference - current
    return torch.exp(log_ratio) - log_ratio - 1
