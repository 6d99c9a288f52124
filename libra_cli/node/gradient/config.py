"""The ``config.json`` of a gradient worker, which the controller writes: one for all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.config.training import TrainingSpec


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
    cp_size: int = 1
    """Neighbouring ranks that compute a micro-batch together, each its part of the tokens."""
    ep_size: int = 1
    """Neighbouring ranks of a replica that hold other experts of each layer."""
    fp32_lm_head: bool = False
    """Whether the output layer gives logits of fp32 where the model computes in bfloat16."""

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
