"""The policy-gradient losses that ship with libra, by the names that TRL gives them.

Each is a *surrogate* of every generated token t, summed up in one of three ways. With A the
advantage of t's trajectory, r_t = current / proximal (``ratios.policy_ratio``), w_t the correction
for the rollout policy (``ratios.rollout_weights``) and k_t an estimate of the KL divergence
(not with ``kl_in_reward``, where it is in A)::

    L_t = -w_t s_t + kl_coef x r_t x k_t - entropy_coef x H_t
    s_t = min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A)        clipped
        = min(r_t, epsilon_high) A log current                        cispo, the minimum constant
        = 4 / tau x sigmoid(tau (r_t - 1)) A                          sapo

    name      surrogate             L =                                            paper (arXiv)
    dapo      clipped               sum L_t / generated tokens of the batch        2503.14476
    bnpo      clipped               the same: libra has no local batches
    grpo      clipped               mean over trajectories of each one's mean      2402.03300
    dr_grpo   clipped               sum L_t / (trajectories x greatest length)     2503.20783
    gspo      clipped, r of the     as grpo                                        2507.18071
              whole sequence
    cispo     cispo                 as dapo                                        2506.13585
    sapo      sapo                  as grpo                                        2511.20347

``dapo`` is the default. The factor r of the KL term gives it the gradient of the reverse KL, also
where r is 1; k2 has that gradient itself, so its r is a constant. H is the entropy. With one update
a batch, proximal is current without its gradient: r is 1, the clip idle, and what guards against
stale tokens is w. With several, r says how far this batch's updates have come since the first and w
stays what it was before it, the decoupled objective of arXiv 2110.00641; but for ``token_clip``, by
which a token also weighs nothing once current / rollout is past the clip range.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from libra_cli.config.training import TrainingSpec
from libra_cli.node.losses.protocol import LossInputs, LossOutputs
from libra_cli.node.losses.ratios import (
    Level,
    policy_ratio,
    rollout_weights,
    sequence_count,
    token_counts,
)


def dapo(
    inputs: LossInputs,
    training: TrainingSpec,
    *,
    importance_sampling_level: Level = "token",
    delta: float | None = None,
) -> LossOutputs:
    """Clipped ratios and the mean over all generated tokens of the batch.

    ``delta`` bounds the ratio above where the advantage is negative (dual clip, arXiv 1912.09729).
    """
    ratio = policy_ratio(inputs, importance_sampling_level)
    return _token_mean(_clipped(ratio, inputs, training, delta), inputs, training)


def grpo(
    inputs: LossInputs,
    training: TrainingSpec,
    *,
    importance_sampling_level: Level = "token",
    delta: float | None = None,
) -> LossOutputs:
    """Clipped ratios and the mean over trajectories of each one's mean; ``delta`` as in dapo."""
    ratio = policy_ratio(inputs, importance_sampling_level)
    return _sequence_mean(_clipped(ratio, inputs, training, delta), inputs, training)


def dr_grpo(
    inputs: LossInputs,
    training: TrainingSpec,
    *,
    importance_sampling_level: Level = "token",
    delta: float | None = None,
    max_completion_length: int | None = None,
) -> LossOutputs:
    """Clipped ratios and a divisor that no length changes; use it with ``scale_rewards: none``.

    ``max_completion_length`` is in tokens; None is the recipe's ``model.max_len``.
    """
    ratio = policy_ratio(inputs, importance_sampling_level)
    outputs = _token_mean(_clipped(ratio, inputs, training, delta), inputs, training)
    longest = inputs.max_len if max_completion_length is None else max_completion_length
    return LossOutputs(
        outputs.loss, outputs.metrics, divisor=longest * sequence_count(inputs.trajectories)
    )


def gspo(
    inputs: LossInputs,
    training: TrainingSpec,
    *,
    epsilon: float = 3e-4,
    epsilon_high: float = 4e-4,
) -> LossOutputs:
    """GSPO: one ratio a trajectory, clipped at 1 - ``epsilon`` and 1 + ``epsilon_high``."""
    narrow = training.model_copy(update={"clip_low": epsilon, "clip_high": epsilon_high})
    ratio = policy_ratio(inputs, "sequence")
    return _sequence_mean(_clipped(ratio, inputs, narrow, None), inputs, training)


