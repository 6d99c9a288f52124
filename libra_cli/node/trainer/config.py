"""The ``config.json`` of the trainer and of a gradient worker.

The controller writes it; it is the same for every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from libra_cli.config.training import TrainingSpec


class PolicyConfig(Protocol):
    """The settings that both need to compute gradients."""

    @property
    def model_dir(self) -> str:
        """Hugging Face directory of the model on this host."""

    @property
    def world_size(self) -> int:
        """The number of ranks that the plan has."""

    @property
    def seed(self) -> int:
        """Seed of every random state."""

    @property
    def temperature(self) -> float:
        """Temperature with which rollouts sample, and with which the loss scales logits."""

    @property
    def dp_shard_size(self) -> int | None:
        """Ranks that hold one replica together where the model is sharded; None is all of them."""

    @property
    def max_len(self) -> int:
        """The longest trajectory, in tokens."""

    @property
    def training(self) -> TrainingSpec:
        """The recipe's ``training``."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """The trainer's settings. Names are those of the recipe, directories are on its hosts."""

    run_id: str
    model_dir: str
    weights_dir: str
    """Versions are published in ``<weights_dir>/<run_id>/``."""
    checkpoint_dir: str
    """This host's part of every checkpoint is written there."""
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
    """The longest trajectory, in tokens."""
    dp_shard_size: int | None = None
    """Ranks that hold one replica together where the model is sharded; None is all of them."""
    steps: int = 0
    """Of the run: where schedules of the learning rate end that are not constant."""
    resume: str | None = None
    """The checkpoint to resume from: this host's directory of it, which need not be there."""
    checkpoint_urls: tuple[str, ...] = ()
    """Where other hosts give what this one lacks of it."""
    probe_tokens: int = 64
    keep_versions: int = 2

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainerConfig:
        """Parse a ``config.json``; unknown and missing keys are errors, in ``training`` too."""
        return cls(**{**values, "training": TrainingSpec.model_validate(values["training"])})

    @property
    def versions(self) -> Path:
        """Where this run's version directories appear."""
        return Path(self.weights_dir) / self.run_id


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A gradient worker's settings; it is a world of its own in one slot of one host."""

    run_id: str
    slot: str
    incarnation: int
    """Number of the slot's assignment; the trainer names it in every request."""
    model_dir: str
    socket: str
    """Path of the Unix socket on which rank 0 answers the controller."""
    side_bind: str
    """Address of the gradient server, which the trainer's hosts reach."""
    side_port: int
    world_size: int
    seed: int
    temperature: float
    training: TrainingSpec
    max_len: int
    shm_dir: str
    """A memory-backed directory for gradients that wait to be fetched."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> WorkerConfig:
        """Parse a ``config.json``; unknown and missing keys are errors, in ``training`` too."""
        return cls(**{**values, "training": TrainingSpec.model_validate(values["training"])})

    @property
    def dp_shard_size(self) -> None:
        """All ranks of a worker share a replica, or each of them has one."""
        return None

    @property
    def outbox(self) -> Path:
        """The slot's own directory in ``shm_dir``, which a new worker empties."""
        return Path(self.shm_dir) / f"{self.run_id}-{self.slot.replace('/', '-')}"
