"""The settings with which a model computes gradients, in the trainer and in a gradient worker."""

from __future__ import annotations

from typing import Protocol

from libra_cli.config.training import TrainingSpec


class PolicyConfig(Protocol):
    """What ``PolicyModel`` reads of a configuration, be it the trainer's or a gradient worker's."""

    @property
    def model_dir(self) -> str:
        """Hugging Face directory of the model on this host."""

    @property
    def world_size(self) -> int:
        """The number of ranks that the plan has."""

    @property
    def seed(self) -> int:
        """The seed of all random generators of every rank."""

    @property
    def temperature(self) -> float:
        """Temperature with which rollouts sample, and with which the loss scales logits."""

    @property
    def dp_shard_size(self) -> int | None:
        """Ranks that hold one replica together where the model is sharded; None is all of them."""

    @property
    def cp_size(self) -> int:
        """Neighbouring ranks that compute a micro-batch together, each its part of the tokens."""

    @property
    def ep_size(self) -> int:
        """Neighbouring ranks of a replica that hold other experts of each layer, where the model is
        sharded."""

    @property
    def max_len(self) -> int:
        """Most tokens of a trajectory."""

    @property
    def fp32_lm_head(self) -> bool:
        """Whether the output layer gives logits of fp32 where the model computes in bfloat16."""

    @property
    def training(self) -> TrainingSpec:
        """The section ``training`` of the recipe."""
