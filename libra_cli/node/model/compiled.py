"""Decoder layers compiled by torch (``training.compile``), each in its place.

It is a layer's ``forward`` that is compiled, as one graph (``fullgraph``): parameters keep their
names, and what FSDP2 does before and after a layer stays outside. All layers share a graph. Rows
differ in length, so lengths are symbols (``dynamic``), and how many sequences a row has no graph
sees (``packed_attention``): there is one graph with gradients and one without, and another of each
for a row that happens to be as long as a side of the model.

What is computed again is decided in the graph: with ``selective`` checkpointing is inside of it,
since a policy outside sees no single operation. With ``full`` it is outside, as of plain layers,
and with ``none`` torch's partitioner keeps what is dear to compute.

Limit: mixtures of experts, whose routers are looked at and told what to choose, models that drop
attention at random, and ranks that share a row or part experts are refused. Of a graph that is not
found in the cache (``TORCHINDUCTOR_CACHE_DIR``) the first pass takes most of a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint

from libra_cli.config.errors import TrainerError
from libra_cli.node.model.activations import selective_contexts
from libra_cli.node.model.expert_adapter import experts_in

BACKEND = "inductor"
"""What makes code of a graph."""
GRAPHS = 64
"""Most graphs of a layer; torch's own limit (8) is soon met where rows are as long as sides."""
OFF = "set training.compile: false"


@dataclass(slots=True)
class CompileClock:
    """The seconds that this process has spent compiling."""

    seconds: float = 0.0
    graphs: int = 0
    _began: float = 0.0

    def begin(self, _: object) -> None:
        self._began = time.monotonic()

    def end(self, _: object) -> None:
        self.seconds += time.monotonic() - self._began
        self.graphs += 1

    def without(self) -> float:
        """The monotonic clock less these seconds."""
        return time.monotonic() - self.seconds

    def listen(self) -> None:
        """Be told by torch from now on; it forgets those it tells when it is reset."""
        if self.begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self.begin)
            callback_handler.register_end_callback(self.end)


CLOCK = CompileClock()


def compile_layers(model: nn.Module, *, selective: bool = False) -> None:
    """Compile every decoder layer of a transformers model when it is first called; with
    ``selective`` a backward pass computes again what ``activations.KEPT`` does not name.

    Raises:
        TrainerError: the model has layers that cannot be compiled as they are used here.
    """
    if why := _refused(model):
        raise TrainerError(
            f"the layers of {type(model).__name__} are not compiled: {why}", hint=OFF
        )
    torch._dynamo.config.recompile_limit = GRAPHS
    CLOCK.listen()
    again = partial(checkpoint, use_reentrant=False, context_fn=selective_contexts)
    decoder: Any = model
    for layer in decoder.get_decoder().layers:
        forward = partial(again, layer.forward) if selective else layer.forward
        compiled = torch.compile(forward, dynamic=True, fullgraph=True, backend=BACKEND)
        layer.forward = partial(_called, compiled, type(layer).__name__)


def _refused(model: Any) -> str:
    if next(iter(experts_in(model)), None) is not None:
        return "it is a mixture of experts"
    if getattr(model.config.get_text_config(), "attention_dropout", 0.0):
        return "it drops attention at random (attention_dropout)"
    return ""


def _called(compiled: Callable[..., Any], kind: str, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled layer; memory that runs out while it is compiled is that of the pass."""
    try:
        return compiled(*args, **kwargs)
    except TorchDynamoException as error:
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, torch.OutOfMemoryError):
            raise inner from error
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise TrainerError(f"{kind} cannot be compiled: {told[0]}", hint=OFF) from error
