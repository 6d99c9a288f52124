"""Shards a model with FSDP2 (torch's ``fully_shard``), the same way over gloo and NCCL.

accelerate's FSDP2 plugin works on accelerator devices only, so it cannot run where the tests run.
Here accelerate makes the process group and the mesh, with the names of its ``ParallelismConfig``,
and this module shards over it: ``dp_shard_size`` neighbouring ranks hold a copy of the states
together, and there are ``dp_replicate_size`` copies. Only rank 0 reads the model's files; the other
ranks begin on the meta device and receive their shards, so a host needs memory for one copy of the
model and not for one per GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from libra_cli.node.model import messages
from libra_cli.node.model.expert_parallel import part_experts


def mesh_of(device: torch.device, *, shards: int, replicas: int) -> DeviceMesh:
    """*Collective.* Return the mesh of the world: ``replicas`` rows of ``shards`` ranks each."""
    if shards == replicas == 1:  # accelerate makes none of one rank
        return init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
    sizes = {"dp_replicate_size": replicas, "dp_shard_size": shards}
    # Said and not left out: what is left out is taken from the environment.
    config = ParallelismConfig(**sizes, tp_size=1, cp_size=1, sp_size=1)
    return config.build_device_mesh(device.type)


def load_sharded(
    read: Callable[[], nn.Module],
    empty: Callable[[], nn.Module],
    *,
    device: torch.device,
    mesh: DeviceMesh,
    group: dist.ProcessGroup | None,
    bf16: bool,
    experts: DeviceMesh | None = None,
) -> nn.Module:
    """*Collective.* Return the model with its parameters sharded over the mesh.

    ``read`` loads the model on rank 0; ``empty`` makes the same model without weights.
    """
    source: nn.Module | None = read() if dist.get_rank() == 0 else None
    with torch.device("meta"):
        model = empty()
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    shard(model, mesh, bf16=bf16, experts=experts)
    model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, source.state_dict() if source is not None else {}, options=options)
    _copy_buffers(source, model, group)
    return model


def shard(
    model: nn.Module, mesh: DeviceMesh, *, bf16: bool, experts: DeviceMesh | None = None
) -> None:
    """Shard a model in place: one unit for each transformer layer, and one for the rest; with
    ``experts``, a mesh of ``expert_parallel``, one for the experts of each layer too."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        # Gradients of many short trajectories cancel; bf16 sums over ranks would lose them.
        reduce_dtype=torch.float32 if bf16 else None,
    )
    if experts is not None:
        part_experts(model, experts, policy)
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _copy_buffers(
    source: nn.Module | None, model: nn.Module, group: dist.ProcessGroup | None
) -> None:
    """Copy the buffers that no state dict has (rotary frequencies), lost by ``to_empty``."""
    values: dict[str, Tensor] = {} if source is None else dict(source.named_buffers())
    if group is not None:
        values = messages.broadcast(values, group)
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])
