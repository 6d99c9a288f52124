"""The losses that Tinker's clients name, as its documentation defines them.

Each is a sum over tokens. With the log-probability p of a target, q that of whoever sampled it, the
ratio r = exp(p - q) and the advantage A:

    cross_entropy          - weight p
    importance_sampling    - r A
    ppo                    - min(r A, clip(r) A)
    cispo                  - stop_gradient(clip(r)) p A
    dro                    - (p A - beta / 2 (p - q)^2)

``clip`` keeps a ratio between ``clip_low_threshold`` and ``clip_high_threshold``, 0.8 and 1.2
unless a request says otherwise; ``beta`` is 0.05.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from libra_cli.config.errors import TrainerError

Inputs: TypeAlias = Mapping[str, Tensor]
"""What a request gives of each token beside its target, by name; every tensor has ``[tokens]``."""
Settings: TypeAlias = Mapping[str, float]
"""The numbers that a request sets for its loss, by name."""
Loss: TypeAlias = Callable[[Tensor, Inputs, Settings], Tensor]
DEFAULTS: Settings = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.05}


def cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return minus each target's log-probability, times its weight (1 where none is given)."""
    weights = inputs.get("weights")
    return -logprobs if weights is None else -logprobs * weights


def importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return minus each token's advantage, times its ratio to whoever sampled it."""
    return -torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return PPO's clipped objective of each token, negated."""
    ratio, advantages = torch.exp(logprobs - inputs["logprobs"]), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return minus each token's log-probability, times advantage and clipped ratio, which has no
    gradient."""
    ratio = torch.exp(logprobs - inputs["logprobs"]).detach()
    return -_clipped(ratio, settings) * logprobs * inputs["advantages"]


def dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return the objective of direct reward optimisation of each token, negated."""
    gap = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - settings["beta"] / 2 * gap**2)


def _clipped(ratio: Tensor, settings: Settings) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


LOSSES: Mapping[str, Loss] = {
    one.__name__: one for one in (cross_entropy, importance_sampling, ppo, cispo, dro)
}
_SAMPLED = ("logprobs", "advantages")


def loss_named(name: str) -> tuple[Loss, tuple[str, ...]]:
    """Return a loss and the inputs that it cannot do without; raises TrainerError."""
    if name not in LOSSES:
        raise TrainerError(f"no loss is called {name!r}: there are {', '.join(LOSSES)}")
    return LOSSES[name], () if name == "cross_entropy" else _SAMPLED
