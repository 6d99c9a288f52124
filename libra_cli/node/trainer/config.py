"""``config.json`` of the trainer and of a gradient worker: written by the controller, the same on
every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from libra_cli.config.recipe import TrainingSpec


class PolicyConfig(Protocol):
    """What both need to compute gradients."""

    @property
    def model_dir(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def training(self) -> TrainingSpec: ...


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
    trainer_incarnation: int
    """Generation number of the trainer process; part of every version's name."""
    seed: int
    dtype: str
    """``float32`` or ``bfloat16``; what versions are published in."""
    temperature: float
    training: TrainingSpec
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


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A gradient worker: one slot's own world, on one host."""

    run_id: str
    slot: str
    incarnation: int
    """Generation number of the slot's assignment; every answer to the core carries it."""
    model_dir: str
    port: int
    """On the loopback, for the controller."""
    side_bind: str
    """Address that the core's hosts reach; every route there demands the run's token."""
    side_port: int
    world_size: int
    seed: int
    temperature: float
    training: TrainingSpec
    max_len: int
    shm_dir: str
    """Where gradients wait to be fetched; memory-backed."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> WorkerConfig:
        """Unknown and missing keys are errors, here and in ``training``."""
        return cls(**{**values, "training": TrainingSpec.model_validate(values["training"])})

    @property
    def outbox(self) -> Path:
        """This worker's own directory in ``shm_dir``; what an earlier one left there is removed."""
        return Path(self.shm_dir) / f"{self.run_id}-{self.slot.replace('/', '-')}"
