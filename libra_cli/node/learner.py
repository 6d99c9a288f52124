"""The policy, its optimizer, and one GRPO step over every rank.

With accelerate: plain on one process, DDP over several processes without GPUs, FSDP2 where the
launcher configured it. Master weights and optimizer state are fp32; on GPUs the forward runs in
bf16 (mixed precision), and what is published is cast to the dtype that is served.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM

from libra_cli.node import batching
from libra_cli.node.batching import Item, MicroBatch
from libra_cli.node.config import TrainerConfig
from libra_cli.node.loss import (
    LossSettings,
    group_advantages,
    grpo_loss,
    token_logprobs,
)

SUMS = ("loss", "kl", "clipped", "weight", "entropy", "gap", "gap_tokens", "tokens")


@dataclass
class Totals:
    """Sums over tokens, first of this rank and then of all."""

    values: Tensor

    def add(self, **sums: Tensor | float) -> None:
        """Add to some of the sums."""
        for name, value in sums.items():
            self.values[SUMS.index(name)] += float(value)

    def __getitem__(self, name: str) -> float:
        return float(self.values[SUMS.index(name)])


class Learner:
    """Model, reference, optimizer and schedule of one rank."""

    def __init__(self, accelerator: Accelerator, config: TrainerConfig) -> None:
        training = config.training
        self._accelerator = accelerator
        self._config = config
        self._settings = LossSettings(
            training.clip_low, training.clip_high, training.tis_cap, training.kl_coef
        )
        torch.manual_seed(config.seed)
        model = _load(config.model_dir)
        self.vocabulary = int(model.config.vocab_size)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=training.learning_rate,
            betas=training.betas,
            weight_decay=training.weight_decay,
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            # accelerate's wrapper steps a schedule once a process; ours is one step a step.
            getattr(self.optimizer, "optimizer", self.optimizer),
            lambda step: min(1.0, (step + 1) / max(1, training.warmup_steps)),
        )
        accelerator.register_for_checkpointing(self.schedule)
        self.reference: torch.nn.Module | None = None
        if training.kl_coef > 0:
            self.reference = accelerator.prepare_model(
                _load(config.model_dir), evaluation_mode=True
            )

    def step(self, items: list[Item]) -> dict[str, float | None]:
        """One optimizer step on a global batch; every rank calls it with the whole batch.

        Returns the metrics of the step log, the same on every rank.
        """
        started = time.monotonic()
        accelerator, training = self._accelerator, self._config.training
        rewards = torch.tensor([item.reward for item in items])
        groups = torch.tensor([item.group for item in items])
        advantages = group_advantages(rewards, groups, normalize_std=training.normalize_std)
        # Known before any backward pass, by every rank, so that a share is a share of one sum.
        total_tokens = sum(item.learned for item in items)
        lengths = [len(item) for item in items]
        cuts = batching.cut(lengths, training.micro_batch_tokens)
        hands = batching.deal(cuts, lengths, accelerator.num_processes)
        mine = hands[accelerator.process_index]
        totals = Totals(torch.zeros(len(SUMS), dtype=torch.float64, device=accelerator.device))
        self.model.train()
        for number, (indices, weight) in enumerate(mine, start=1):
            batch = batching.collate(items, advantages, indices, weight)
            with self._sharing(last=number == len(mine)):
                loss = self._loss(batch, totals)
                # DDP and FSDP average over ranks; this makes it the sum.
                accelerator.backward(loss * accelerator.num_processes / max(total_tokens, 1))
        grad_norm = accelerator.clip_grad_norm_(self.model.parameters(), training.max_grad_norm)
        learning_rate = float(self.schedule.get_last_lr()[0])
        self._apply(float(grad_norm))
        totals.values = accelerator.reduce(totals.values, reduction="sum")
        return self._metrics(totals, float(grad_norm), learning_rate, time.monotonic() - started)

    @contextmanager
    def _sharing(self, *, last: bool) -> Iterator[None]:
        """Gradients cross ranks once a step, with the last micro-batch."""
        if last:
            yield
        else:
            with self._accelerator.no_sync(self.model):
                yield

    def _apply(self, grad_norm: float) -> None:
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient's norm is {grad_norm}; nothing was updated")
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def _loss(self, batch: MicroBatch, totals: Totals) -> Tensor:
        device = self._accelerator.device
        ids = batch.ids_BT.to(device)
        attention = batch.attention_BT.to(device)
        # Position t - 1 predicts token t.
        target = batch.target_BT[:, 1:].to(device)
        wanted = ids[:, 1:][target]
        logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits
        current, entropy = self._logprobs(logits, target, wanted)
        rollout = batch.rollout_BT[:, 1:].to(device)[target]
        out = grpo_loss(
            current,
            proximal=current.detach(),
            rollout=rollout,
            advantages=batch.advantage_BT[:, 1:].to(device)[target],
            settings=self._settings,
            reference=self._reference(ids, attention, target, wanted),
        )
        if batch.weight:
            fresh = batch.fresh_BT[:, 1:].to(device)[target]
            gap = (current.detach() - rollout).abs()[fresh]
            totals.add(
                loss=out.loss.detach(),
                kl=out.kl,
                clipped=out.clipped,
                weight=out.weight,
                entropy=entropy.sum(),
                gap=gap.sum(),
                gap_tokens=fresh.sum(),
                tokens=target.sum(),
            )
        return out.loss * batch.weight

    def _logprobs(self, logits: Tensor, target: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        rows = logits[:, :-1][target]
        return token_logprobs(rows, wanted, temperature=self._config.temperature)

    def _reference(
        self, ids: Tensor, attention: Tensor, target: Tensor, wanted: Tensor
    ) -> Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad():
            logits = self.reference(input_ids=ids, attention_mask=attention, use_cache=False).logits
            return self._logprobs(logits, target, wanted)[0]

    def _metrics(
        self, totals: Totals, grad_norm: float, learning_rate: float, seconds: float
    ) -> dict[str, float | None]:
        tokens = max(totals["tokens"], 1.0)
        gap_tokens = totals["gap_tokens"]
        return {
            "loss": totals["loss"] / tokens,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "kl": totals["kl"] / tokens if self.reference is not None else None,
            "entropy": totals["entropy"] / tokens,
            "clip_fraction": totals["clipped"] / tokens,
            "tis_mean": totals["weight"] / tokens,
            "logprob_gap": totals["gap"] / gap_tokens if gap_tokens else None,
            "logprob_gap_tokens": gap_tokens,
            "trainer_s": seconds,
        }

    def probe(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of ``token_ids[1:]``, each given everything before it, unscaled.

        Every rank calls it; all get the same answer.
        """
        ids = torch.tensor([token_ids], device=self._accelerator.device)
        self.model.eval()
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1]
        logprobs, _ = token_logprobs(logits, ids[0, 1:], temperature=1.0)
        return [float(value) for value in logprobs]

    def state(self) -> dict[str, Tensor]:
        """The whole model on the CPU in the served dtype; empty on all ranks but the first."""
        gathered: dict[str, Tensor] = self._accelerator.get_state_dict(self.model)
        if not self._accelerator.is_main_process:
            return {}
        dtype = getattr(torch, self._config.dtype)
        return {name: tensor.detach().to("cpu", dtype) for name, tensor in gathered.items()}


def _load(model_dir: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa"
    )
