"""The core's part of the policy on one rank: its optimizer, and what one step does.

A step's gradients come from three sides and are all sums over generated tokens: parts accumulated
before (``accumulate``), the core's own pass, and shares that gradient workers computed meanwhile.
Once they are together they are divided by the loss's divisor, mostly the number of tokens, clipped,
and applied::

    fetch the workers' shares     in the background, each rank its own rows
    compute what is in no share   and measure how fast that goes
    wait for what is missing      no longer than computing it here would take
    agree on what is used         all ranks have all their rows of a share, or none adds it
    compute the rest              all ranks together

So a worker that dies or stalls costs the step at most twice its share's time, and never its result.

**Several updates.** With ``minibatches`` or ``epochs`` above 1 there are no parts, and each
minibatch is an update of its own, divided by its own divisor. The first is as above, and shares are
of its trajectories only: nobody else has the weights that later ones need. Before the weights move,
a pass without gradient says what the model thinks of what comes later (the proximal policy). A loss
that compares the trajectories of a group by what the model says of them has all of that said before
the first update, and anew before each later one. It is still one step: one version, one rate, and
metrics that are means over all tokens, or over the updates.

**A critic.** With ``advantage: gae`` a pass comes before the first update: from the hidden
states before each turn the critic says what it is worth, which gives the tokens their advantages.
It learns when the updates of the policy are done (``node.critic``).

**Without stopping.** A gradient that is not finite is dropped: the weights stay, the step counts
and says so, and ``MAX_SKIPPED`` of them in a row are an error. Where memory runs out in a pass for
gradients, micro-batches are halved, and the step's gradients are computed again: on all ranks, once
the one that lacks memory has taken part in the collectives that the others wait in
(``node.model.pass_of_shards``). Where it cannot, it remembers half of the size and fails, and the
next start has it.

Parameters and optimizer state are fp32; with ``bfloat16`` versions are published in it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from libra_cli.config.errors import TrainerError
from libra_cli.config.minibatches import minibatches
from libra_cli.node.batch.log_ratios import of_all_generated, pack_log_ratios
from libra_cli.node.batch.samples import TokenSample, counted
from libra_cli.node.batch.shares import WorkerShare
from libra_cli.node.credentials import Credentials
from libra_cli.node.critic.critic import Critic
from libra_cli.node.gradient.client import Arrival, GradientClient, Rows
from libra_cli.node.losses.ratios import effective_sample_size, worth_by_age
from libra_cli.node.model.compiled import CLOCK
from libra_cli.node.model.expert_parallel import is_parted
from libra_cli.node.model.pass_of_shards import OutOfMemoryEverywhere
from libra_cli.node.model.policy import Look, PolicyModel, is_scored, summed
from libra_cli.node.model.routers import ROUTE_SUMS
from libra_cli.node.model.scores import mean_of
from libra_cli.node.model.shard_rows import RowExchange
from libra_cli.node.model.weight_names import TensorGroup
from libra_cli.node.rank import last_line
from libra_cli.node.trainer.config import TrainerConfig
from libra_cli.node.trainer.optimizer import Movement, optimizer_of
from libra_cli.node.trainer.schedule import learning_rate_at
from libra_cli.node.weights.checksum import described
from libra_cli.node.weights.tensor_rows import TensorRows, whole
from libra_cli.node.weights.versions import ProbeResult, probe_tokens, version_name

MIN_PATIENCE_S = 1.0
"""Least seconds that a share is waited for: with fewer, noise in the core's own speed would decide
whether a worker's share is used."""
UNMEASURED_PATIENCE_S = 10.0
"""Seconds that a share is waited for while the core has computed nothing that tells its speed."""
BUDGET_FILE = "micro-batch-tokens"
"""Beside the checkpoints: tokens of a micro-batch, after memory has run out."""
MAX_SKIPPED = 3
"""Steps in a row whose gradient may not be finite; chosen."""
log = logging.getLogger("libra.trainer")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Update:
    """What one update of the optimizer did, with sums over the tokens of all ranks."""

    sums: Mapping[str, float]
    """Sums over these tokens by name, as ``PolicyModel.gradients_of`` gives them."""
    tokens: int
    """Generated tokens of the update."""
    norm: float
    """Norm of the gradient before it was clipped."""
    finite: bool
    ratio: float
    """Norm of the change of the parameters over theirs."""

    @property
    def loss(self) -> float:
        """The loss, divided as its gradient was: by the loss's divisor."""
        return self.sums["loss"] / (self.sums["divisor"] or 1.0)


