"""The memory law of a trainer's rank against torch's memory tracker on the trainer's own code.

Tensors are fake and so is the process group: nothing is allocated and nothing computed, but every
operation of forward, backward and update is run, sharded as on GPUs. Where ranks share a pass, it
is the first of them that counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3Config  # noqa: E402

from libra_cli.config.training import TrainingSpec  # noqa: E402
from libra_cli.core.costs.architecture import PUBLISHED, DenseTransformer  # noqa: E402
from libra_cli.core.costs.memory import rank_memory  # noqa: E402
from libra_cli.core.costs.mixture_transformer import Checkpointing  # noqa: E402
from libra_cli.node.batch.samples import TokenSample  # noqa: E402
from libra_cli.node.model import sharding  # noqa: E402
from libra_cli.node.model.activations import checkpoint_activations  # noqa: E402
from libra_cli.node.model.batching import collate  # noqa: E402
from libra_cli.node.model.context_parallel import ContextGroup, context_group  # noqa: E402
from libra_cli.node.model.packed_attention import attention_of  # noqa: E402
from libra_cli.node.model.scoring import ScoringModel  # noqa: E402
from libra_cli.node.model.tiled_mlp import tile_mlp  # noqa: E402
from libra_cli.node.trainer.optimizer import optimizer_of  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
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
WHOLE: list[tuple[str, int, Checkpointing]] = [("0.6B", 8, "full")]
FEW: list[tuple[str, int, Checkpointing]] = [
    ("0.6B", 1, "full"),
    ("8B", 8, "full"),
    ("14B", 16, "full"),
    ("0.6B", 8, "none"),
    ("1.7B", 8, "selective"),
]
MORE: list[tuple[str, int, Checkpointing]] = [
    (model, world, "full")
    for model in MODELS
    for world in (1, 8)
    if (model, world, "full") not in FEW
] + [("0.6B", 1, "selective"), ("0.6B", 1, "none"), ("8B", 8, "selective"), ("8B", 8, "none")]


@pytest.mark.integration
@pytest.mark.nightly
@pytest.mark.parametrize(("model", "world", "choice"), WHOLE)
def test_the_law_is_within_15_percent_of_what_torch_counts(
    model: str, world: int, choice: Checkpointing
):
    agrees(MODELS[model], world, choice)


@pytest.mark.parametrize(
    ("model", "world", "choice"),
    [*FEW, *(pytest.param(*row, marks=pytest.mark.nightly) for row in MORE)],
)
def test_the_law_holds_for_four_layers_of_true_width(model: str, world: int, choice: Checkpointing):
    agrees(replace(MODELS[model], layers=LAYERS), world, choice, within=0.10)


@pytest.mark.parametrize(
    ("model", "world", "training"),
    [
        ("1.7B", 1, {"optimizer": "muon", "sharding": "ddp"}),
        pytest.param("8B", 8, {"optimizer": "adamw_offload"}, marks=pytest.mark.nightly),
        pytest.param("1.7B", 1, {"kl_coef": 0.1}, marks=pytest.mark.nightly),
        ("8B", 8, {"kl_coef": 0.1}),
    ],
)
def test_the_law_knows_what_optimizers_and_a_reference_model_take(
    model: str, world: int, training: dict[str, Any]
):
    agrees(replace(MODELS[model], layers=LAYERS), world, "full", **training)


def even_counts(group: ContextGroup, places: Any, tokens: int) -> list[int]:
    """As ``ContextGroup.counts`` of places that are spread evenly: fake tensors have no values."""
    part, last = divmod(len(places), group.size)
    return [part] * (group.size - 1) + [part + last]


class Elsewhere(saved_tensors_hooks):  # type: ignore[misc]  # torch is Any here
    """In place of ``save_on_cpu``: of a tensor that is on the host nothing is on the device."""

    def __init__(self, **_: Any) -> None:
        super().__init__(
            lambda tensor: (tensor.shape, tensor.dtype),
            lambda packed: torch.empty(packed[0], dtype=packed[1]),
        )


@pytest.mark.parametrize(
    ("model", "world", "cp_size", "tokens", "training"),
    [
        ("8B", 8, 4, 131072, {"activation_offload": True, "tiled_mlp": True}),
        pytest.param(*("8B", 8, 1, 32768, {"activation_offload": True}), marks=pytest.mark.nightly),
        pytest.param(*("14B", 8, 1, 32768, {"tiled_mlp": True}), marks=pytest.mark.nightly),
    ],
)
def test_the_law_knows_what_offload_and_tiles_free(
    model: str,
    world: int,
    cp_size: int,
    tokens: int,
    training: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ContextGroup, "counts", even_counts)
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", Elsewhere)
    shape = replace(MODELS[model], layers=2 * LAYERS)
    spec = TrainingSpec.model_validate(training)
    with fake_world(world, cp_size) as (mesh, context):
        counted = tracked(shape, world, "full", mesh, spec, context, tokens)
    said = rank_memory(
        shape, world=world, tokens=tokens, choice="full", cp_size=cp_size, **training
    )
    assert said.total == pytest.approx(counted.step, rel=0.10), said


LONG: list[tuple[str, int, int, int, Checkpointing]] = [
    ("8B", 8, 8, 65536, "full"),
    ("8B", 16, 16, 131072, "full"),  # of 8 heads of keys each is there twice
]
LONGER: list[tuple[str, int, int, int, Checkpointing]] = [
    ("14B", 8, 4, 131072, "full"),
    ("8B", 32, 32, 262144, "full"),
    ("0.6B", 8, 2, 65536, "full"),
    ("8B", 8, 4, 32768, "none"),
]


@pytest.mark.parametrize(
    ("model", "world", "cp_size", "tokens", "choice"),
    [*LONG, *(pytest.param(*row, marks=pytest.mark.nightly) for row in LONGER)],
)
def test_the_law_is_within_10_percent_where_ranks_share_a_long_pass(
    model: str,
    world: int,
    cp_size: int,
    tokens: int,
    choice: Checkpointing,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ContextGroup, "counts", even_counts)
    shape = replace(MODELS[model], layers=LAYERS)
    with fake_world(world, cp_size) as (mesh, context):
        counted = tracked(shape, world, choice, mesh, TrainingSpec(), context, tokens)
    said = rank_memory(shape, world=world, tokens=tokens, choice=choice, cp_size=cp_size)
    assert said.total == pytest.approx(counted.step, rel=0.10), said


@pytest.mark.parametrize(
    ("world", "choice"), [(8, "full"), (8, "none"), (1, "selective"), (1, "full")]
)
def test_the_law_is_within_10_percent_where_scores_are_capped(world: int, choice: Checkpointing):
    """To the model the row is one trajectory, for its layers cannot tell several from one."""
    shape = replace(MODELS["1.7B"], layers=LAYERS, vocabulary=32_000, scored_heads=16)
    with fake_world(world) as (mesh, _):
        counted = tracked(shape, world, choice, mesh, TrainingSpec())
    said = rank_memory(shape, world=world, tokens=TOKENS, choice=choice)
    assert said.total == pytest.approx(counted.step, rel=0.10), said


def agrees(
    shape: DenseTransformer,
    world: int,
    choice: Checkpointing,
    within: float = 0.15,
    **given: Any,
) -> None:
    training = TrainingSpec.model_validate(given)
    with fake_world(world) as (mesh, _):
        counted = tracked(shape, world, choice, mesh, training)
    reference = training.kl_coef > 0
    said = rank_memory(
        shape,
        world=world,
        tokens=TOKENS,
        choice=choice,
        optimizer=training.optimizer,
        reference=reference,
    )
    # To the tracker what is offloaded is on the device too: here both are the CPU.
    offloaded = training.optimizer == "adamw_offload"
    moments = shape.moment_bytes(training.optimizer) / world
    on_device = counted.step - moments * offloaded
    assert said.total == pytest.approx(on_device, rel=within), said
    if offloaded:
        return
    # Weights and gradients in float32, moments, and what the update takes beside them.
    states = 8 * shape.parameters + shape.moment_bytes(training.optimizer)
    beside = {"adamw": 4 * shape.parameters, "muon": 4 * shape.outer_parameters}
    whole = states + beside[training.optimizer] + 4 * shape.parameters * reference
    assert whole / world == pytest.approx(counted.update, rel=0.02)
