"""``config.json`` of the trainer: written by the controller, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.recipe import TrainingSpec


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Names as in the recipe; directories are paths on the trainer's hosts."""

    run_id: str
    model_dir: str
    weights_dir: str
    """Versions go to ``<weights_dir>/<run_id>/``."""
    checkpoint_dir: str
    """With ``fsdp2`` every rank writes there, so several hosts must share it."""
    port: int
    world_size: int
    trainer_epoch: int
    """Generation number of the trainer process; part of every version's name."""
    seed: int
    dtype: str
    """``float32`` or ``bfloat16``; what versions are published in."""
    temperature: float
    training: TrainingSpec
    group_size: int
    max_len: int
    resume: str | None = None
    """A checkpoint directory."""
    probe_tokens: int = 64
    keep_versions: int = 2

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainerConfig:
        """Unknown and missing keys are errors, here and in ``training``."""
        return cls(**{**values, "training": TrainingSpec.model_validate(values["training"])})

    @property
    def versions(self) -> Path:
        """Where this run's version directories appear."""
        return Path(self.weights_dir) / self.run_id
