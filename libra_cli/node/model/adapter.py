"""Low-rank adapters in a model, by PEFT: which parameters are trained, and what they are called.

PEFT puts layers of its own in the place of the linear layers and leaves the model what it is
otherwise, so sharding, activation checkpointing and scoring know nothing of adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from libra_cli.config.errors import TrainerError
from libra_cli.config.training import LoraSpec

NAME = "default"
"""PEFT's own name for a model's only adapter."""


def peft_config(spec: LoraSpec, **more: Any) -> Any:
    """A ``LoraConfig`` of what the recipe asks for."""
    from peft import LoraConfig

    targets = list(spec.target_modules)
    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
        **more,
    )


def add_adapter(model: nn.Module, spec: LoraSpec) -> nn.Module:
    """Freeze a transformers model and give it an adapter in float32 that changes nothing yet.

    Raises:
        TrainerError: the model has none of the matrices that the recipe names.
    """
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    try:
        inject_adapter_in_model(peft_config(spec), model, adapter_name=NAME)
    except ValueError as error:
        raise TrainerError(
            f"PEFT puts no adapter into {type(model).__name__}: {error}",
            hint="set training.lora.target_modules to matrices that it has, or to all-linear",
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    for layer in _layers(model):
        layer.cast_input_dtype_enabled = False  # it would keep a float32 copy of every input
    return model


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Let the model be what it was before its adapter, for passes without gradients.

    PEFT's own way would say of the adapter that it needs no gradients, which FSDP2 may keep.
    """
    for layer in _layers(model):
        layer.set_scale(NAME, 0)
    try:
        yield
    finally:
        for layer in _layers(model):
            layer.set_scale(NAME, 1)


def published_name(name: str) -> str:
    """What a tensor of a model with PEFT's layers is called in versions and by the base model."""
    return re.sub(rf"(\.lora_[AB])\.{NAME}\.", r"\1.", name.replace(".base_layer.", "."))


def _layers(model: nn.Module) -> Iterator[Any]:
    from peft.tuners.lora import LoraLayer

    return (module for module in model.modules() if isinstance(module, LoraLayer))
