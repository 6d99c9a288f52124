"""A trainer of one rank: what it holds, how quick it is, how long it stands still to publish."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from libra_cli.config.training import TrainingSpec
from libra_cli.core.costs.memory import rank_memory
from libra_cli.node.trainer import checkpoint
from libra_cli.node.trainer.config import TrainerConfig
from libra_cli.node.trainer.trainer import Trainer
from libra_cli.node.weights.publisher import Publisher
from libra_cli.node.weights.tensor_rows import whole
from libra_cli.node.weights.versions import VersionOnDisk
from tests.gpu.model import Size, batch, build
from tests.gpu.place import Place, require

LEARNING_RATE = 1e-6
VERSIONS = 3
FIRST_VALUES = 2**16
"""Values of each tensor by which gradients are compared."""
LORA = {"rank": 16, "alpha": 32}


def trainer(place: Place) -> dict[str, Any]:
    """Steps and versions of a trainer of one rank; leaves the model, versions and a gradient."""
    size = place.size
    build(size, place.model, place.device)
    one = make(place)
    torch.save(gradient_of(one, size), place.base / "gradient.pt")
    written: list[VersionOnDisk] = []
    publisher = _publisher(one, place.base / "versions", written)
    one.train(0, batch(size, 0, one.logprobs_of))  # the first has kernels to choose
    step_s, still_s, whole_s = list[float](), list[float](), list[float]()
    for version in range(VERSIONS):
        samples = batch(size, version, one.logprobs_of)
        peak_gib(place.device, anew=True)
        began = time.monotonic()
        one.train(version, samples)
        stepped = time.monotonic()
        publisher.stage(whole(one.whole_weights()), version=version, probe=one.probe())
        staged = time.monotonic()
        publisher.wait()
        step_s.append(stepped - began)
        still_s.append(staged - stepped)
        whole_s.append(time.monotonic() - stepped)
    peak = peak_gib(place.device)
    publisher.close()
    one.close()
    place.note("versions", [version.name for version in written])
    place.note("step_s", min(step_s))
    law = rank_memory(size.shape, world=1, tokens=size.tokens, choice="full").total / 2**30
    return {
        "tokens_per_s": size.tokens / min(step_s),
        "peak_gib": peak,
        "law_gib": law,
        "peak_of_law": peak / law,
        "still_s": min(still_s),
        "version_s": min(whole_s),
    }


def scored(place: Place, model: Path, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """What a trainer of this model says of each text's tokens but the first; it is gone then."""
    one = make(place, model=model)
    told = [one.logprobs_of(text) for text in texts]
    one.close()
    del one
    _free(place.device)
    return told


def lora(place: Place) -> Path:
    """The version that a trainer of an adapter publishes after a step."""
    one = make(place, {"learning_rate": 1e-3, "lora": LORA})
    one.train(0, batch(place.size, 0, one.logprobs_of))
    written: list[VersionOnDisk] = []
    publisher = _publisher(one, place.base / "adapters", written)
    publisher.stage(whole(one.whole_weights()), version=0, probe=one.probe())
    publisher.wait()
    publisher.close()
    one.close()
    del one, publisher
    _free(place.device)
    return place.base / "adapters" / written[0].name


def offload(place: Place) -> dict[str, Any]:
    """A step, a checkpoint and a step, beside a trainer that resumes and takes the last one."""
    training = {"optimizer": "adamw_offload", "learning_rate": 1e-4}
    root = place.base / "offload"
    first = make(place, training)
    first.train(0, batch(place.size, 0, first.logprobs_of))
    saved = checkpoint.save(first, root, ledger={"step": 1}, keep=1)
    peak_gib(place.device, anew=True)
    first.train(1, batch(place.size, 1, first.logprobs_of))
    steady = peak_gib(place.device)
    wanted = _values(first)
    first.close()
    del first
    _free(place.device)
    second = make(place, training)
    peak_gib(place.device, anew=True)
    checkpoint.load(second, saved)
    resumed = peak_gib(place.device)
    second.train(1, batch(place.size, 1, second.logprobs_of))
    equal = all(torch.equal(one, wanted[name]) for name, one in _values(second).items())
    second.close()
    return {
        "equal": equal,
        "steady_gib": steady,
        "resume_gib": resumed,
        "resume_peak_ratio": resumed / steady if steady else 0.0,
    }


def make(place: Place, training: Mapping[str, Any] | None = None, model: Path | None = None) -> Any:
    """A trainer of this process, in bfloat16, that recomputes layers whole."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    if place.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    size = place.size
    require(model or place.model)
    settings = {
        "learning_rate": LEARNING_RATE,
        "micro_batch_tokens": size.tokens,
        "activation_checkpointing": "full",
        **(training or {}),
    }
    return Trainer(config_of(place.base, settings, size.tokens, model=model))


def config_of(
    base: Path,
    training: Mapping[str, Any],
    max_len: int,
    *,
    model: Path | None = None,
    world: int = 1,
) -> TrainerConfig:
    """A trainer that publishes a model, or else ``base``'s, in bfloat16."""
    return TrainerConfig(
        run_id="run",
        model_dir=str(model or base / "model"),
        weights_dir=str(base / "weights"),
        checkpoint_dir=str(base / "checkpoints"),
        socket="",
        world_size=world,
        trainer_incarnation=1,
        seed=1,
        dtype="bfloat16",
        temperature=1.0,
        training=TrainingSpec.model_validate(training),
        max_len=max_len,
    )


def gradient_of(one: Trainer, size: Size) -> dict[str, Tensor]:
    """*Collective.* The first values of each tensor's gradient of the first batch; then none is
    left."""
    one.gradients_of(batch(size, 0, one.logprobs_of))
    found = {name: _first(parameter.grad) for name, parameter in one.parameters().items()}
    one.clear_gradients()
    return found


def apart(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Norm of the difference of two gradients over the norm of the second."""
    assert found.keys() == wanted.keys()
    differing = sum(float((found[name] - wanted[name]).norm() ** 2) for name in wanted)
    total = sum(float(one.norm() ** 2) for one in wanted.values())
    assert total > 0, "the trainer of one rank has computed no gradient"
    return float((differing / total) ** 0.5)


def peak_gib(device: str, *, anew: bool = False) -> float:
    """The most that torch has allocated on a GPU; 0 on a CPU. ``anew``: count from now on."""
    if device == "cpu":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    if anew:
        torch.cuda.reset_peak_memory_stats()
    return float(peak)


def _first(gradient: Tensor) -> Tensor:
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.flatten()[:FIRST_VALUES].float().cpu()


def _values(one: Trainer) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in one.whole_weights()}


def _free(device: str) -> None:
    """Give back the memory of a trainer that nothing names any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _publisher(one: Trainer, root: Path, written: list[VersionOnDisk]) -> Publisher:
    """Writes versions in the background; whoever waits for one is told of its failure."""
    return Publisher(
        root,
        trainer_incarnation=1,
        dtype=one.published_dtype,
        keep=VERSIONS,
        published=written.append,
        failed=lambda error: None,
        adapter=one.adapter_manifest(),
    )
