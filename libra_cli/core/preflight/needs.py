"""What a run needs of a host's memory, directory of weight versions and disk, in bytes.

Reckoned from the size of the model's files and the recipe:

- A version on a host is one copy in the number format that servers load; ``keep_versions`` of them
  and one that arrives are there at the same time. A gradient worker's gradients, as they are sent,
  lie beside them.
- Of a run that trains an adapter, versions, gradients and checkpoints have the adapter only; each
  rank has the model beside it, in the format that is served.
- A checkpoint has the float32 weights and both moments of AdamW; ``checkpoints_kept``, the
  best and the one being written, divided among the hosts that train. On the first of these are also
  the models that a run leaves at its end.
- Memory: the versions, unless they are on a disk, and what each process takes beside its GPU.
  Rank 0 reads the model for all ranks before it is sharded, and later its host's part of a version
  lies in page-locked memory.

The memory of GPUs is looked at in ``gpu_memory``.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.config.speculative import SpeculativeSpec
from libra_cli.core.costs.architecture import Architecture, architecture_of
from libra_cli.core.costs.draft_heads import HeadSize, head_of_files, mtp_layers
from libra_cli.core.costs.memory import CHECKPOINT_BYTES, CPU_SERVER_GIB
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.preflight.host_report import ModelFiles
from libra_cli.core.types import Plan, Pool, node_of

MIB, GIB = 2**20, 2**30
MOMENT_BYTES = 8
"""Bytes of a parameter in the memory of a host that has a replica, with ``adamw_offload``."""
TRAINED_BYTES = 16
"""Bytes of a parameter in a rank without a GPU: weight, both moments and a float32 gradient."""
RANK_BYTES = GIB
"""Bytes of a rank beside its states: torch and its libraries."""
LOCKED_ROUNDING = 4 / 3
"""Bytes of page-locked memory for a byte of a version: torch rounds each tensor up to a power of
two, which is a third more over sizes spread evenly between two powers."""
LEAST_VERSIONS = 256 * MIB
"""Bytes for versions of a model of unknown size, which is one that libra builds."""
FORMATS = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """Bytes that a run needs on a host."""

    memory: int
    versions: int
    """Bytes in the directory of weight versions."""
    checkpoint: int
    """Bytes on disk for the first checkpoint."""
    checkpoints: int
    """Bytes on disk for all that are kept and one being written, and for models made of them."""


def parameters_of(model: ModelFiles) -> float:
    """The number of parameters, by the size of the files and the format they are said to have."""
    config = model.config
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return model.weight_bytes / FORMATS.get(name, 2)


def draft_head(
    speculative: SpeculativeSpec | None,
    shape: Architecture,
    model: ModelFiles | None,
    head: ModelFiles | None,
) -> HeadSize | None:
    """Return the size of what drafts on servers; None if nothing does, or if it is not known."""
    if speculative is None or not speculative.has_head:
        return None
    if speculative.method == "mtp":
        return mtp_layers(model.config, shape) if model is not None else None
    try:
        return head_of_files(head.config, parameters_of(head)) if head is not None else None
    except (KeyError, TypeError, ValueError):
        return None


def _trained_of(recipe: Recipe, model: ModelFiles | None, parameters: float) -> float:
    """Parameters that are trained; of a model whose config.json says too little, all."""
    if model is None or recipe.training.lora is None:
        return parameters
    try:
        shape = architecture_of(model.config, recipe.model.path or "the model")
    except LibraError:
        return parameters
    return shape.with_adapter(recipe.training.lora).trained


def host_needs(
    recipe: Recipe,
    plan: Plan,
    node: NodeSpec,
    model: ModelFiles | None,
    head: ModelFiles | None = None,
) -> HostNeeds:
    """Return the bytes that the run needs on a node; ``model`` None counts as one of unknown size,
    ``head`` is the directory of what drafts.
    """
    parameters = parameters_of(model) if model else 0.0
    drafting = parameters_of(head) if head else 0.0
    trained = _trained_of(recipe, model, parameters)
    train = [slot for slot in plan.train if node_of(slot) == node.name]
    servers = [slot for slot, _ in plan.servers if node_of(slot) == node.name]
    gradient = [slot for slot in plan.gradient if node_of(slot) == node.name]
    served = FORMATS.get(recipe.model.dtype, 2 if node.gpus else 4)
    versions = int((recipe.weight_sync.keep_versions + 1) * served * trained)
    sent = FORMATS[recipe.training.worker_gradients]
    versions += int(len(gradient) * sent * trained)
    versions = max(versions, LEAST_VERSIONS)
    hosts = {node_of(slot) for slot in plan.train}
    checkpoint = int(CHECKPOINT_BYTES * trained / len(hosts)) if train else 0
    memory = 0 if recipe.weight_sync.directory else versions
    # Where servers sleep, workers come beside them.
    hybrid = {slot.id for slot in slots_of(recipe) if slot.pool is Pool.HYBRID}
    beside = [slot for slot in servers if slot in hybrid] if recipe.rollout.sleep else []
    ranks = train + gradient + beside
    memory += len(servers) * int(CPU_SERVER_GIB * GIB) + len(ranks) * RANK_BYTES
    if train and node.gpus and recipe.training.optimizer == "adamw_offload":
        memory += int(MOMENT_BYTES * trained)
    if node.gpus and node.name == node_of(plan.train[0]):
        read = FORMATS["bfloat16" if recipe.training.lora else "float32"] * parameters
        # It reads the model, and later copies versions.
        memory += int(max(read, LOCKED_ROUNDING * served * trained / len(hosts)))
    if not node.gpus:
        memory += len(servers) * int(served * (parameters + drafting) + recipe.rollout.kv_gib * GIB)
        frozen = served * parameters if recipe.training.lora else 0.0
        memory += len(ranks) * int(TRAINED_BYTES * trained + frozen)
    checkpoints = (recipe.training.checkpoints_kept + 2) * checkpoint
    if node.name == node_of(plan.train[0]):
        alone = recipe.training.lora and not recipe.training.export.merge
        exported = FORMATS["float32"] * trained if alone else served * parameters
        checkpoints += int(len(recipe.training.export.at_end) * exported)
    return HostNeeds(memory, versions, checkpoint, checkpoints)