def cispo(inputs: LossInputs, training: TrainingSpec, *, epsilon_high: float = 5.0) -> LossOutputs:
    """REINFORCE with ratios of at most ``epsilon_high`` as weights: no token loses its gradient."""
    ratio = policy_ratio(inputs, "token")
    weight = ratio.detach().clamp(max=epsilon_high)
    gains = weight * inputs.advantages * inputs.logprobs
    return _token_mean((gains, ratio.detach() > epsilon_high, ratio), inputs, training)


def sapo(
    inputs: LossInputs, training: TrainingSpec, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> LossOutputs:
    """A soft gate in place of the clip; ``tau_neg`` is its temperature for advantages below 0."""
    ratio = policy_ratio(inputs, "token")
    tau = torch.where(inputs.advantages > 0, tau_pos, tau_neg)
    gains = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * inputs.advantages
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return _sequence_mean((gains, none, ratio), inputs, training)


_Surrogate = tuple[Tensor, Tensor, Tensor]
"""For every token, (T,): s_t, whether its bound took away the gradient, and r_t."""


def _clipped(
    ratio: Tensor, inputs: LossInputs, training: TrainingSpec, delta: float | None
) -> _Surrogate:
    advantages = inputs.advantages
    bounded = ratio.clamp(1 - training.clip_low, 1 + training.clip_high) * advantages
    free = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
    return torch.minimum(free, bounded), bounded < free, ratio


def _token_mean(surrogate: _Surrogate, inputs: LossInputs, training: TrainingSpec) -> LossOutputs:
    per_token, metrics = _per_token(surrogate, inputs, training)
    return LossOutputs(per_token.sum(), metrics)


def _sequence_mean(
    surrogate: _Surrogate, inputs: LossInputs, training: TrainingSpec
) -> LossOutputs:
    per_token, metrics = _per_token(surrogate, inputs, training)
    shared = per_token / token_counts(inputs.trajectories)
    return LossOutputs(shared.sum(), metrics, divisor=sequence_count(inputs.trajectories))


def _per_token(
    surrogate: _Surrogate, inputs: LossInputs, training: TrainingSpec
) -> tuple[Tensor, dict[str, Tensor]]:
    """L_t, and the sums of: ``clip_fraction``, tokens whose update a bound limited; of these,
    ``clip_ratio/low_mean`` and ``high_mean``, those that the clip of r_t did, by their advantage's
    sign as in TRL; ``mask_fraction``, tokens that weigh nothing; ``tis_mean``, w; ``kl``, the
    estimate in nats, where there is a reference."""
    gains, clipped, ratio = surrogate
    weights, bound = rollout_weights(inputs, training)
    per_token = -weights * gains
    metrics = {
        "clip_fraction": (clipped | bound).sum(),
        "clip_ratio/low_mean": (clipped & (inputs.advantages < 0)).sum(),
        "clip_ratio/high_mean": (clipped & (inputs.advantages > 0)).sum(),
        "mask_fraction": (weights == 0).sum(),
        "tis_mean": weights.sum(),
    }
    if inputs.entropy is not None:
        per_token = per_token - training.entropy_coef * inputs.entropy
    if inputs.reference is not None:
        kl = kl_estimate(inputs.reference, inputs.logprobs, training.kl_estimator)
        metrics["kl"] = kl.detach().sum()
        if not training.kl_in_reward:
            factor = ratio.detach() if training.kl_estimator == "k2" else ratio
            per_token = per_token + training.kl_coef * factor * kl
    return per_token, metrics


def kl_estimate(reference: Tensor, current: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """An estimate of KL(current || reference) in nats, per token; k3 is never negative.

    Source: Schulman, "Approximating KL divergence", 2020.
    """
    log_ratio = reference - current
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.exp(log_ratio) - log_ratio - 1
