"""The policy on one rank: the model, and the gradients of the GRPO loss on trajectories.

The trainer's ranks and a gradient worker's compute with the same code. Methods marked *collective*
must be called by all ranks, in the same order.

Sums: the gradients here are those of the **sum** of the loss over all generated tokens since the
gradients were last cleared. So the gradients of parts and shares of a step add up, whoever computes
them and in whatever order; the trainer divides by the number of generated tokens once, before its
optimizer step.

Precision: parameters and gradients are fp32. With ``bfloat16`` the passes compute in bf16.
Sharding: ``shards`` neighbouring ranks hold one replica together, and there are ``replicas`` of
them: with ``ddp`` each rank is one; with ``fsdp2`` (torch's ``fully_shard``) all ranks are one, or
those of each host (hybrid sharding); one rank alone then computes as several do. All of them
average gradients over the ranks, so the loss of each rank's micro-batch is multiplied by their
number. Values that all replicas hold alike are their own average, so a later pass leaves the sums
of earlier ones as they are. With ``cp_size`` above 1 so many neighbouring ranks compute each
micro-batch together (``context_parallel``); the first of them tells what it came to. With
``ep_size`` above 1 so many neighbouring ranks of a replica hold other experts of each layer
(``expert_parallel``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from libra_cli.config.errors import TrainerError
from libra_cli.node.batch.log_ratios import BranchLogRatios, rounded
from libra_cli.node.batch.samples import TokenSample
from libra_cli.node.batch.shares import rows_of
from libra_cli.node.losses.protocol import (
    LossInputs,
    group_value_of,
    loss_of,
    needs_reference,
)
from libra_cli.node.losses.ratios import age_sums, rollout_sums
from libra_cli.node.model import messages, torch_objects
from libra_cli.node.model.activations import checkpoint_activations
from libra_cli.node.model.adapter import add_adapter, published_name, without_adapter
from libra_cli.node.model.batching import MicroBatch, collate, deal
from libra_cli.node.model.buckets import in_buckets
from libra_cli.node.model.compiled import compile_layers
from libra_cli.node.model.context_parallel import context_group
from libra_cli.node.model.expert_parallel import is_parted, mesh_of_experts
from libra_cli.node.model.images import ImageReader, freeze_towers
from libra_cli.node.model.packed_attention import attention_of
from libra_cli.node.model.pass_of_shards import (
    OutOfMemoryEverywhere,
    PassOfShards,
    in_reduction,
)
from libra_cli.node.model.policy_config import PolicyConfig
from libra_cli.node.model.routers import ROUTE_SUMS, RouterBalance
from libra_cli.node.model.scores import BranchScores, with_scores
from libra_cli.node.model.scoring import ScoringModel, one_sequence
from libra_cli.node.model.sharding import load_sharded, mesh_of
from libra_cli.node.model.tiled_mlp import tile_mlp
from libra_cli.node.model.weight_names import TensorGroup, auto_class, names_of, text_config
from libra_cli.node.weights.adapter import is_adapter

COLLECTIVE_TIMEOUT_S = 1800.0
"""No rank waits longer than this for another; a step or a checkpoint must fit in."""
BUCKET_BYTES = 256 * 1024**2
"""The gradients that replicas exchange with one collective."""
T = TypeVar("T")
Look: TypeAlias = Callable[[Sequence[TokenSample], Tensor], None]


def _nobody(phase: str) -> None: ...


class PolicyModel:
    """The policy on this rank: a replica, or a shard of every tensor."""

    def __init__(self, config: PolicyConfig) -> None:
        """*Collective.* Join the world, check its size, load the model.

        Raises:
            TrainerError: the world has another size than planned.
            WeightsError: its files cannot be made of the model's tensors.
        """
        self.enter: Callable[[str], None] = _nobody
        """Called with a phase whenever this rank goes on with something else."""
        torch_objects.restrict()
        timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self._accelerator = Accelerator(kwargs_handlers=[timeout])
        self.rank = self._accelerator.process_index
        self.world = self._accelerator.num_processes
        check_world(self.rank, self.world, config.world_size)
        set_seed(config.seed)
        self._config = config
        self._loss = loss_of(config.training)
        self._group_value = group_value_of(config.training)
        self.micro_batch_tokens = config.training.micro_batch_tokens
        self.log_ratios: BranchLogRatios = {}
        """Log-ratios of the tokens whose gradients this rank has computed."""
        # Commands and checkpoints are agreed on over gloo: an idle rank then burns no GPU, and a
        # rank that died is noticed at once.
        self.control = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
            if self.world > 1
            else None
        )
        self.device = self._accelerator.device
        on_gpu = self.device.type == "cuda"
        sharding = config.training.sharding
        self.sharded = sharding == "fsdp2" or (sharding == "auto" and on_gpu and self.world > 1)
        self.shards = (config.dp_shard_size or self.world) if self.sharded else 1
        self.replicas = self.world // self.shards
        self.replica, self._shard = divmod(self.rank, self.shards)
        self.ep_size = config.ep_size if self.sharded else 1
        """Ranks of a replica that hold other experts of a layer."""
        self._mesh, self._experts, self._copies = self._meet()
        self._names = names_of(Path(config.model_dir))
        self.cp_size = config.cp_size
        """Neighbouring ranks that compute a micro-batch together."""
        self._context = context_group(self.device, self.cp_size)
        self._tells = self.rank % self.cp_size == 0
        self.model = self._load()
        self._forward = self._wrap(self.model)
        self._scoring = self._scores(self.model, self._forward)
        self._balance = RouterBalance(self.model, cp_size=self.cp_size)
        self._reference = self._frozen() if needs_reference(config.training) else None
        """The first policy; with an adapter it is the model without it."""

    def broadcast(self, value: T | None) -> T:
        """*Collective.* Return rank 0's value; the other ranks' values are ignored."""
        if self.control is None:
            return cast(T, value)
        return cast(T, messages.broadcast(value, self.control))

    def gather(self, value: T) -> list[T]:
        """*Collective.* Return every rank's value, in rank order."""
        return [value] if self.control is None else messages.gather(value, self.control)

    def gradients_of(
        self, samples: Sequence[TokenSample], *, before: Callable[[bool], bool] = lambda last: True
    ) -> dict[str, float] | None:
        """*Collective.* Add the gradients of the loss summed over the samples' generated tokens.

        Every rank is given all samples. ``before`` is called ahead of each micro-batch with whether
        it is the last, and returns whether to go on. Samples without ``scores`` are scored first,
        where the recipe compares the trajectories of a group: then all of a group must be there.

        Returns:
            The sums over all ranks, by name: ``loss``, what it is to be divided by (``divisor``),
            ``entropy``, ``ratios.rollout_sums`` and the loss's metrics over generated tokens;
            ``gap``, of |rollout - trainer| log-probability, over the ``gap_tokens`` fresh ones.
            None if ``before`` said to stop: then the gradients are incomplete.

        Raises:
            OutOfMemoryEverywhere: a rank's memory ran out, and all have left the pass: the
                gradients are incomplete.
            torch.OutOfMemoryError: this rank's memory ran out, and others may wait for it.
        """
        if self._compares and not is_scored(samples):
            samples = self.scored(samples)
        dealt = self._dealt(samples)
        sums: list[dict[str, float]] = []
        for number, indices in enumerate(dealt, 1):
            last = number == len(dealt)
            self.enter(f"computing gradients: micro-batch {number} of {len(dealt)}")
            if not before(last):
                return None
            here = [samples[i] for i in indices]
            batch = self._collated(here, scored=is_scored(samples))
            with self._sync_only(last=last):
                sums.append(self._together(batch, here, last=last))
        told = summed(sums)
        if not self._tells:  # the first of a row has summed over all of it, but routed a part
            told = {name: told[name] for name in ROUTE_SUMS if name in told}
        return summed(self.gather(told))

    def scored(self, samples: Sequence[TokenSample], look: Look | None = None) -> list[TokenSample]:
        """*Collective.* The samples with what this model says of them, in a pass without gradient.

        Every rank is given all of them, and has the scores of all. Those that are scored already
        keep what was said before the first update, and are compared by what the model says now.
        ``look`` is given the samples of each of this rank's micro-batches, and the last hidden
        states before their turns, ``[turns, width]``.
        """
        found: dict[int, BranchScores] = {}
        dealt = self._dealt(samples)
        for number, indices in enumerate(dealt, 1):
            self.enter(f"computing log-probabilities: micro-batch {number} of {len(dealt)}")
            here = [samples[i] for i in indices]
            batch = self._collated(here, scored=is_scored(samples), turns=look is not None)
            found |= dict(zip(indices, self._scores_of(batch, here), strict=True))
            if look is not None and self._scoring.hidden is not None and self._tells:
                look(here, self._scoring.hidden)
        ranks = self.gather(found if self._tells else {})
        of_all = {index: one for rank in ranks for index, one in rank.items()}
        needs = self._config.training.needs
        return with_scores(samples, of_all, leave_one_out=needs.leave_one_out)

    def _collated(
        self, samples: Sequence[TokenSample], *, scored: bool, turns: bool = False
    ) -> MicroBatch:
        """The samples as a row; images are read by the processor in the model's directory."""
        reader = self._reader if any(sample.images for sample in samples) else None
        return collate(samples, self.device, scored=scored, turns=turns, reader=reader)

    @cached_property
    def _reader(self) -> ImageReader:
        return ImageReader(self._config.model_dir)

    def _dealt(self, samples: Sequence[TokenSample]) -> list[list[int]]:
        """Return this rank's micro-batches, each as indices of ``samples``."""
        lengths = [len(sample.token_ids) for sample in samples]
        budget = self.micro_batch_tokens if self._scoring.packs else 1
        shares = self.world // self.cp_size
        return deal(lengths, shares=shares, budget=budget)[self.rank // self.cp_size]

    @property
    def _compares(self) -> bool:
        """Whether a token's loss depends on other trajectories of its group."""
        return self.compares_values or self._config.training.kl_in_reward

    @property
    def compares_values(self) -> bool:
        """Whether the loss compares trajectories by what the model says of them."""
        return self._group_value is not None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name; a tied one once.

        Use this and never ``model.parameters()``: between a forward pass and the next backward pass
        FSDP2 leaves whole copies, which have no gradients, in place of its outermost shards.
        Asking for the state dict puts the shards back.
        """
        named = self.named_once()
        return {name: cast(nn.Parameter, one) for name, one in named.items() if one.requires_grad}

    @property
    def hidden_size(self) -> int:
        """Numbers in the model's hidden state of one token."""
        return int(self.model.config.get_text_config().hidden_size)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices between the embeddings and the output layer."""
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        outer = {id(parameter) for end in ends for parameter in end.parameters()}
        every = self.parameters().values()
        return [one for one in every if one.ndim == 2 and id(one) not in outer]

    def _held_rows(self, tensor: Tensor) -> tuple[int, int]:
        """Return ``[start, stop)`` of the rows of ``tensor`` that this rank holds."""
        rows = row_count(tensor)
        if not is_parted(tensor):
            return rows_of(rows, rank=self._shard, world=self.shards)
        column, place = divmod(self._shard, self.ep_size)
        part = rows // self.ep_size
        start, stop = rows_of(part, rank=column, world=self.shards // self.ep_size)
        return place * part + start, place * part + stop

    def own_rows(self, tensor: Tensor) -> tuple[int, int]:
        """Return ``[start, stop)`` of the rows of ``tensor`` that this rank reads.

        Those it holds, if there is one replica; else its part of them, so that the ranks of all
        replicas together read every row once.
        """
        start, stop = self._held_rows(tensor)
        first, last = rows_of(stop - start, rank=self.replica, world=self.replicas)
        return start + first, start + last

    def add_gradients(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """*Collective.* Add gradients of which each rank gives its ``own_rows``.

        ``rows`` holds one flat fp32 array ``[rows * width]`` for each parameter's name.
        """
        parameters = self.parameters()
        if self.replicas > 1:
            for bucket in in_buckets(parameters.items(), BUCKET_BYTES):
                self._add_bucket(bucket, rows)
            return
        for name, parameter in parameters.items():
            gradient = local_gradient(parameter)
            gradient += torch.from_numpy(rows[name]).view(gradient.shape).to(gradient.device)

    def _add_bucket(
        self, bucket: Mapping[str, nn.Parameter], rows: Mapping[str, NDArray[Any]]
    ) -> None:
        """Add fetched rows to the gradients: each rank puts its own among zeros, and the sum over
        the replicas is what each of them holds.
        """
        sizes = [local_gradient(parameter).numel() for parameter in bucket.values()]
        whole = torch.zeros(sum(sizes), device=self.device)
        parts = whole.split(sizes)
        for (name, parameter), part in zip(bucket.items(), parts, strict=True):
            held, _ = self._held_rows(parameter)
            start, _ = self.own_rows(parameter)
            first = (start - held) * (parameter.numel() // row_count(parameter))
            part[first : first + rows[name].size].copy_(torch.from_numpy(rows[name]))
        dist.all_reduce(whole, group=self._copies)
        for parameter, part in zip(bucket.values(), parts, strict=True):
            gradient = local_gradient(parameter)
            gradient += part.view(gradient.shape)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that have been added so far."""
        for parameter in self.parameters().values():
            local_gradient(parameter).mul_(factor)

    def clear_gradients(self) -> None:
        for parameter in self.parameters().values():
            parameter.grad = None

    def logprobs_of(self, token_ids: Sequence[int]) -> list[float]:
        """*Collective.* Return a sequence's log-probabilities at temperature 1, in nats.

        Of ``[T]`` tokens it returns ``[T - 1]``: entry ``i`` belongs to ``token_ids[i + 1]``.
        """
        request = one_sequence(torch.tensor(token_ids, device=self.device))
        with torch.no_grad():
            logprobs = self._scoring.logprobs(request, temperature=1.0).logprobs
        values: list[float] = logprobs.tolist()
        return values

    def named_once(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name; a tied one once, under its first name."""
        named: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(named.items())}
        return {
            published_name(name): tensor
            for name, tensor in named.items()
            if first[id(tensor)] == name
        }

    def published(self) -> tuple[TensorGroup, ...]:
        """Return what a version has: all of ``named_once``, or the adapter alone."""
        if self._config.training.lora is None:
            return self._names.groups
        named = self.named_once()
        return self._names.adapter_groups({name: named[name] for name in filter(is_adapter, named)})

    def base(self) -> tuple[TensorGroup, ...]:
        """Return the tensors of the model's own files, without an adapter's."""
        return self._names.groups

    def close(self) -> None:
        """*Collective.* Leave the world and destroy its process groups."""
        self._accelerator.end_training()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _backward(self, batch: MicroBatch, samples: Sequence[TokenSample]) -> dict[str, float]:
        bonus = self._config.training.entropy_coef > 0
        reference = self._reference_logprobs(batch) if batch.scores is None else None
        with self._balance.recording() as logits, self._scoring.told.counting() as routes:
            current, entropy, greedy = self._scoring.logprobs(
                batch.request, temperature=self._config.temperature, entropy_gradient=bonus
            )
        inputs = self._inputs(batch, current, reference)
        outputs = self._loss(replace(inputs, entropy=entropy if bonus else None, greedy=greedy))
        loss = outputs.loss
        if self._balance.coefficient:
            lengths = batch.request.packed.lengths
            loss = loss + self._balance.loss(logits, lengths, batch.weights(outputs.divisor))
        self._accelerator.backward(loss * self.world)
        gap = (inputs.proximal - batch.rollout).abs()[batch.fresh]
        divisor = len(current) if outputs.divisor is None else outputs.divisor
        sums = {**outputs.metrics, **routes}
        training = self._config.training
        if not training.needs.offline:  # which no rollout policy generated
            sums = {**rollout_sums(inputs), **age_sums(inputs), **sums}
            if self._tells:
                self._keep_log_ratios(inputs, samples)
        if training.updates > 1:
            sums["ppo_kl"] = (inputs.proximal - current.detach()).sum()
        return {
            "loss": float(loss.detach()),
            "divisor": float(divisor),
            "entropy": float(entropy.detach().sum()),
            "gap": float(gap.sum()),
            "gap_tokens": float(len(gap)),
            **{name: float(total) for name, total in sums.items()},
        }

    def _keep_log_ratios(self, inputs: LossInputs, samples: Sequence[TokenSample]) -> None:
        """Keep those of a micro-batch. A pass that is repeated finds the same again."""
        values, end = rounded((inputs.proximal - inputs.rollout).float().cpu().numpy()), 0
        for sample in samples:
            start, end = end, end + sample.generated
            self.log_ratios[sample.key] = values[start:end]

    def _inputs(self, batch: MicroBatch, current: Tensor, reference: Tensor | None) -> LossInputs:
        """What the loss is given; of a batch without scores, current is proximal."""
        inputs = LossInputs(
            logprobs=current,
            proximal=current.detach(),
            rollout=batch.rollout,
            advantages=batch.advantages,
            trajectories=batch.rows,
            groups=batch.groups,
            staleness=batch.ages,
            over=batch.ages > self._config.training.bounds[-1],
            max_len=self._config.max_len,
            reference=reference,
        )
        scores, training = batch.scores, self._config.training
        if scores is None:
            return inputs
        taken = training.kl_coef * scores.excess_kl if training.kl_in_reward else 0.0
        compared = self.compares_values
        return replace(
            inputs,
            proximal=scores.proximal,
            advantages=batch.advantages - taken,
            reference=None if self._reference is None else scores.reference,
            own_value=scores.own_value if compared else None,
            own_tokens=scores.own_tokens if compared else None,
            group_mean=scores.group_mean if compared else None,
        )

    def _scores_of(self, batch: MicroBatch, samples: Sequence[TokenSample]) -> list[BranchScores]:
        """Score a micro-batch's samples without gradient; *collective*, if the model is sharded."""
        with torch.no_grad():
            reference = self._reference_logprobs(batch)
            temperature = self._config.temperature
            current = self._scoring.logprobs(batch.request, temperature=temperature).logprobs
            first = torch.zeros_like(current) if reference is None else reference
            inputs = self._inputs(replace(batch, scores=None), current, reference)
            values = torch.zeros_like(current)
            if self._group_value is not None:
                values = self._group_value(inputs)
        kls = current - first if reference is not None else torch.zeros_like(current)
        sizes = [sample.generated for sample in samples]
        parts = (one.float().cpu().split(sizes) for one in (current, first, values, kls))
        return [
            BranchScores(proximal.numpy(), before.numpy(), float(value.sum()), float(kl.sum()))
            for proximal, before, value, kl in zip(*parts, strict=True)
        ]

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        if batch.scores is not None:
            return batch.scores.reference
        adapter = self._config.training.lora is not None
        without = without_adapter(self.model) if adapter else contextlib.nullcontext()
        with torch.no_grad(), without:
            scores = self._reference.logprobs(batch.request, temperature=self._config.temperature)
        return scores.logprobs

    def _together(
        self, batch: MicroBatch, samples: Sequence[TokenSample], *, last: bool
    ) -> dict[str, float]:
        """*Collective.* As ``_backward``; if the memory of a rank does not suffice, all leave it.

        The others wait for this rank in the collectives that are left of the pass, so it takes part
        in these first. Where it cannot, because ranks exchange more than weights and gradients in
        the pass, it fails alone.

        Raises:
            OutOfMemoryEverywhere: on every rank alike.
            torch.OutOfMemoryError: on this rank alone.
        """
        if self.world == 1:
            return self._backward(batch, samples)
        begun = PassOfShards(self.model) if self.sharded else None
        problem, sums = "", dict[str, float]()
        try:
            sums = self._backward(batch, samples)
        except torch.OutOfMemoryError as error:
            if in_reduction(error) or not self._can_end_pass(batch, last=last):
                raise
            problem = f"rank {self.rank}: {error}"  # not the error: it holds tensors
        if problem and begun is not None:
            begun.end()
        problem = next(filter(None, self.gather(problem)), "")
        if problem:
            if begun is not None:
                begun.forget()
            raise OutOfMemoryEverywhere(problem)
        return sums

    def _can_end_pass(self, batch: MicroBatch, *, last: bool) -> bool:
        """Whether no collective but those of ``PassOfShards`` may be left of a micro-batch's pass:
        none of ranks that share a row or part experts, of a first policy's pass, or of replicas."""
        scores_first = self._reference is not None and batch.scores is None
        if self.cp_size > 1 or self.ep_size > 1 or scores_first:
            return False
        return self.sharded or not last

    def _sync_only(self, *, last: bool) -> AbstractContextManager[None]:
        """Let replicas reduce gradients in the last micro-batch only.

        Shards reduce in each, or each rank would hold whole gradients.
        """
        if self._copies is not None:
            cast(FSDPModule, self.model).set_requires_all_reduce(last)
        if last or self.sharded:
            return contextlib.nullcontext()
        return cast(AbstractContextManager[None], self._accelerator.no_sync(self._forward))

    def _meet(self) -> tuple[DeviceMesh | None, DeviceMesh | None, dist.ProcessGroup | None]:
        """*Collective.* The mesh of a sharded model, that of its experts if ranks hold others, and
        the group of ranks that hold the very shards of this one, where there are others."""
        if not self.sharded:
            return None, None, None
        if not dist.is_initialized():  # accelerate makes no group of one rank
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        sizes = {"shards": self.shards, "replicas": self.replicas}
        mesh = mesh_of(self.device, **sizes)
        experts = mesh_of_experts(self.device, **sizes, ep_size=self.ep_size)
        return mesh, experts, mesh["dp_replicate"].get_group() if self.replicas > 1 else None

    def _load(self) -> nn.Module:
        if self._mesh is None:
            return self._read()
        description = text_config(self._config.model_dir)
        return load_sharded(
            self._read,
            lambda: self._prepared(
                auto_class(description).from_config(
                    description,
                    dtype=self._stored_dtype,
                    attn_implementation=attention_of(description),
                )
            ),
            device=self.device,
            mesh=self._mesh,
            group=self.control,
            bf16=self._accelerator.mixed_precision == "bf16",
            experts=self._experts,
        )

    def _read(self) -> nn.Module:
        description = text_config(self._config.model_dir)
        return self._prepared(
            auto_class(description).from_pretrained(
                self._config.model_dir,
                config=description,
                dtype=self._stored_dtype,
                attn_implementation=attention_of(description),
            )
        )

    @property
    def _stored_dtype(self) -> torch.dtype:
        """The type of the model's own parameters: float32, or as computed with if frozen."""
        narrow = self._accelerator.mixed_precision == "bf16"
        frozen = self._config.training.lora is not None
        return torch.bfloat16 if narrow and frozen else torch.float32

    def _prepared(self, model: nn.Module) -> nn.Module:
        freeze_towers(model)
        lora = self._config.training.lora
        return model if lora is None else add_adapter(model, lora)

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call: accelerate adds autocast and DDP, FSDP2 has its own policy."""
        model.train()
        training = self._config.training
        choice = training.activation_checkpointing
        if training.compile:
            if self.world > 1 and not self.sharded:
                raise TrainerError(
                    f"ranks that have a replica each do not compile layers ({self.replicas} have)",
                    hint="set training.sharding: fsdp2, or leave out training.compile",
                )
            compile_layers(model, selective=choice == "selective")
        if not (training.compile and choice == "selective"):
            checkpoint_activations(
                model,
                choice,
                on_gpu=self.device.type == "cuda",
                offload=training.activation_offload,
            )
        if training.tiled_mlp:
            tile_mlp(model)
        if self.sharded:
            return model
        return cast(nn.Module, self._accelerator.prepare_model(model))

    def _frozen(self) -> ScoringModel:
        if self._config.training.lora is not None:
            return self._scoring
        model = call = self._load().eval().requires_grad_(False)
        if self._config.training.compile:  # or the two would differ by more than their weights
            compile_layers(model)
        if not self.sharded:
            call = self._accelerator.prepare_model(model, evaluation_mode=True)
        return self._scores(model, call)

    def _scores(self, model: nn.Module, call: Callable[..., Any]) -> ScoringModel:
        fp32 = self._config.fp32_lm_head
        return ScoringModel(model, call, self.device, self._context, fp32_head=fp32)


def is_scored(samples: Sequence[TokenSample]) -> bool:
    """Say whether the samples have scores; either all of them have, or none."""
    return bool(samples) and samples[0].scores is not None


def check_world(rank: int, world: int, wanted: int) -> None:
    """Check the world's size: ``accelerate launch`` can silently form several small worlds.

    Raises:
        TrainerError: the world has another size than wanted.
    """
    if world != wanted:
        raise TrainerError(
            f"rank {rank} is in a world of {world}, but the plan has {wanted} processes: "
            "accelerate launch formed separate jobs, or another number of them"
        )


def summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name, added up in the order they come."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def row_count(tensor: Tensor) -> int:
    """Return the length of the first axis; a scalar has one row."""
    return int(tensor.shape[0]) if tensor.ndim else 1


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a gradient; where there is none yet, zeros are put there."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
