"""What a rank of the trainer holds at the worst moment, by torch's memory tracker.

Tensors are fake and so is the process group: nothing is allocated and nothing computed, but every
operation of forward, backward and update of the trainer's own code is run, sharded as on GPUs.
Where ranks share a pass, it is the first of them that counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3Config

from libra_cli.config.training import TrainingSpec
from libra_cli.core.costs.architecture import PUBLISHED, DenseTransformer
from libra_cli.core.costs.mixture_transformer import Checkpointing
from libra_cli.node.batch.samples import TokenSample
from libra_cli.node.model import sharding
from libra_cli.node.model.activations import checkpoint_activations
from libra_cli.node.model.batching import collate
from libra_cli.node.model.context_parallel import ContextGroup, context_group
from libra_cli.node.model.packed_attention import attention_of
from libra_cli.node.model.scoring import ScoringModel
from libra_cli.node.model.tiled_mlp import tile_mlp
from libra_cli.node.trainer.optimizer import optimizer_of

CPU = torch.device("cpu")
TOKENS = 8192
MODELS = {name: PUBLISHED[f"Qwen3-{name}"] for name in ("0.6B", "1.7B", "8B", "14B", "32B")}


def config_of(shape: DenseTransformer) -> Any:
    sizes = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query // 128,
        "num_key_value_heads": shape.key // 128,
        "head_dim": 128,
        "tie_word_embeddings": shape.tied,
    }
    if shape.scored_heads:
        return Gemma2Config(**sizes, final_logit_softcapping=None)
    return Qwen3Config(**sizes)


@contextlib.contextmanager
def fake_world(
    size: int, cp_size: int = 1
) -> Iterator[tuple[DeviceMesh | None, ContextGroup | None]]:
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    # Before tensors are fake: it reads its own.
    mesh = sharding.mesh_of(CPU, shards=size, replicas=1) if size > 1 else None
    context = context_group(CPU, cp_size)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield mesh, context
    finally:
        dist.destroy_process_group()


def trajectories(tokens: int) -> list[TokenSample]:
    """Four, of which every token but the first is generated."""
    length = tokens // 4
    mask: NDArray[np.int8] = np.ones(length, dtype=np.int8)
    mask[0] = 0
    ids: NDArray[np.int32] = np.zeros(length, dtype=np.int32)
    logprobs: NDArray[np.float32] = np.zeros(length, dtype=np.float32)
    return [TokenSample(0, member, ids, logprobs, mask, 0.0, False) for member in range(4)]


@dataclass(frozen=True)
class Tracked:
    """Bytes that a rank holds at the worst moment."""

    step: float
    """Of a whole step, gradients of an earlier micro-batch being there."""
    update: float
    """Of the optimizer's step alone."""


def built(shape: DenseTransformer, mesh: DeviceMesh | None) -> Any:
    model = AutoModelForCausalLM.from_config(
        config_of(shape), dtype=torch.float32, attn_implementation=attention_of(config_of(shape))
    )
    if mesh is not None:
        sharding.shard(model, mesh, bf16=True)
    return model


def tracked(
    shape: DenseTransformer,
    world: int,
    choice: Checkpointing,
    mesh: DeviceMesh | None,
    training: TrainingSpec,
    context: ContextGroup | None = None,
    tokens: int = TOKENS,
) -> Tracked:
    model = built(shape, mesh)
    # The tracker wants parameters that may have a gradient; under no_grad none is computed.
    first = built(shape, mesh).eval() if training.kl_coef else None
    model.train()
    offload = training.activation_offload
    checkpoint_activations(model, choice, on_gpu=offload, offload=offload)
    if training.tiled_mlp:
        tile_mlp(model)
    parameters = list(model.parameters())
    matrices = [one for one in model.model.layers.parameters() if one.ndim == 2]
    optimizer = optimizer_of(training, parameters, matrices)
    optimizer.param_groups[0]["foreach"] = True  # as it is on GPUs
    for one in parameters:
        one.grad = torch.zeros_like(one)
    optimizer.step()  # the first time, how to shard each operation is found on whole tensors
    trackers = [MemTracker() for _ in range(2)]
    for tracker in trackers:
        tracker.track_external(model, optimizer, *([first] if first is not None else []))
    with trackers[1]:
        optimizer.step()
    scoring = ScoringModel(model, model, CPU, context)
    batch = collate(trajectories(tokens), CPU)
    narrow = torch.autocast("cpu", torch.bfloat16) if world == 1 else contextlib.nullcontext()
    reference = None if first is None else ScoringModel(first, first, CPU)
    with trackers[0]:
        with narrow:
            if reference is not None:
                with torch.no_grad():
                    reference.logprobs(batch.request, temperature=1.0)
            logprobs, *_ = scoring.logprobs(batch.request, temperature=1.0)
        logprobs.sum().backward()
        del logprobs
        optimizer.step()
    peaks = [next(iter(one.get_tracker_snapshot("peak").values())) for one in trackers]
    return Tracked(*(float(peak["Total"]) for peak in peaks))


LAYERS = 4
"""Of true width, where whole models take minutes."""
