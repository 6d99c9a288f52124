"""Ratios of probabilities between the three policies that meet at a generated token.

The **rollout** policy produced it (its log-probability travels with the token), the **proximal**
policy is the trainer's before the first update of the step, and the **current** one is being moved.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from libra_cli.config.age_metrics import AGE_KL, AGE_TOKENS, AGE_WORTH, OLDEST
from libra_cli.config.training import TrainingSpec
from libra_cli.node.losses.protocol import LossInputs

AGE_SUMS = ("age_{}_tokens", "age_{}_weights", "age_{}_squares", "age_{}_kl")
"""Names of the sums of ``age_sums``, by the age."""

Level: TypeAlias = Literal["token", "sequence"]
"""Whether a ratio is a token's own, or one that all tokens of a trajectory have."""


def policy_ratio(inputs: LossInputs, level: Level) -> Tensor:
    """current / proximal of every token, (T,), with gradient.

    Of a sequence it is the geometric mean over its tokens (GSPO, arXiv 2507.18071).

    Raises:
        ValueError: ``level`` is neither.
    """
    differences = inputs.logprobs - inputs.proximal.detach()
    if level == "token":
        return torch.exp(differences)
    if level != "sequence":
        raise ValueError(f"importance_sampling_level is token or sequence, not {level!r}")
    rows = inputs.trajectories
    return torch.exp(sequence_sums(differences, rows) / token_counts(rows))


def rollout_weights(inputs: LossInputs, training: TrainingSpec) -> tuple[Tensor, Tensor]:
    """The correction for what separates rollout from proximal policy: weights and which are bound.

    Both are (T,); weights have no gradient. A weight is proximal / rollout, of the token or, with
    ``sequence_*``, the product over its trajectory; ``*_truncate`` lowers it to ``tis_cap``
    (truncated importance sampling, Ionides 2008), ``*_mask`` makes it 0 outside of
    [``tis_floor``, ``tis_cap``] (of tokens: IcePop, ring-team 2025). ``token_clip`` makes it 0
    where current / rollout is already past PPO's clip range in the direction of the advantage, as
    in PPO's loss (arXiv 1707.06347) whose old policy is the one that generated; elsewhere it is at
    most ``tis_cap``. With the staleness rule's
    ``over: weight``, tokens over the bound weigh at most 1 (V-trace, arXiv 1802.01561).
    """
    differences = inputs.proximal.detach() - inputs.rollout
    if training.correction == "none":
        return torch.ones_like(differences), torch.zeros_like(differences, dtype=torch.bool)
    level, _, bound = training.correction.partition("_")
    if level == "sequence":
        differences = sequence_sums(differences, inputs.trajectories)
    weights = torch.exp(differences)
    floor, cap = training.importance_bounds
    if bound == "mask":
        outside = (weights > cap) | (weights < floor)
        weights = weights.masked_fill(outside, 0.0)
    elif bound == "clip":
        clipped = _has_moved(inputs, training)
        outside = clipped | (weights >= cap)
        weights = weights.clamp(max=cap).masked_fill(clipped, 0.0)
    else:
        outside = weights >= cap
        weights = weights.clamp(max=cap)
    if training.staleness.weighs:
        outside |= inputs.over & (weights >= 1.0)
        weights = torch.where(inputs.over, weights.clamp(max=1.0), weights)
    return weights, outside


def _has_moved(inputs: LossInputs, training: TrainingSpec) -> Tensor:
    """Return whether each token's current / rollout, (T,), is past the clip range in its
    advantage's direction."""
    ratios = torch.exp(inputs.logprobs.detach() - inputs.rollout)
    above = (inputs.advantages > 0) & (ratios > 1 + training.clip_high)
    return above | ((inputs.advantages < 0) & (ratios < 1 - training.clip_low))


def rollout_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Sums that say how far the proximal policy is from those that generated, whatever the loss.

    ``rollout_kl``, an estimate (k3) of the KL divergence in nats; with w = proximal / rollout,
    before any bound, ``rollout_ratio/below_half`` and ``above_2`` count tokens whose w is outside
    of these, and the sums of w and its square give ``effective_sample_size``.
    """
    differences = (inputs.proximal.detach() - inputs.rollout).double()
    ratios = torch.exp(differences)
    return {
        "rollout_kl": (ratios - differences - 1).sum(),
        "rollout_ratio/below_half": (ratios < 0.5).sum(),
        "rollout_ratio/above_2": (ratios > 2).sum(),
        "rollout_ratio_sum": ratios.sum(),
        "rollout_ratio_square_sum": ratios.square().sum(),
    }


def age_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Sums that say what tokens of each age are worth, in versions: how many there are, of
    w = proximal / rollout and of its square before any bound, and of the KL divergence (k3).
    """
    differences = (inputs.proximal.detach() - inputs.rollout).double()
    ratios = torch.exp(differences)
    kls = ratios - differences - 1
    ages = inputs.staleness.clamp(min=0, max=OLDEST)
    found: dict[str, Tensor] = {}
    for age in ages.unique().tolist():
        mine = ages == age
        own = ratios[mine]
        parts = (torch.ones_like(own), own, own.square(), kls[mine])
        names = (name.format(age) for name in AGE_SUMS)
        found |= dict(zip(names, (part.sum() for part in parts), strict=True))
    return found


def worth_by_age(sums: dict[str, float], passes: int) -> dict[str, float]:
    """Take the sums of ``age_sums`` out of ``sums``; return the tokens of each age, the share of
    them that weighted ones are worth (Kish 1965) and their KL divergence, as metrics. Every token
    was in so many ``passes``.
    """
    found: dict[str, float] = {}
    for age in range(OLDEST + 1):
        tokens, total, squares, kl = (sums.pop(name.format(age), 0.0) for name in AGE_SUMS)
        if tokens:
            worth = total * total / (tokens * squares) if squares else 0.0
            found |= {AGE_TOKENS.format(age): tokens / passes, AGE_WORTH.format(age): worth}
            found[AGE_KL.format(age)] = kl / tokens
    return found


def effective_sample_size(total: float, squares: float, tokens: int) -> dict[str, float]:
    """The share of tokens that weighted ones are worth: (sum w)^2 / (n sum w^2) (Kish 1965)."""
    return {"effective_sample_size": total * total / (tokens * squares)} if squares else {}


def sequence_sums(values: Tensor, rows: Tensor) -> Tensor:
    """Return for every token, (T,), the sum of the values of its trajectory's tokens."""
    return _totals(values, rows)[rows]


def token_counts(rows: Tensor) -> Tensor:
    """Return for every token, (T,), how many tokens its trajectory has among these."""
    return sequence_sums(torch.ones_like(rows, dtype=torch.float32), rows)


def sequence_count(rows: Tensor) -> Tensor:
    """How many trajectories have a token among these, as a float32 scalar."""
    return (_totals(torch.ones_like(rows, dtype=torch.float32), rows) > 0).sum().float()


def _totals(values: Tensor, rows: Tensor) -> Tensor:
    size = int(rows.max()) + 1 if len(rows) else 0
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, rows, values)
