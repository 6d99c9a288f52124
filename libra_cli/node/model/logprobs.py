"""Log-probabilities of chosen tokens."""

from __future__ import annotations

import torch
from torch import Tensor

LOGIT_ROWS = 2048
"""Rows of logits that are widened to fp32 at a time."""


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and, without gradient, the entropy of its distribution.

    ``logits`` is (tokens, vocabulary) and is scaled as the rollout scaled it, so that both sides
    speak of the distribution that was sampled from. Both results are (tokens,), in nats.
    """
    logprobs, entropies = [], []
    for rows, wanted in zip(logits.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        log_softmax = torch.log_softmax(rows.float() / temperature, dim=-1)
        logprobs.append(log_softmax.gather(-1, wanted[:, None])[:, 0])
        with torch.no_grad():
            entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)
