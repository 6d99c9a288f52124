"""The memory law of a trainer's rank against torch's memory tracker on the trainer's own code.

``tests.tracked_memory`` says how it counts without a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402

from libra_cli.config.training import TrainingSpec  # noqa: E402
from libra_cli.core.costs.architecture import DenseTransformer  # noqa: E402
from libra_cli.core.costs.memory import rank_memory  # noqa: E402
from libra_cli.core.costs.mixture_transformer import Checkpointing  # noqa: E402
from libra_cli.node.model.context_parallel import ContextGroup  # noqa: E402
from tests.tracked_memory import LAYERS, MODELS, TOKENS, fake_world, tracked  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
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
