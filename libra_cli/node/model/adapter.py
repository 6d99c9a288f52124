"""Low-rank adapters in a model, by PEFT: which parameters are trained, and what they are called.

PEFT puts layers of its own in the place of the linear layers and leaves the model what it is
otherwise, so sharding, activation checkpointing and scoring know nothing of adapters. Experts of a
mixture are no linear layers, and have adapters of ``expert_adapter``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from libra_cli.config.errors import TrainerError
from libra_cli.config.training import LoraSpec
from libra_cli.node.model.expert_adapter import ExpertAdapter, adapt, can_adapt, experts_in

NAME = "default"
"""PEFT's own name for a model's only adapter."""


def peft_config(spec: LoraSpec, targets: Collection[str], **more: Any) -> Any:
    """A ``LoraConfig`` of what the recipe asks for, on layers whose names end in ``targets``."""
    from peft import LoraConfig

    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=sorted(targets),
        task_type="CAUSAL_LM",
        **more,
    )


def add_adapter(model: nn.Module, spec: LoraSpec, *, name: str = NAME) -> nn.Module:
    """Freeze a transformers model and give it an adapter in float32 that changes nothing yet.
    A ``name`` of its own lets it stand beside others, of which PEFT computes with the active one.

    Raises:
        TrainerError: the model has none of the matrices that the recipe names.
    """
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    # Of a model that it knows PEFT would take the names of linear layers for those of experts, and
    # put an adapter on these and on routers; of a module that has one in it, it knows nothing.
    inside = nn.ModuleDict({"model": model})
    try:
        inject_adapter_in_model(peft_config(spec, _targets(model, spec)), inside, adapter_name=name)
    except ValueError as error:
        raise TrainerError(
            f"PEFT puts no adapter into {type(model).__name__}: {error}",
            hint="set training.lora.target_modules to matrices that it has, or to all-linear",
        ) from error
    if spec.experts:
        _adapt_experts(model, spec)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    for layer in _layers(model):
        layer.cast_input_dtype_enabled = False  # it would keep a float32 copy of every input
    return model


def _targets(model: Any, spec: LoraSpec) -> Collection[str]:
    if "all-linear" not in spec.target_modules:
        return spec.target_modules
    output = model.get_output_embeddings()
    named = model.named_modules()
    return {name for name, part in named if isinstance(part, nn.Linear) and part is not output}


def _adapt_experts(model: nn.Module, spec: LoraSpec) -> None:
    layers = list(experts_in(model))
    if not layers or not all(map(can_adapt, layers)):
        why = "lie in tensors of another form" if layers else "are none"
        raise TrainerError(
            f"the experts of {type(model).__name__} {why}: no adapter is put on them",
            hint="set training.lora.experts: false",
        )
    for experts in layers:
        adapt(experts, spec)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Let the model be what it was before its adapter, for passes without gradients.

    PEFT's own way would say of the adapter that it needs no gradients, which FSDP2 may keep.
    """
    for layer in _layers(model):
        layer.set_scale(NAME, 0)
    for adapter in _expert_adapters(model):
        adapter.active = False
    try:
        yield
    finally:
        for layer in _layers(model):
            layer.set_scale(NAME, 1)
        for adapter in _expert_adapters(model):
            adapter.active = True


def published_name(name: str) -> str:
    """What a tensor of a model with PEFT's layers is called in versions and by the base model."""
    return re.sub(rf"(\.lora_[AB])\.{NAME}\.", r"\1.", name.replace(".base_layer.", "."))


def _layers(model: nn.Module) -> Iterator[Any]:
    from peft.tuners.lora import LoraLayer

    return (module for module in model.modules() if isinstance(module, LoraLayer))


def _expert_adapters(model: nn.Module) -> Iterator[ExpertAdapter]:
    return (module for module in model.modules() if isinstance(module, ExpertAdapter))
