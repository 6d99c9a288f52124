"""The optimizer of the trainer: AdamW, whose moments may be in the host's memory, or Muon.

With ``adamw_offload`` a rank's moments are in its host's memory. At a step they come to the device,
one parameter after the other, are used and changed as AdamW does, and go back: 16 bytes a parameter
there and back instead of 8 that are always on the device. The result is that of AdamW, bit by bit
where both take one tensor at a time, and so is a checkpoint: either goes on from the other's.

``muon`` moves the model's hidden matrices along their orthogonalised momentum (Jordan 2024), by as
much as AdamW would in the mean square (arXiv 2502.16982), so that one learning rate serves both;
whatever else there is, embeddings, output layer, norms and biases, is AdamW's. Matrices must be
whole for it.

Moments in 8 bits (torchao) would be 2 bytes on the device, and were not chosen: they change what is
learned, and which tensors have them depends on how many ranks share a tensor, so that a checkpoint
cannot always go on in another world.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from libra_cli.config.training import TrainingSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
SAMPLED = 4096
"""Values of a tensor; a norm over so many is off by about 1 %, 1 / sqrt(2 x 4096)."""


def optimizer_of(
    training: TrainingSpec,
    parameters: Collection[nn.Parameter],
    matrices: Collection[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer, with the state that it has before its first step.

    ``matrices`` are those of the parameters that Muon moves, where it is asked for.
    A checkpoint needs that state: torch would take a step with a rate of 0 to get it, which counts,
    and would lose the gradients of parts. Weight decay is not the optimizer's: norms have none.
    """
    kinds = {"adamw": torch.optim.AdamW, "adamw_offload": OffloadedAdamW, "muon": Muon}
    kind = kinds[training.optimizer]
    meshes = {one.device_mesh for one in parameters if isinstance(one, DTensor)}
    optimizer = kind(
        parameters,
        lr=training.learning_rate,
        betas=training.betas,
        weight_decay=0.0,
        foreach=False if len(meshes) > 1 else None,  # torch's lists of tensors are of one mesh
    )
    if isinstance(optimizer, Muon):
        optimizer.matrices = {id(parameter) for parameter in matrices}
    for parameter in parameters:
        kept = MOMENTS[:1] if id(parameter) in getattr(optimizer, "matrices", ()) else MOMENTS
        moments = {name: torch.zeros_like(parameter) for name in kept}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.offload(parameter)
    return optimizer


class OffloadedAdamW(torch.optim.AdamW):  # type: ignore[misc]  # torch is not followed
    """AdamW with its moments in the host's memory, in page-locked parts of it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._moments: dict[nn.Parameter, dict[str, Tensor]] = {}
        # torch brings all that is loaded to the devices of the parameters, every moment at once.
        self.register_load_state_dict_pre_hook(OffloadedAdamW._take_moments)
        self.register_load_state_dict_post_hook(OffloadedAdamW._put_moments)

    def offload(self, parameter: nn.Parameter) -> None:
        """Move the moments of a parameter to the host's memory."""
        state = self.state[parameter]
        for name in MOMENTS:
            state[name] = on_host(state[name])

    def _take_moments(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the moments of a loaded state to those on the host; return the rest for torch."""
        states = dict(loaded["state"])
        mine = (one for group in self.param_groups for one in group["params"])
        keys = (key for group in loaded["param_groups"] for key in group["params"])
        for parameter, key in zip(mine, keys, strict=True):
            if key in states:
                states[key] = dict(states[key])
                held = {name: self.state[parameter][name] for name in MOMENTS}
                for name, moment in held.items():
                    local(moment).copy_(local(states[key].pop(name)))
                self._moments[parameter] = held
        return {**loaded, "state": states}

    def _put_moments(self) -> None:
        """Join the moments with what torch has loaded."""
        for parameter, moments in self._moments.items():
            self.state[parameter].update(moments)
        self._moments = {}

    def step(self, closure: Any = None) -> None:
        """Take a step on every parameter that has a gradient; ``closure`` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    with torch.no_grad():
                        self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        state, own = self.state[parameter], local(parameter)
        kept = [local(state[name]) for name in MOMENTS]
        first, second = (on_device(moment, own.device) for moment in kept)
        beta1, beta2 = group["betas"]
        adamw(
            [own],
            [local(parameter.grad)],
            [first],
            [second],
            [],
            [state["step"]],
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for moment, changed in zip(kept, (first, second), strict=True):
            if changed is not moment:
                moment.copy_(changed)


class Muon(torch.optim.AdamW):  # type: ignore[misc]  # torch is not followed
    """Muon for the matrices whose ids are in ``matrices``, with torch's constants; else AdamW."""

    matrices: Collection[int] = ()

    def step(self, closure: Any = None) -> None:
        """Take a step on every parameter that has a gradient; ``closure`` is not called."""
        hidden = [one for one in self._with_gradients() if id(one) in self.matrices]
        gradients = [parameter.grad for parameter in hidden]
        if hidden:
            rate = self.param_groups[0]["lr"]
            moved = torch.optim.Muon(
                hidden, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            )
            for parameter in hidden:
                moved.state[parameter]["momentum_buffer"] = self.state[parameter]["exp_avg"]
            moved.step()
        # AdamW leaves alone what has no gradient.
        for parameter in hidden:
            parameter.grad = None
        super().step()
        for parameter, gradient in zip(hidden, gradients, strict=True):
            parameter.grad = gradient

    def _with_gradients(self) -> list[nn.Parameter]:
        every = (one for group in self.param_groups for one in group["params"])
        return [parameter for parameter in every if parameter.grad is not None]


class Movement:
    """How far an update moves the parameters, from a few values of each.

    Keeping all of them would take their memory again. Of each tensor's part on this rank at most
    ``SAMPLED`` values, evenly spaced, are kept, and stand for the others.
    """

    def __init__(self, parameters: Collection[nn.Parameter]) -> None:
        self._parameters = [local(parameter.data) for parameter in parameters]
        self._before = [_sampled(one).clone() for one in self._parameters]

    def ratio(self, gather: Callable[[tuple[float, float]], list[tuple[float, float]]]) -> float:
        """*Collective.* Norm of the change over the norm before it; 0 if nothing is there."""
        squares = []
        for parameter, before in zip(self._parameters, self._before, strict=True):
            weight = parameter.numel() / max(1, before.numel())
            both = torch.stack((_sampled(parameter) - before, before))
            squares.append(weight * both.double().square().sum(1))
        change, size = torch.stack(squares).sum(0).tolist()
        ranks = gather((change, size))
        whole = sum(size for _, size in ranks)
        return math.sqrt(sum(change for change, _ in ranks) / whole) if whole else 0.0


def _sampled(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLED))]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: all of it, if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; itself, if it is there."""
    return tensor.to(device, non_blocking=True)


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor with its values, or this rank's part of them, in the host's memory."""
    moved = tensor.to("cpu")
    if tensor.device.type == "cpu":
        return moved
    if isinstance(moved, DTensor):
        moved._local_tensor = moved._local_tensor.pin_memory()
        return moved
    return moved.pin_memory()