class Trainer(PolicyModel):
    """The policy and its optimizer. ``step`` is the number of steps taken so far."""

    def __init__(self, config: TrainerConfig) -> None:
        """*Collective.* Join the world, check it, load the model."""
        super().__init__(config)
        self.config = config
        self.step = 0
        self.optimizer = optimizer_of(
            config.training, self.parameters().values(), self.hidden_matrices()
        )
        self.critic = (
            Critic(self.hidden_size, config.training, self.gather)
            if config.training.needs.critic
            else None
        )
        self._tokens = self._left_out = self._skipped = 0
        self._sums: dict[str, float] = {}
        self._held: list[TokenSample] = []
        """Samples whose gradients are in the sums."""
        self._given: list[TokenSample] = []
        """Samples of the coming step, with the tokens that do not count too."""
        self.packed_log_ratios = b""
        """Log-ratios of the last step, on rank 0, as ``node.batch.log_ratios`` packs them."""
        self._budget_file = Path(config.checkpoint_dir).parent / BUDGET_FILE
        self.micro_batch_tokens = min(self.gather(self._remembered_budget()))
        self._tokens_per_s = 0.0
        """Tokens a second of a pass; all tokens count, not only generated ones."""

    def accumulate(self, samples: Sequence[TokenSample]) -> dict[str, Any]:
        """*Collective.* Add a part of the coming step; every rank is given all of it."""
        samples = self._credited(self._counted(samples))
        seconds = self._compute(samples)
        return {"tokens": _generated(samples), "accumulate_s": seconds}

    def _counted(self, samples: Sequence[TokenSample]) -> Sequence[TokenSample]:
        """The samples with tokens that count; what is left out is remembered for the step."""
        kept = counted(samples, self.config.training)
        self._left_out += _generated(samples) - _generated(kept)
        self._given += samples
        return kept

    def train(
        self, step: int, samples: Sequence[TokenSample], shares: Sequence[WorkerShare] = ()
    ) -> dict[str, Any]:
        """*Collective.* One step on the parts and ``samples``; every rank is given all.

        ``samples`` holds those of ``shares`` too, which are of the first update.

        Raises:
            TrainerError: there is no generated token, memory does not suffice, or the gradient was
                not finite in ``MAX_SKIPPED`` steps in a row.
        """
        started, compiled_s = time.monotonic(), CLOCK.seconds
        samples = self._counted(samples)
        if self._tokens + _generated(samples) + self._left_out == 0:
            raise TrainerError(f"step {step} has no generated token to learn from")
        samples = self._credited(samples)
        if samples and self.config.training.scores_first and not is_scored(samples):
            samples = self._score(samples)
        first, *later = self._minibatches(step, samples)
        given = [samples[index] for index in first]
        timely, late = _by_update(given, shares)
        own, elsewhere = _parted(given, timely)
        with self._fetching(step, elsewhere, timely) as fetches:
            own_s = self._compute(own)
            reports = [*self._settle(fetches, elsewhere), *late]
        updates = [*self._updates(step, samples, later)]
        self._left_out = 0
        self._gather_log_ratios()
        self._check_finite(step, updates)
        self.step = step
        return self._metrics(updates) | {
            **self._learn_values(),
            **self._compiling(step, CLOCK.seconds - compiled_s),
            "shares": reports,
            "own_tokens": _generated(own),
            "own_s": own_s,
            "update_s": time.monotonic() - started,
        }

    def _compiling(self, step: int, seconds: float) -> dict[str, float]:
        """*Collective.* What a step tells of the seconds that ranks compiled layers in it; nothing
        if they did not."""
        if not self.config.training.compile:
            return {}
        longest = max(self.gather(seconds))
        if not longest:
            return {}
        log.info("step %d: %.1f s of it were spent compiling layers", step, longest)
        return {"compile_s": longest}

    def _gather_log_ratios(self) -> None:
        """*Collective.* Bring the step's log-ratios to rank 0, and pack them there."""
        self.enter("gathering log-ratios")
        found = {key: one for rank in self.gather(self.log_ratios) for key, one in rank.items()}
        given, self._given, self.log_ratios = self._given, [], {}
        if self.rank == 0:
            kept = counted(given, self.config.training)
            self.packed_log_ratios = pack_log_ratios(of_all_generated(given, kept, found))

    def _minibatches(self, step: int, samples: Sequence[TokenSample]) -> list[list[int]]:
        """The samples of each update of a step, as indices."""
        training = self.config.training
        if training.updates == 1:
            return [[*range(len(samples))]]
        groups, seed = [sample.group for sample in samples], (self.config.seed, step)
        parts, passes = training.minibatches, training.epochs
        return [*minibatches(groups, parts=parts, passes=passes, seed=seed)]

    def _updates(
        self, step: int, samples: Sequence[TokenSample], later: Sequence[Sequence[int]]
    ) -> Iterator[Update]:
        """*Collective.* Take the first update of a step, whose gradients are there, and the later
        ones, of samples that are named by indices."""
        known = self._known(samples, later)
        yield self._update(step)
        for part in known:
            self._compute(self._score(part) if self.compares_values else part)
            yield self._update(step)

    def _known(
        self, samples: Sequence[TokenSample], later: Sequence[Sequence[int]]
    ) -> list[list[TokenSample]]:
        """*Collective.* The samples of each later update, with what the policy says of them now."""
        wanted = sorted({index for part in later for index in part})
        given = [samples[index] for index in wanted]
        known = self._score(given) if given and not is_scored(given) else given
        found = dict(zip(wanted, known, strict=True))
        return [[found[index] for index in part] for part in later]

    def _score(self, samples: Sequence[TokenSample], look: Look | None = None) -> list[TokenSample]:
        """*Collective.* As ``scored``, in micro-batches that memory suffices for."""
        while (known := self._try(samples, lambda given: self.scored(given, look))) is None:
            pass
        return known

    def _credited(self, samples: Sequence[TokenSample]) -> Sequence[TokenSample]:
        """*Collective.* The samples with the advantages that a critic gives them, if there is one;
        they are scored then."""
        if self.critic is None or not samples:
            return samples
        return self.critic.credit(self._score(samples, self.critic.look))

    def _learn_values(self) -> dict[str, Any]:
        """*Collective.* What the critic tells of the step that it learns from, if there is one."""
        if self.critic is None:
            return {}
        self.enter("updating the critic")
        return self.critic.learn()

    def _update(self, step: int) -> Update:
        """*Collective.* Move the weights along the gradients that were added up."""
        self.enter("updating the weights")
        tokens, sums = self._tokens, self._sums
        self.scale_gradients(1 / (sums["divisor"] or 1.0))
        norm = self._clip(self.config.training.max_grad_norm)
        finite = all(self.gather(bool(torch.isfinite(norm))))
        rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate, 0.0
        movement = Movement(self.parameters().values())
        if tokens and finite:  # or else every token was over the bound: the weights stay
            self._decay(rate)
            self.optimizer.step()
        self.clear_gradients()
        self._tokens, self._sums, self._held = 0, {}, []
        ratio = movement.ratio(self.gather)
        return Update(sums, tokens, norm.item(), finite, ratio)

    def _metrics(self, updates: Sequence[Update]) -> dict[str, Any]:
        """Metrics of a step: means over the tokens of its updates, or over these."""
        sums, seen = summed(one.sums for one in updates), sum(one.tokens for one in updates)
        gap, gap_tokens = sums.pop("gap"), int(sums.pop("gap_tokens"))
        total = sums.pop("rollout_ratio_sum", 0.0)
        squares = sums.pop("rollout_ratio_square_sum", 0.0)
        told, differing = (sums.pop(name, 0.0) for name in ROUTE_SUMS)
        del sums["divisor"]
        passes = self.config.training.epochs
        by_age = worth_by_age(sums, passes)
        return {
            **{name: value / max(1, seen) for name, value in sums.items()},
            "loss": mean_of([one.loss for one in updates]),
            "grad_norm": mean_of([one.norm for one in updates]),
            "update_ratio": mean_of([one.ratio for one in updates]),
            **effective_sample_size(total, squares, seen),
            **by_age,
            **({"routes_differ": differing / told} if told else {}),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "logprob_gap": gap / gap_tokens if gap_tokens else None,
            "logprob_gap_tokens": gap_tokens // passes,
            "generated_tokens": seen // passes,
            **self._troubles(),
        }

    def _check_finite(self, step: int, updates: Sequence[Update]) -> None:
        """Count steps of which no update could be used."""
        unusable = [one for one in updates if not one.finite]
        if unusable:
            log.warning(
                "step %d: the gradient's norm is %s: the weights stay", step, unusable[0].norm
            )
        self._skipped = self._skipped + 1 if len(unusable) == len(updates) else 0
        if self._skipped >= MAX_SKIPPED:
            raise TrainerError(
                f"step {step}: the gradient was not finite (its norm is {unusable[0].norm}) in "
                f"{self._skipped} steps in a row",
                hint="libra run --resume goes on from the last checkpoint; lower "
                "training.learning_rate first, or see whether rewards and lengths in "
                "`libra status` broke before",
            )

    def _troubles(self) -> dict[str, float]:
        """Metrics that are there only in steps that have something to tell."""
        told: dict[str, float] = {}
        if self._skipped:
            told["skipped_in_a_row"] = self._skipped
        if self.micro_batch_tokens < self.config.training.micro_batch_tokens:
            told["micro_batch_tokens"] = self.micro_batch_tokens
        return told

    def _decay(self, rate: float) -> None:
        """AdamW's decoupled decay (arXiv 1711.05101), of matrices only: no norms, no biases."""
        if self.config.training.weight_decay:
            for parameter in self.parameters().values():
                if parameter.ndim > 1:
                    parameter.data.mul_(1 - rate * self.config.training.weight_decay)

    def _compute(self, samples: Sequence[TokenSample]) -> float:
        """Add these to the step; the seconds it took, without those of compiling layers."""
        began = CLOCK.without()
        wanted = list(samples)
        sums: dict[str, float] | None = {}
        while wanted and not (sums := self._try(wanted, self.gradients_of)):
            # A pass that broke off has left parts of its gradients among those of others.
            wanted = [*self._held, *wanted]
            self.clear_gradients()
            self._tokens, self._sums, self._held = 0, {}, []
        if sums:
            self._add(sums, wanted)
            taken = CLOCK.without() - began
            self._tokens_per_s = sum(len(one.token_ids) for one in wanted) / taken
        return CLOCK.without() - began

    def _try(
        self,
        samples: Sequence[TokenSample],
        compute: Callable[[Sequence[TokenSample]], Result | None],
    ) -> Result | None:
        """What is computed of these; None if memory ran out: micro-batches are smaller now."""
        try:
            return compute(samples)
        except torch.OutOfMemoryError as error:
            problem = last_line(error)  # not the error: it holds the tensors of the pass
            together = self.world == 1 or isinstance(error, OutOfMemoryEverywhere)
        longest = max(len(sample.token_ids) for sample in samples)
        if self.micro_batch_tokens <= longest:
            raise TrainerError(
                f"rank {self.rank}: memory does not suffice for a trajectory of {longest:,} tokens "
                f"by itself{_shared_by(self.cp_size)}: {problem}",
                hint="set training.activation_checkpointing: full, raise training.cp_size, lower "
                "model.max_len, or train on more GPUs; `libra run --dry-run RECIPE` says what "
                "memory goes to",
            )
        self.micro_batch_tokens = max(longest, self.micro_batch_tokens // 2)
        self._budget_file.parent.mkdir(parents=True, exist_ok=True)
        self._budget_file.write_text(f"{self.micro_batch_tokens}\n")
        told = f"memory ran out: micro-batches have {self.micro_batch_tokens:,} tokens from now on"
        log.warning("%s (%s)", told, problem)
        if not together:
            raise TrainerError(f"rank {self.rank}: {told}, and all ranks start again: {problem}")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _remembered_budget(self) -> int:
        """Tokens of a micro-batch: the recipe's, or less if memory ran out here before."""
        wanted = self.config.training.micro_batch_tokens
        try:
            return min(wanted, int(self._budget_file.read_text()))
        except (FileNotFoundError, ValueError):  # a disk that was full has left an empty file
            return wanted

    def _add(self, sums: Mapping[str, float], samples: Sequence[TokenSample]) -> None:
        self._sums = summed((self._sums, sums))
        self._tokens += _generated(samples)
        self._held.extend(samples)

    @contextlib.contextmanager
    def _fetching(
        self, step: int, samples: Sequence[TokenSample], shares: Sequence[WorkerShare]
    ) -> Iterator[list[GradientClient]]:
        """Fetch this rank's rows of every share in the background while the block runs."""
        wanted = self._wanted() if shares else {}
        fetches = [
            GradientClient(
                share,
                step,
                tokens=_generated(_of(share, samples)),
                wanted=wanted,
                credentials=Credentials.here(),
                dtype=self.config.training.worker_gradients,
                log_ratios=self.rank == 0,
            )
            for share in shares
        ]
        try:
            for fetch in fetches:
                if fetch.share.version == self._version():
                    fetch.start()
            yield fetches
        finally:
            for fetch in fetches:
                fetch.abandon()

    def _wanted(self) -> dict[str, Rows]:
        return {
            name: Rows(tuple(parameter.shape), *self.own_rows(parameter))
            for name, parameter in self.parameters().items()
        }

    def _version(self) -> str:
        return version_name(self.step, self.config.trainer_incarnation)

    def _settle(
        self, fetches: Sequence[GradientClient], samples: Sequence[TokenSample]
    ) -> list[dict[str, Any]]:
        """*Collective.* Add the shares that all ranks have whole, compute the others; report each.

        Every rank decides for itself whether its rows came in time; a share is used if all say so.
        """
        since = time.monotonic()
        self.enter("fetching shares")
        here = [self._await(fetch, samples, since) for fetch in fetches]
        by_rank = self.gather(here)
        reports, rest = [], list[TokenSample]()
        for number, fetch in enumerate(fetches):
            arrivals = [rank[number] for rank in by_rank]
            problem = next((arrival.problem for arrival in arrivals if arrival.problem), "")
            theirs = _of(fetch.share, samples)
            if problem:
                rest += theirs
            else:
                self.add_gradients(fetch.rows)
                self._add(arrivals[0].sums, theirs)
                self.log_ratios |= fetch.log_ratios
            reports.append(_report(fetch.share, problem, _generated(theirs), arrivals))
        self._compute(rest)
        return reports

    def _await(
        self, fetch: GradientClient, samples: Sequence[TokenSample], since: float
    ) -> Arrival:
        if fetch.share.version != self._version():
            return Arrival(f"of version {fetch.share.version}, the core has {self._version()}")
        patience_s = UNMEASURED_PATIENCE_S
        if self._tokens_per_s:
            tokens = sum(len(sample.token_ids) for sample in _of(fetch.share, samples))
            patience_s = max(MIN_PATIENCE_S, tokens / self._tokens_per_s)
        return fetch.settle(since, patience_s)

    def learning_rate(self, step: int) -> float:
        """The learning rate of optimizer step ``step``, counted from 1."""
        return learning_rate_at(step, self.config.training, self.config.steps)

    def probe(self) -> ProbeResult:
        """*Collective.* The fixed sequence and what the current policy thinks of it."""
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        token_ids = probe_tokens(vocabulary, self.config.probe_tokens)
        return ProbeResult(token_ids, self.logprobs_of(token_ids))

    @property
    def published_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """*Collective in a replica.* Each weight, whole, where it is computed with; all ranks of a
        replica must exhaust it, or none.

        Names and shapes are those of the model's files. What is gathered is in the format of
        publication, which is the half; the rest is as it is.
        """
        return self._whole_of(self.published())

    def written_weights(self, writers: int) -> Iterator[TensorRows]:
        """*Collective in the first replica.* Of each weight the rows that this rank writes, if so
        many of its replica's ranks do; all of them must exhaust it, or none.

        Whole are those of which there are no shards. Those that are stacked or cut on their way to
        the model's files, and experts that ranks part, are gathered one group after the other.
        """
        named = self.named_once()
        exchange = RowExchange(self.rank, self.shards, writers, self.published_dtype)
        for group in self.published():
            tensor = named[group.memory[0]]
            shard = isinstance(tensor, DTensor) and not is_parted(tensor)
            if group.conversion is None and shard:
                for name in group.disk:
                    yield from exchange.rows_of(name, tensor)
            else:
                yield from whole(self._whole_of([group]))

    def adapter_manifest(self) -> dict[str, Any] | None:
        """*Collective.* What versions say of an adapter: its scaling, and of what model it is."""
        lora = self.config.training.lora
        if lora is None:
            return None
        base = {
            name: described(tensor.to(self.published_dtype))
            for name, tensor in self._whole_of(self.base())
        }
        return {"scaling": lora.alpha / lora.rank, "base": base}

    def _whole_of(self, groups: Sequence[TensorGroup]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors by their names in the files, one group after the other, so that
        no second model is there.
        """
        named = self.named_once()
        for group in groups:
            yield from group.to_disk(
                {name: self._whole(named[name]) for name in group.memory}
            ).items()

    def _whole(self, tensor: Tensor) -> Tensor:
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.to(self.published_dtype).full_tensor()
        return whole

    def _clip(self, max_norm: float) -> Tensor:
        of_meshes: dict[Any, list[nn.Parameter]] = {}  # torch takes one mesh at a time
        for parameter in self.parameters().values():
            if parameter.grad is not None:
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                of_meshes.setdefault(mesh, []).append(parameter)
        norms = [
            nn.utils.get_total_norm([one.grad for one in parameters])
            for parameters in of_meshes.values()
        ]
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in norms]
        norm = whole[0] if len(whole) == 1 else torch.stack(whole).norm()
        for parameters in of_meshes.values():
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm


def _shared_by(ranks: int) -> str:
    return f", shared by {ranks} ranks" if ranks > 1 else ""


def _generated(samples: Sequence[TokenSample]) -> int:
    return sum(sample.generated for sample in samples)


def _by_update(
    given: Sequence[TokenSample], shares: Sequence[WorkerShare]
) -> tuple[list[WorkerShare], list[dict[str, Any]]]:
    """The shares of the first update, whose samples are given; and what ``/train`` says of those
    with trajectories of later ones, which need weights that no worker has."""
    first = {sample.trajectory for sample in given}
    timely = [share for share in shares if share.trajectories <= first]
    why = "it has trajectories of a later update"
    late = [_report(one, why, 0, [Arrival(why)]) for one in shares if one not in timely]
    return timely, late


def _parted(
    given: Sequence[TokenSample], shares: Sequence[WorkerShare]
) -> tuple[list[TokenSample], list[TokenSample]]:
    """The samples in no share, and those in one."""
    elsewhere = {one for share in shares for one in share.trajectories}
    own = [sample for sample in given if sample.trajectory not in elsewhere]
    return own, [sample for sample in given if sample.trajectory in elsewhere]


def _of(share: WorkerShare, samples: Sequence[TokenSample]) -> list[TokenSample]:
    return [sample for sample in samples if sample.trajectory in share.trajectories]


def _report(
    share: WorkerShare, problem: str, tokens: int, arrivals: Sequence[Arrival]
) -> dict[str, Any]:
    """What ``/train`` says of a share; ``bytes`` are those of all ranks, times the longest."""
    return {
        "worker": share.worker,
        "used": not problem,
        "reason": problem,
        "tokens": tokens,
        "seconds": arrivals[0].seconds,
        "waited_s": max(arrival.waited_s for arrival in arrivals),
        "bytes": sum(arrival.bytes for arrival in arrivals),
        "transfer_s": max(arrival.transfer_s for arrival in arrivals),
    }
