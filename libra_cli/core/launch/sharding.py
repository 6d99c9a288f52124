"""Which ranks of the trainer hold one replica of its states together, and what a rank then holds.

Sharded ranks on one host are one replica. On several hosts whose numbers of ranks are equal, each
host is a replica (hybrid sharding, arXiv 2304.11277): weights are gathered inside the hosts, and
between them go gradients alone, once a step. Where no host has the memory for that, or what it has
is not known, and where hosts are uneven, all ranks are one replica. ``training.dp_shard_size`` says
it otherwise. Of the ranks of a replica ``training.cp_size`` neighbours share each forward pass, and
so do those of a gradient worker; where it is null, as few as memory allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

from libra_cli.config.recipe import Recipe
from libra_cli.config.training import Optimizer, TrainingSpec
from libra_cli.core.costs.architecture import Architecture
from libra_cli.core.costs.memory import (
    GIB,
    USABLE_SHARE,
    MemoryUse,
    longest_context,
    offloaded_bytes,
    parting,
    rank_memory,
    shards_of,
    trainer_overhead_gib,
)
from libra_cli.core.costs.mixture_transformer import Checkpointing
from libra_cli.core.launch.process import NUMBER_BYTES, Dtype


@dataclass(frozen=True, slots=True)
class RankConditions:
    """What a rank's memory depends on beside the sizes of the model."""

    tokens: int
    """Tokens of the largest micro-batch, which ranks may share."""
    choice: Checkpointing
    width: int
    """Bytes of a number that is computed with."""
    optimizer: Optimizer
    reference: bool = False
    """Whether the first policy is kept beside the one that is trained."""
    cp_size: int | None = None
    """Ranks that share a forward pass, as ``training.cp_size``; None: as few as memory allows."""
    activation_offload: bool = False
    tiled_mlp: bool = False
    ep_size: int = 1
    """What the recipe says in ``training.ep_size``."""
    sharded: bool = False
    """Whether a rank that has a replica by itself uses FSDP2 too."""
    may_keep_more: bool = False
    """Whether ``choice`` is the one that takes least, and memory that is left decides (auto)."""
    alone: bool = False
    """Whether the rank is its whole world, and communicates with no other."""
    casts_head: bool = False
    """Whether logits are products of float32 copies: GPUs sum up those of bfloat16 in float32."""
    max_len: int | None = None
    """Tokens of the longest trajectory; None: ``tokens``."""

    @classmethod
    def of(cls, recipe: Recipe, *, on_gpu: bool, dtype: Dtype, ranks: int) -> RankConditions:
        """The conditions that a recipe asks for, in a world of ``ranks`` that computes in
        ``dtype``."""
        training = recipe.training
        lean = training.activation_offload or training.tiled_mlp
        return cls(
            tokens=max(training.micro_batch_tokens, recipe.model.max_len),
            choice=_choice(training.activation_checkpointing, on_gpu=on_gpu),
            width=NUMBER_BYTES[dtype],
            optimizer=training.optimizer,
            reference=training.needs.reference,
            cp_size=1 if recipe.model.images or training.compile else training.cp_size,
            activation_offload=training.activation_offload and on_gpu,
            tiled_mlp=training.tiled_mlp,
            ep_size=training.ep_size or 1,
            sharded=training.sharding == "fsdp2",
            may_keep_more=on_gpu and training.activation_checkpointing == "auto" and not lean,
            alone=ranks == 1,
            casts_head=recipe.model.fp32_lm_head and dtype != "float32" and not on_gpu,
            max_len=recipe.model.max_len,
        )

    def row(self, shape: Architecture) -> int:
        """Tokens of the largest row: a micro-batch, or one trajectory, where the model's layers
        cannot tell trajectories in a row from one another."""
        return (self.max_len or self.tokens) if shape.scored_heads else self.tokens

    def use(self, shape: Architecture, shards: int, sharing: int = 1) -> MemoryUse:
        """Return the memory of a rank that shares a replica's states with ``shards - 1`` others,
        and each forward pass with ``sharing - 1``.
        """
        return rank_memory(
            shape,
            world=shards,
            tokens=self.row(shape),
            choice=self.choice,
            width=self.width,
            optimizer=self.optimizer,
            reference=self.reference,
            cp_size=sharing,
            activation_offload=self.activation_offload,
            tiled_mlp=self.tiled_mlp,
            ep_size=self.parted(shape, shards),
            sharded=self.sharded,
            casts_head=self.casts_head,
        )

    def pinned_gib(self, shape: Architecture, shards: int, sharing: int = 1) -> float:
        """Return GiB of its host's memory that a rank locks for activations; 0 without offload."""
        if not self.activation_offload or self.choice == "none":
            return 0.0
        tokens = -(-self.row(shape) // sharing)
        sharded = self.sharded or shards > 1
        return offloaded_bytes(shape, sharded=sharded, tokens=tokens, width=self.width) / GIB

    def parted(self, shape: Architecture | None, shards: int) -> int:
        """How many neighbours of so many ranks that share a replica hold other experts of each
        layer; where nothing is known of the model (None) the recipe is right about it."""
        return parting(self.ep_size, shards, None if shape is None else shape.routed_experts)

    def rank_gib(self, shape: Architecture, shards: int, sharing: int = 1) -> float:
        """Return GiB of a rank as in ``use``, with what CUDA and NCCL take."""
        return self.use(shape, shards, sharing).total / GIB + self.overhead_gib

    @property
    def overhead_gib(self) -> float:
        """GiB of a rank for what CUDA and NCCL take, and for fragmentation."""
        return trainer_overhead_gib(alone=self.alone)

    def fit(self, shape: Architecture, shards: int, gpu_gib: float) -> bool:
        """Whether that fits a GPU of this size, however many ranks share a forward pass."""
        sharing = self.sharing(shape, shards, shards, gpu_gib)
        return self.rank_gib(shape, shards, sharing) <= USABLE_SHARE * gpu_gib

    def sharing(
        self, shape: Architecture | None, shards: int, ranks: int, gpu_gib: float = 0.0
    ) -> int:
        """Return how many of ``ranks`` neighbours share each forward pass: the greatest common
        divisor of ``cp_size`` and ``ranks``; where that is None the fewest with which a rank fits a
        GPU of ``gpu_gib``, or the most where none does. One where sizes are not known (None, 0).
        """
        if self.cp_size is not None:
            return gcd(self.cp_size, ranks)
        if shape is None or not gpu_gib:
            return 1
        degrees = self.degrees(shape, ranks)
        room = USABLE_SHARE * gpu_gib
        return next((n for n in degrees if self.rank_gib(shape, shards, n) <= room), degrees[-1])

    def degrees(self, shape: Architecture, ranks: int) -> list[int]:
        """Numbers of ranks that may share a forward pass, ascending; the recipe's, if it says."""
        if self.cp_size is not None:
            return [gcd(self.cp_size, ranks)]
        if not shape.splits_rows:
            return [1]
        return [n for n in range(1, ranks + 1) if ranks % n == 0 and shape.heads.divides(n)]

    def settled(
        self, shape: Architecture | None, shards: int, sharing: int, gpu_gib: float
    ) -> RankConditions:
        """The same with what a backward pass computes again once the GPUs are known: of ``auto``
        only what is between matrix products, where a rank that keeps these fits ``gpu_gib``.
        """
        if not self.may_keep_more or shape is None:
            return self
        faster = replace(self, choice="selective")
        fits = faster.rank_gib(shape, shards, sharing) <= USABLE_SHARE * gpu_gib
        return faster if fits else self

    def longest(self, shape: Architecture, shards: int, sharing: int, gpu_gib: float) -> int:
        """Tokens of the longest trajectory that a GPU of this size has the memory for."""

        def held(tokens: int) -> float:
            return replace(self, tokens=tokens, max_len=tokens).use(shape, shards, sharing).total

        return longest_context(held, (USABLE_SHARE * gpu_gib - self.overhead_gib) * GIB)


def is_sharded(training: TrainingSpec, *, on_gpu: bool) -> bool:
    """Whether ranks share their states, as ``node.model.policy`` decides it."""
    return training.sharding == "fsdp2" or (training.sharding == "auto" and on_gpu)


def dp_shard_size(training: TrainingSpec, ranks: Mapping[str, int], *, host_fits: bool) -> int:
    """Ranks of each replica of a sharded trainer with so many ranks on each node.

    ``host_fits``: a node's ranks are known to have the memory for a replica.
    """
    world, here = sum(ranks.values()), next(iter(ranks.values()))
    even = len(set(ranks.values())) == 1
    wanted = training.dp_shard_size
    if wanted is not None:
        whole = wanted % here == 0 or here % wanted == 0
        return wanted if even and whole and world % wanted == 0 else world
    return shards_of(world, here if even else world, host_fits=host_fits)


def _choice(given: str, *, on_gpu: bool) -> Checkpointing:
    match given:
        case "none" | "selective" | "full":
            return given
        case _:
            return "full" if on_gpu else "none"
