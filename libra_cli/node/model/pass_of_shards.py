"""A pass of sharded ranks of which one runs out of memory, ended so that no rank waits for another.

FSDP2 gathers the weights of each layer in turn, forward and backward, and reduces its gradients. A
rank that breaks off in between leaves the others in the next of these collectives, for as long as
the group's timeout. So it takes part in those that are left, without computing: it gathers each
layer as they do, and gives zeros for the gradients that it lacks. What comes of it is of no use to
any rank, and all forget it.

It is FSDP2's own hooks that are called here, in the order in which a forward and a backward pass
call them (``torch/distributed/fsdp/_fully_shard``), so prefetching and streams are as always.

Limit: it is known of one forward and one backward pass through a model whose layers are each used
once. Where memory runs out while gradients are reduced (``in_reduction``) it cannot be told whether
the others have had this rank's part.
"""

from __future__ import annotations

import traceback
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class OutOfMemoryEverywhere(torch.OutOfMemoryError):  # type: ignore[misc]  # torch is Any here
    """The memory of one rank did not suffice, and all ranks have left the pass."""


def in_reduction(error: BaseException) -> bool:
    """Whether this was raised while FSDP2 reduced gradients."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == "post_backward" for frame, _ in frames)


class PassOfShards:
    """The collectives of one forward and backward pass, of which some may be behind this rank."""

    def __init__(self, model: nn.Module) -> None:
        """Begin before the pass."""
        self._model = cast(FSDPModule, model)
        self._root: Any = self._model._get_fsdp_state()
        self._root._lazy_init()  # of a model that was never called
        self._before = len(self._root._comm_ctx.post_forward_order)

    def end(self) -> None:
        """*Collective.* Take part in what is left of the pass."""
        if self._root._device.type == "cuda":
            torch.cuda.empty_cache()
        root, *layers = self._root._state_ctx.all_states
        with torch.no_grad():
            self._end_forward(root, layers)
            self._end_backward(root, layers)

    def forget(self) -> None:
        """Leave FSDP2 as it is between passes; gradients are whatever they are."""
        self._model.reset_iter_state()

    def _end_forward(self, root: Any, layers: list[Any]) -> None:
        through = root._comm_ctx.post_forward_order[self._before :]

        def is_through(state: Any) -> bool:
            return any(group in through for group in state._fsdp_param_groups)

        if is_through(root):  # which is the last of them
            return
        _enter(root)
        for layer in layers:
            if not is_through(layer):
                _enter(layer)
                _leave(layer)
        _leave(root)

    def _end_backward(self, root: Any, layers: list[Any]) -> None:
        # Autograd calls what follows the last layer; here nobody else does.
        root._state_ctx.post_backward_final_callback_queued = True
        for state in (root, *reversed(layers)):
            for group in state._fsdp_param_groups:
                if group._training_state.name == "POST_BACKWARD":
                    continue
                state._pre_backward(None)
                _give_zeros(group)
                if state is not root:
                    group.post_backward()
        root._root_post_backward_final_callback()


def _enter(state: Any) -> None:
    state._pre_forward(state._modules[0], (), {})


def _leave(state: Any) -> None:
    state._post_forward(state._modules[0], None, None)


def _give_zeros(group: Any) -> None:
    """Put zeros where a backward pass would have put gradients."""
    for one in group.fsdp_params:
        whole = one.unsharded_param
        if whole.requires_grad and whole.grad is None:
            whole.grad = torch.zeros_like(whole)
