"""The ``config.json`` of the trainer, which the controller writes: one for all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.config.training import TrainingSpec


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """The trainer's settings. Names are those of the recipe, directories are on its hosts."""

    run_id: str
    model_dir: str
    weights_dir: str
    """Directory in whose ``<run_id>/`` versions are published."""
    checkpoint_dir: str
    """Directory in which this host's part of every checkpoint is written."""
    socket: str
    """Path of the Unix socket on which rank 0 answers the controller."""
    world_size: int
    trainer_incarnation: int
    """Number of the trainer's incarnation; part of every version's name."""
    seed: int
    dtype: str
    """``float32`` or ``bfloat16``, in which versions are published."""
    temperature: float
    training: TrainingSpec
    max_len: int
    """Most tokens of a trajectory."""
    dp_shard_size: int | None = None
    """Ranks that hold one replica together where the model is sharded; None is all of them."""
    cp_size: int = 1
    """Neighbouring ranks that compute a micro-batch together, each its part of the tokens."""
    ep_size: int = 1
    """Neighbouring ranks of a replica that hold other experts of each layer."""
    memory_share: float | None = None
    """The most that torch may take of the GPU's memory, which a server has a share of too; None:
    whatever is free."""
    fp32_lm_head: bool = False
    """Whether the output layer gives logits of fp32 where the model computes in bfloat16."""
    steps: int = 0
    """Steps of the run, at which schedules of the learning rate end that are not constant."""
    resume: str | None = None
    """The checkpoint to resume from: this host's directory of it, which need not be there."""
    checkpoint_urls: tuple[str, ...] = ()
    """URLs at which other hosts give what this one lacks of that checkpoint."""
    probe_tokens: int = 64
    keep_versions: int = 2

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainerConfig:
        """Parse a ``config.json``; unknown and missing keys are errors, in ``training`` too."""
        return cls(**{**values, "training": TrainingSpec.model_validate(values["training"])})

    @property
    def versions(self) -> Path:
        """The directory in which this run's version directories appear."""
        return Path(self.weights_dir) / self.run_id
