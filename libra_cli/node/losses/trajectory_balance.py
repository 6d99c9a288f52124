"""Trajectory balance (TBA, arXiv 2503.18929), an objective for data of any policy.

The policy that maximises reward - beta x KL(policy || reference) is ref(y) exp(r(y) / beta) / Z,
with one Z a prompt. So for every trajectory y of a prompt, whoever generated it,

    d(y) = log Z + log pi(y) - log ref(y) - r(y) / beta

is 0 where pi is that policy, and the loss is its square. It needs no ratio to the policy that
generated the tokens: ``training.sampler_correction`` and the clip are not used. log Z is estimated
by the mean of r / beta + log ref - log pi over the group, without gradient (VarGrad, arXiv
2010.10436), which leaves, with L = log pi(y) - log ref(y) and A the advantage,

    d = (L - mean L of the group) - A / beta          loss = sum over trajectories of beta / 2 x d^2

The factor beta / 2 is no part of the paper's: with it the gradient is that of REINFORCE on
A - beta (L - mean L), so that one learning rate goes with every beta, and it is divided by the
number of generated tokens, as dapo's is. A is the paper's where advantages are not scaled by a
standard deviation, which would make another beta of each group. Logs are sums over the generated
tokens of all branches of a trajectory, not over those of prompts and tools.
"""

from __future__ import annotations

from torch import Tensor

from libra_cli.config.errors import TrainerError
from libra_cli.config.training import TrainingSpec
from libra_cli.node.losses.protocol import LossInputs, LossOutputs


def tba(inputs: LossInputs, training: TrainingSpec, *, beta: float = 0.1) -> LossOutputs:
    """The squared imbalance of every trajectory; ``beta`` is how dear it is to leave the first
    policy, in reward a nat.

    Its metrics: ``kl``, log pi - log ref, in nats a token; ``tb_residual``, beta |d|, in reward.

    Raises:
        TrainerError: ``beta`` is not above 0.
    """
    if not beta > 0:
        raise TrainerError(
            f"loss tba: beta is {beta}, and must be above 0",
            hint="training.loss_args: {beta: 0.1}; without a KL term take training.loss: dapo",
        )
    current = inputs.logprobs.detach()
    own, mean = _given(inputs.own_value), _given(inputs.group_mean)
    residual = (beta * (own - mean) - inputs.advantages).detach()
    squares = residual.square() / (2 * beta) / _given(inputs.own_tokens)
    # The gradient is of the logs; the value is that of the squares, of which every token has its
    # part, so that the branches of a trajectory, wherever they are, make up one.
    loss = (residual * (inputs.logprobs - current)).sum() + squares.sum()
    metrics = {
        "kl": (current - _given(inputs.reference)).sum(),
        "tb_residual": residual.abs().sum(),
    }
    return LossOutputs(loss, metrics)


def log_ratio(inputs: LossInputs) -> Tensor:
    """log pi - log ref of every token, whose sums are L; proximal is the model as it is now."""
    return inputs.proximal.detach() - _given(inputs.reference)


def _given(value: Tensor | None) -> Tensor:
    assert value is not None, "libra gives it to a loss that asks for it"
    return value


tba.needs_reference = True  # type: ignore[attr-defined]  # node.losses.protocol reads both
tba.group_value = log_ratio  # type: ignore[attr-defined]
