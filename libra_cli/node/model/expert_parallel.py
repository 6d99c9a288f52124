"""Expert parallelism: a rank holds some experts of each layer, and tokens travel to their experts.

The ranks that share a replica stand in rows of ``ep_size`` neighbours. A row holds every expert of
a layer once, E / ep_size on each rank; the ranks of one column hold the same experts and share
their states, as all ranks share those of the rest of the model (FSDP2)::

    rank        0     1     2     3          4 ranks, ep_size 2, 8 experts in a layer
    experts    0-3   4-7   0-3   4-7         that it computes with
    of these   0-1   4-5   2-3   6-7         whose states it holds

So no rank gathers more than E / ep_size experts of a layer. In a forward pass each token is sent to
the ranks of its row that have its experts and comes back (all-to-all, of uneven sizes), and so are
gradients on the way back.

transformers has both parts ("grouped_gemm" and "ep_dispatch_experts" of its ``distributed``), and
here they are put on the mesh of the trainer: transformers' own loading makes a mesh that has no
replicas. Gradients of an expert are summed over the tokens of all ranks, while FSDP2 averages over
a column alone; FSDP2's factor for that is applied twice where a column has one rank (torch 2.13),
so they are divided in a hook.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from libra_cli.config.errors import TrainerError
from libra_cli.node.model.expert_adapter import experts_in

ROW = "ep"
"""The dimension of the mesh along which experts differ."""


def mesh_of_experts(
    device: torch.device, *, shards: int, replicas: int, ep_size: int
) -> DeviceMesh | None:
    """*Collective.* The ranks of all replicas in rows of ``ep_size``; None if these are of one."""
    if ep_size == 1:
        return None
    sizes = (replicas, shards // ep_size, ep_size)
    return init_device_mesh(
        device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard_in_ep", ROW)
    )


def part_experts(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Give each rank its experts, and shard their states; ``model`` is on the meta device.

    Raises:
        TrainerError: the model has no experts, or not a multiple of the ranks of a replica.
    """
    layers = list(experts_in(model))
    if not layers:
        raise TrainerError(
            f"{type(model).__name__} has no experts that ranks could part (training.ep_size)",
            hint="set training.ep_size to 1",
        )
    replicas, column, row = mesh.shape
    for experts in layers:
        if not hasattr(experts, "_is_expert_parallel") or experts.num_experts % (column * row):
            raise TrainerError(
                f"{experts.num_experts} experts of {type(model).__name__} cannot be parted over "
                f"{column * row} ranks (training.ep_size)",
                hint="set training.ep_size to 1",
            )
        for part in experts.modules():
            for name, _ in list(part.named_parameters(recurse=False)):
                ALL_PARALLEL_STYLES["grouped_gemm"].shard_param(part, name, mesh[ROW])
        ALL_PARALLEL_STYLES["ep_dispatch_experts"].install_forward(experts, mesh[ROW])
        names = ("dp_replicate", "dp_shard_in_ep") if replicas > 1 else ("dp_shard_in_ep",)
        fully_shard(experts, mesh=mesh[names], mp_policy=policy)
        experts.set_all_reduce_hook(partial(_divide, row))


def _divide(row: int, gradients: Tensor) -> None:
    gradients.div_(row)


def is_parted(tensor: Any) -> bool:
    """Whether a tensor has experts, of which ranks of a row hold others."""
    return isinstance(tensor, DTensor) and ROW in (tensor.device_mesh.mesh_dim_names or ())
