"""Loads a published weight version into the fp32 parameters of a gradient worker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from libra_cli.config.errors import TrainerError
from libra_cli.node.model.policy import PolicyModel
from libra_cli.node.model.weight_names import TensorGroup
from libra_cli.node.weights.chunks import MANIFEST


def load_version(policy: PolicyModel, directory: Path) -> float:
    """*Collective.* Load a version and compare the policy with the trainer on its probe.

    Each rank reads its shard of every tensor.

    Returns:
        The mean absolute difference of log-probabilities, in nats.

    Raises:
        TrainerError: the version is incomplete or of another model; raised on all ranks alike.
    """
    problem, manifest = "", {}
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        groups = policy.published()
        problem = _misfit(groups, manifest["tensors"])
        if not problem:
            _read(policy, groups, manifest["tensors"], directory)
    except Exception as error:  # noqa: BLE001  every rank must hear of it, or the others would wait
        problem = f"cannot be read: {error!r}"
    problems = [one for one in policy.gather(problem) if one]
    if problems:
        raise TrainerError(f"{directory}: {problems[0]}")
    theirs: list[float] = manifest["probe"]["logprobs"]
    ours = policy.logprobs_of(manifest["probe"]["token_ids"])
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(theirs)


def _misfit(groups: Sequence[TensorGroup], tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """Say why the version is not of this model; empty if it is."""
    shapes = {name: shape for group in groups for name, shape in group.disk.items()}
    for name in sorted(shapes.keys() ^ tensors.keys()):
        return f"{name} is in the " + (
            "version, not in the model" if name in tensors else "model, not in the version"
        )
    for name, shape in shapes.items():
        if list(shape) != list(tensors[name]["shape"]):
            return f"{name} is {tensors[name]['shape']} there and {list(shape)} here"
    return ""


def _read(
    policy: PolicyModel,
    groups: Sequence[TensorGroup],
    tensors: Mapping[str, Mapping[str, Any]],
    directory: Path,
) -> None:
    named = policy.named_once()
    with ExitStack() as stack, torch.no_grad():
        files = {
            name: stack.enter_context(safe_open(directory / name, framework="pt"))
            for name in {str(about["file"]) for about in tensors.values()}
        }
        slices = {
            name: files[str(about["file"])].get_slice(name) for name, about in tensors.items()
        }
        for group in groups:
            if group.conversion is None:
                _put(policy, named[group.memory[0]], slices[next(iter(group.disk))])
                continue
            whole = group.to_memory({name: slices[name][...] for name in group.disk})
            for name, tensor in whole.items():
                _put(policy, named[name], tensor)


def _put(policy: PolicyModel, target: Tensor, source: Any) -> None:
    """Copy a tensor, or the part of a file that is one; of it what this rank holds."""
    if isinstance(target, DTensor):
        start, stop = policy.own_rows(target)
        target.to_local().copy_(source[start:stop])
    else:
        target.copy_(source[...])
