"""One rank's part of the policy: the model, its optimizer, and what one step does to them.

Methods marked *collective* must be called by all ranks, in the same order.

Precision: parameters and optimizer state are fp32. With ``bfloat16`` the passes compute in bf16,
and versions are published in it. Sharding: ``ddp`` keeps a replica a rank, ``fsdp2`` shards
parameters, gradients and optimizer state. Both average gradients over the ranks, so each share's
loss is multiplied by their number: what comes out is the sum, as if there were one rank.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from libra_cli.errors import TrainerError
from libra_cli.node.batching import MicroBatch, collate, deal
from libra_cli.node.loss import LossSettings, group_advantages, grpo_loss, token_logprobs
from libra_cli.node.samples import Sample
from libra_cli.node.sharding import load_sharded
from libra_cli.node.trainer_config import TrainerConfig
from libra_cli.node.weights import Probe, check_names, probe_tokens

COLLECTIVE_TIMEOUT_S = 1800.0
"""No rank waits longer than this for another; a step or a checkpoint must fit in."""
SUMS = ("loss", "kl", "entropy", "clipped", "weight", "gap", "gap_tokens")
"""What is summed over tokens, micro-batches and ranks."""
T = TypeVar("T")


class Learner:
    """The policy on this rank. ``step`` is the number of optimizer steps taken so far."""

    def __init__(self, config: TrainerConfig) -> None:
        """*Collective.* Join the world, check it, load the model."""
        timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self._accelerator = Accelerator(kwargs_handlers=[timeout])
        self.rank = self._accelerator.process_index
        self.world = self._accelerator.num_processes
        check_world(self.rank, self.world, config.world_size)
        set_seed(config.seed)
        self.config = config
        self.step = 0
        # Commands and checkpoints are agreed on over gloo: an idle rank then burns no GPU, and a
        # rank that died is noticed at once.
        self.control = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
            if self.world > 1
            else None
        )
        self._device = self._accelerator.device
        on_gpu = self._device.type == "cuda"
        sharding = config.training.sharding
        self.sharded = self.world > 1 and (sharding == "fsdp2" or (sharding == "auto" and on_gpu))
        self.model = self._load()
        check_names(self._named_once(), Path(config.model_dir))
        self._forward = self._wrap(self.model, checkpointing=on_gpu)
        self._reference = self._frozen() if config.training.kl_coef > 0 else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.training.learning_rate,
            betas=config.training.betas,
            weight_decay=config.training.weight_decay,
        )

    def broadcast(self, value: T | None) -> T:
        """*Collective.* Rank 0's value; what the others give is ignored."""
        message = [value]
        if self.control is not None:
            dist.broadcast_object_list(message, src=0, group=self.control)
        return cast(T, message[0])

    def gather(self, value: T) -> list[T]:
        """*Collective.* Every rank's value, in rank order."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def train(self, step: int, samples: Sequence[Sample]) -> dict[str, float | int | None]:
        """*Collective.* One optimizer step on the global batch; every rank is given all of it."""
        started = time.monotonic()
        training = self.config.training
        tokens = sum(sample.generated for sample in samples)
        if tokens == 0:
            raise TrainerError(f"step {step} has no generated token to learn from")
        sums = self._accumulate(samples, tokens)
        norm = self._clip(training.max_grad_norm)
        if not torch.isfinite(norm):
            raise TrainerError(f"step {step}: the gradient's norm is {norm.item()}")
        rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step = step
        gap_tokens = int(sums["gap_tokens"])
        return {
            "loss": sums["loss"] / tokens,
            "grad_norm": norm.item(),
            "learning_rate": rate,
            "kl": sums["kl"] / tokens if self._reference is not None else None,
            "entropy": sums["entropy"] / tokens,
            "clip_fraction": sums["clipped"] / tokens,
            "tis_mean": sums["weight"] / tokens,
            "logprob_gap": sums["gap"] / gap_tokens if gap_tokens else None,
            "logprob_gap_tokens": gap_tokens,
            "generated_tokens": tokens,
            "update_s": time.monotonic() - started,
        }

    def learning_rate(self, step: int) -> float:
        """Of optimizer step ``step``, counted from 1: a linear ramp, then constant."""
        training = self.config.training
        ramp = min(1.0, step / training.warmup_steps) if training.warmup_steps else 1.0
        return training.learning_rate * ramp

    def probe(self) -> Probe:
        """*Collective.* The fixed sequence and what the current policy thinks of it."""
        vocabulary = int(self.model.config.vocab_size)
        token_ids = probe_tokens(vocabulary, self.config.probe_tokens)
        batch = torch.tensor([token_ids], device=self._device)
        with torch.no_grad():
            logits = self._forward(input_ids=batch, use_cache=False).logits[0, :-1]
            logprobs, _ = token_logprobs(logits, batch[0, 1:], temperature=1.0)
        return Probe(token_ids, logprobs.tolist())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """*Collective.* The weights to publish, whole, on the CPU; every rank must exhaust it."""
        dtype = torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32
        for name, tensor in self._named_once().items():
            whole = tensor.detach()
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            yield name, whole.to("cpu", dtype).contiguous()

    def _named_once(self) -> dict[str, Tensor]:
        """A tied tensor counts once, under its first name, as in Hugging Face directories."""
        named: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(named.items())}
        return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}

    def close(self) -> None:
        """*Collective.* Leave the world."""
        self._accelerator.end_training()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _accumulate(self, samples: Sequence[Sample], tokens: int) -> dict[str, float]:
        """Gradients of the whole batch's loss, and the sums of ``SUMS`` over all ranks."""
        rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
        groups = torch.tensor([sample.group for sample in samples])
        advantages = group_advantages(
            rewards, groups, normalize_std=self.config.training.normalize_std
        ).tolist()
        lengths = [len(sample.token_ids) for sample in samples]
        budget = self.config.training.micro_batch_tokens
        share = deal(lengths, shares=self.world, budget=budget)[self.rank]
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        for number, indices in enumerate(share):
            batch = collate(
                [samples[i] for i in indices], [advantages[i] for i in indices], self._device
            )
            with self._sync_only(last=number == len(share) - 1):
                sums += self._backward(batch, scale=self.world / tokens)
        total = self._accelerator.reduce(sums.float().to(self._device), reduction="sum")
        return dict(zip(SUMS, cast(Tensor, total).tolist(), strict=True))

    def _backward(self, batch: MicroBatch, *, scale: float) -> Tensor:
        current, entropy = self._logprobs(self._forward, batch)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._logprobs(self._reference, batch)
        training = self.config.training
        loss = grpo_loss(
            current,
            proximal=current.detach(),
            rollout=batch.rollout,
            advantages=batch.advantages,
            settings=LossSettings(
                training.clip_low, training.clip_high, training.tis_cap, training.kl_coef
            ),
            reference=reference,
        )
        self._accelerator.backward(loss.loss * scale)
        gap = (current.detach() - batch.rollout).abs()[batch.fresh]
        values = [loss.loss.detach(), loss.kl, entropy.sum(), loss.clipped, loss.weight, gap.sum()]
        return torch.tensor([*(float(value) for value in values), len(gap)], dtype=torch.float64)

    def _logprobs(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        logits = model(input_ids=batch.token_ids, use_cache=False).logits
        chosen = logits[batch.rows, batch.columns - 1]
        return token_logprobs(chosen, batch.targets, temperature=self.config.temperature)

    def _sync_only(self, *, last: bool) -> AbstractContextManager[None]:
        """Replicas exchange gradients once a step. Shards do each time, or each rank would hold
        whole gradients."""
        if last or self.sharded:
            return contextlib.nullcontext()
        return cast(AbstractContextManager[None], self._accelerator.no_sync(self._forward))

    def _clip(self, max_norm: float) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _load(self) -> nn.Module:
        if not self.sharded:
            return self._read()
        description = AutoConfig.from_pretrained(self.config.model_dir)
        return load_sharded(
            self._read,
            lambda: AutoModelForCausalLM.from_config(
                description, dtype=torch.float32, attn_implementation="sdpa"
            ),
            device=self._device,
            group=self.control,
            bf16=self._accelerator.mixed_precision == "bf16",
        )

    def _read(self) -> nn.Module:
        return cast(
            nn.Module,
            AutoModelForCausalLM.from_pretrained(
                self.config.model_dir, dtype=torch.float32, attn_implementation="sdpa"
            ),
        )

    def _wrap(self, model: nn.Module, *, checkpointing: bool) -> nn.Module:
        """What to call: autocast and DDP come from accelerate, shards bring their own policy."""
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.sharded:
            return model
        return cast(nn.Module, self._accelerator.prepare_model(model))

    def _frozen(self) -> nn.Module:
        model = self._load().eval().requires_grad_(False)
        if self.sharded:
            return model
        return cast(nn.Module, self._accelerator.prepare_model(model, evaluation_mode=True))


def check_world(rank: int, world: int, wanted: int) -> None:
    """``accelerate launch`` can make several small worlds out of one and say nothing."""
    if world != wanted:
        raise TrainerError(
            f"rank {rank} is in a world of {world}, but the plan has {wanted} processes: "
            "accelerate launch formed separate jobs, or another number of them"
        )
