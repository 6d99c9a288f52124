"""A linear value head on the policy's last hidden state, and the optimizer that moves it.

    V(turn) = w x + b          x = h / (|h_1| + ... + |h_d|)

h is the last hidden state at the token before the turn's first: what the policy knows before it
acts, and nothing of what it then says. Both w and b are 0 before the first update. With x scaled
so, an update of AdamW, which moves each number by about its learning rate, moves no value by much
more than twice that, whatever the model's width; so one learning rate does for models of all sizes.

The head learns from hidden states as they are and sends nothing back: the policy is that of the
policy's loss alone, and a pass of the head costs a product with a vector. So it stands beside the
model, whole and in fp32 on the CPU of every rank, whether the model is sharded, replicated or
adapted, and it is no part of what is published. Each rank adds up the gradient of the turns that it
has looked at, all ranks take the same sum, and so the heads stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import safetensors.torch
import torch
from torch import Tensor, nn

from libra_cli.config.errors import TrainerError
from libra_cli.config.training import CriticSpec

BETAS = (0.9, 0.999)
"""AdamW's, as of verl's and TRL's critics."""


class ValueHead:
    """Weights ``[width + 1]``, of which the last is the bias, and AdamW's state."""

    def __init__(self, width: int, spec: CriticSpec) -> None:
        self.weights = nn.Parameter(torch.zeros(width + 1))
        self._clip = spec.cliprange_value
        self._optimizer = torch.optim.AdamW(
            [self.weights], lr=spec.learning_rate, betas=BETAS, weight_decay=0.0
        )

    def values(self, features: Tensor) -> Tensor:
        """Values of turns by their ``features_of``, as ``[turns]``."""
        return features @ self.weights

    def loss(self, features: Tensor, targets: Tensor, before: Tensor) -> Tensor:
        """PPO's clipped value loss, summed over turns; ``before`` is what V was before the step."""
        values = self.values(features)
        near = before + (values - before).clamp(-self._clip, self._clip)
        return 0.5 * torch.maximum((values - targets).square(), (near - targets).square()).sum()

    def update(
        self,
        features: Tensor,
        targets: Tensor,
        before: Tensor,
        total: Callable[[Tensor], tuple[Tensor, int]],
    ) -> float:
        """Take a step along the gradient of the mean over the turns of all ranks.

        ``total`` adds up a vector over the ranks, and says how many turns they have together. A
        gradient that is not finite moves nothing.

        Returns:
            The loss before the step.
        """
        self.weights.grad = None
        loss = self.loss(features, targets, before)
        loss.backward()
        summed, turns = total(torch.cat([self.weights.grad, loss.detach()[None]]))
        mean = summed / max(1, turns)
        if turns and bool(torch.isfinite(mean).all()):
            self.weights.grad = mean[:-1]
            self._optimizer.step()
        return float(mean[-1])

    def saved(self) -> bytes:
        """Return the weights and AdamW's state as a safetensors file, for ``restore``."""
        return bytes(safetensors.torch.save({"weights": self.weights.data, **self._moments()}))

    def restore(self, data: bytes) -> None:
        """Go on with what was ``saved``.

        Raises:
            TrainerError: it is of a model of another width.
        """
        found: Mapping[str, Tensor] = safetensors.torch.load(data)
        if found["weights"].shape != self.weights.shape:
            raise TrainerError(
                f"the checkpoint's critic is for hidden states of {len(found['weights']) - 1} "
                f"numbers, and the model has {len(self.weights) - 1}",
                hint="resume with the recipe and the model that the run began with",
            )
        self.weights.data = found["weights"].clone()
        state = {name: found[name].clone() for name in found if name != "weights"}
        self._optimizer.state[self.weights] = state

    def _moments(self) -> dict[str, Tensor]:
        """Return a copy of AdamW's state by name, which is empty before the first update."""
        return dict(self._optimizer.state[self.weights])


def features_of(hidden: Tensor) -> Tensor:
    """What the head sees of hidden states ``[turns, width]``: ``[turns, width + 1]``, fp32."""
    wide = hidden.float().cpu()
    scaled = wide / wide.abs().sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.cat([scaled, torch.ones(len(wide), 1)], dim=-1)
