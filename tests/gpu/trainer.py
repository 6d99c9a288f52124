"""A trainer of one rank: what it holds, how quick it is, how long it stands still to publish."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from libra_cli.config.training import TrainingSpec
from libra_cli.core.costs.memory import rank_memory
from libra_cli.node.trainer.config import TrainerConfig
from libra_cli.node.trainer.trainer import Trainer
from libra_cli.node.weights.publisher import Publisher
from libra_cli.node.weights.tensor_rows import whole
from libra_cli.node.weights.versions import VersionOnDisk
from tests.gpu.model import Size, batch, build

LEARNING_RATE = 1e-6
VERSIONS = 3
MEMORY_ERROR = 0.15
"""How far from the law what torch allocates may be."""


def trainer(device: str, size: Size, base: Path) -> dict[str, Any]:
    """Steps and versions of a trainer of one rank; leaves the model and versions in ``base``."""
    build(size, base / "model", device)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    training = {
        "learning_rate": LEARNING_RATE,
        "micro_batch_tokens": size.tokens,
        "activation_checkpointing": "full",
    }
    one = Trainer(config_of(base, training, size.tokens))
    written: list[VersionOnDisk] = []
    failed: list[BaseException] = []
    publisher = Publisher(
        base / "versions",
        trainer_incarnation=1,
        dtype=one.published_dtype,
        keep=VERSIONS,
        published=written.append,
        failed=failed.append,
    )
    one.train(0, batch(size, 0))  # the first has kernels to choose
    step_s, still_s, whole_s = list[float](), list[float](), list[float]()
    for version in range(VERSIONS):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        one.train(version, batch(size, version))
        stepped = time.monotonic()
        publisher.stage(whole(one.whole_weights()), version=version, probe=one.probe())
        staged = time.monotonic()
        publisher.wait()
        step_s.append(stepped - began)
        still_s.append(staged - stepped)
        whole_s.append(time.monotonic() - stepped)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    publisher.close()
    one.close()
    (base / "names.json").write_text(json.dumps([version.name for version in written]))
    law = rank_memory(size.shape, world=1, tokens=size.tokens, choice="full").total
    return {
        "ok": not failed and (not peak or abs(peak / law - 1) <= MEMORY_ERROR),
        "tokens_per_s": size.tokens / min(step_s),
        "peak_gib": peak / 2**30,
        "law_gib": law / 2**30,
        "stands_still_s": min(still_s),
        "version_s": min(whole_s),
    }


def config_of(base: Path, training: dict[str, Any], max_len: int) -> TrainerConfig:
    """A trainer of one rank that publishes ``base``'s model in bfloat16."""
    return TrainerConfig(
        run_id="run",
        model_dir=str(base / "model"),
        weights_dir=str(base / "weights"),
        checkpoint_dir=str(base / "checkpoints"),
        socket="",
        world_size=1,
        trainer_incarnation=1,
        seed=1,
        dtype="bfloat16",
        temperature=1.0,
        training=TrainingSpec.model_validate(training),
        max_len=max_len,
    )
