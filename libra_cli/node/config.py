"""What the trainer is told at start: the JSON file that ``core.commands`` wrote for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.recipe import TrainingSpec


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """One trainer process's orders; the same on every rank but for the paths of its host."""

    run_id: str
    model_dir: str
    weights_dir: str
    checkpoint_dir: str
    port: int
    world_size: int
    trainer_epoch: int
    seed: int
    dtype: str
    temperature: float
    group_size: int
    max_len: int
    keep_versions: int
    training: TrainingSpec
    resume: str | None
    probe_tokens: int

    @classmethod
    def load(cls, path: Path) -> TrainerConfig:
        """Read the file; a missing or unknown key is a ``TypeError`` that names it."""
        values: dict[str, Any] = json.loads(path.read_text())
        values["training"] = TrainingSpec.model_validate(values["training"])
        return cls(**values)

    @property
    def versions(self) -> Path:
        """Where this run's weight versions are on this host."""
        return Path(self.weights_dir) / self.run_id
