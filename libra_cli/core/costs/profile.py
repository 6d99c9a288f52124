"""What the planner prices with: servers, training steps, moves; one ``Profile`` of all.

Training, for ``w`` ranks of sharded data parallelism (the trainer has no other), of which ``s``
share a replica (``costs.memory.shards_of``: a node's where it holds one, else all), so that there
are ``r = w / s`` replicas, with ``T`` tokens and ``Q`` pairs of them a step::

    compute = p max((token_s x T + pair_s x Q) / w, the longest trajectory on one rank)
    gather  = p x micro batches of a rank x 8 bytes x parameters x (s - 1) / s / bandwidth
    reduce  = u x 2 x 4 bytes x parameters x (r - 1) / r / bandwidth across nodes
    attend  = p x 3 x layers x 2 bytes x units exchanged of a token x T / w / bandwidth
    seconds = step_s + compute + exposed x (gather + reduce) + attend + u x offload

``p`` are the passes over a batch and ``u`` its updates, 1 and 1 as a profile is measured
(``passes_of``).

``gather``: each micro batch gathers parameters forward and backward, 2 bytes of each, and scatters
float32 gradients (FSDP2's ``reduce_dtype``), most of it under the compute; of an adapter, only its
own gradients. ``reduce``: replicas exchange float32 gradients once a step; a ring sends each twice.
``attend``: where n ranks share a forward pass (``cp_size``), attention exchanges tokens for heads
forward, forward once more and backward (``costs.heads``), and waits for them; the longest
trajectory is then on n ranks, and a micro batch on as many. ``offload``: with moments in the host's
memory, 16 bytes a trained parameter and replica at ``HOST_BANDWIDTH``. Where the inputs of layers
are in the host's memory (``activation_offload``) a step waits p x 2 x 2 bytes x layers x hidden x
T / w / HOST_BANDWIDTH besides, for both ways. With ``tiled_mlp`` the feed-forward parts go forward
once more: ``token_s`` grows by ``FORWARD`` times their share of the parameters that a token is
multiplied with. Gradient workers shorten
``busy``, which is the step without ``step_s`` and ``offload``: with workers i that would take
``c_i`` for all of it, and ``t = gradient bytes / link_bandwidth`` for their gradients, all end
after ``T`` seconds, with::

    T / busy + sum of max(0, T - t) / c_i = 1

Memory of a rank is ``costs.memory``'s.

Guarantee: more tokens never cost less, and ``Profile.from_json`` undoes ``to_json``. Limit: work is
spread evenly over the ranks but for the longest trajectory; padding is part of the utilisation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from math import gcd
from typing import Any, TypeVar

from libra_cli.config.errors import InputError
from libra_cli.config.rollout import Quantization
from libra_cli.config.training import LoraSpec, Optimizer, TrainingSpec
from libra_cli.core.costs.architecture import Architecture, DenseTransformer
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.memory import (
    GIB,
    NO_MOMENTS,
    SERVER_OVERHEAD_GIB,
    TRAINER_OVERHEAD_GIB,
    USABLE_SHARE,
    longest_context,
    parting,
    rank_memory,
    served_bytes,
    server_overhead_gib,
    shards_of,
)
from libra_cli.core.costs.mixture_server import MixtureServerCost
from libra_cli.core.costs.mixture_transformer import Attention, MixtureTransformer
from libra_cli.core.costs.mixtures import refuse_mixture
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.evidence import Recalibration, Starts
from libra_cli.core.types import Seconds, Tokens
from libra_cli.core.workload import Workload

HOST_BANDWIDTH = 2e10
"""Bytes a second between a GPU and its host's page-locked memory: PCIe 4.0 x16 has 3.2e10."""
FORWARD = 0.25
"""Share of a forward pass in a whole pass: forward, backward (twice as dear) and forward once more
for what was not kept.
"""
_Part = TypeVar("_Part")


class NothingFits(InputError):
    """No plan can run. ``constraint`` is the one that fails first."""

    def __init__(self, constraint: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.constraint = constraint


class ProfileError(InputError):
    """A profile that is not valid, not known, or for another GPU or model."""


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The sizes of a model and a GPU that memory follows from;
    ``kv_bytes`` is of one token in all layers.
    """

    parameters: float
    layers: int
    hidden: int
    vocabulary: int
    kv_bytes: float
    gpu_gib: float
    usable_share: float = USABLE_SHARE
    server_overhead_gib: float = SERVER_OVERHEAD_GIB
    trainer_overhead_gib: float = TRAINER_OVERHEAD_GIB
    adapter: int | None = None
    """Parameters of the adapter that is trained in place of all; None if there is none."""
    optimizer: Optimizer = "adamw"
    reference: bool = False
    """Whether the trainer keeps the first policy beside the one that it trains."""
    activation_offload: bool = False
    tiled_mlp: bool = False
    quantization: Quantization | None = None
    """``rollout.quantization``: how servers hold the weights."""
    experts: int = 0
    """Routed experts of a layer; 0 for a dense model."""
    chosen: int = 0
    """Experts that the router chooses for a token, of ``experts``."""
    expert_inner: int = 0
    """Inner units of one expert."""
    scored_heads: int = 0
    """Query heads whose scores the trainer makes matrices of, as ``Architecture`` has them."""

    def with_adapter(self, lora: LoraSpec | None) -> MemoryModel:
        """The same model of which such an adapter is trained."""
        return replace(self, adapter=self.architecture.with_adapter(lora).adapter)

    @property
    def trained(self) -> float:
        """Parameters that have a gradient and optimizer states: all, or the adapter's."""
        return self.parameters if self.adapter is None else self.adapter

    @property
    def architecture(self) -> Architecture:
        """A model of this size, whose query heads are as wide as its hidden state, and whose inner
        units are what the other parameters leave; of a mixture, whose query heads are that."""
        key = self.kv_bytes / (2 * 2 * self.layers)
        layer = (self.parameters - 2 * self.vocabulary * self.hidden) / self.layers / self.hidden
        if self.experts:
            return self._mixture(round(key), layer)
        inner = (layer - 2 * self.hidden - 2 * key) / 3
        return DenseTransformer(
            layers=self.layers,
            hidden=self.hidden,
            query=self.hidden,
            key=round(key),
            inner=max(1, round(inner)),
            vocabulary=self.vocabulary,
            tied=False,
            adapter=self.adapter,
            scored_heads=self.scored_heads,
        )

    def _mixture(self, key: int, layer: float) -> MixtureTransformer:
        """The mixture of these sizes, with ``layer`` parameters in one for each hidden unit."""
        query = round((layer - self.experts * (1 + 3 * self.expert_inner)) / 2 - key)
        return MixtureTransformer(
            layers=self.layers,
            dense_layers=0,
            hidden=self.hidden,
            attention=Attention.grouped(self.hidden, query, key),
            inner=0,
            experts=self.experts,
            chosen=self.chosen,
            expert_inner=self.expert_inner,
            shared_inner=0,
            vocabulary=self.vocabulary,
            tied=False,
            adapter=self.adapter,
        )

    @property
    def usable_gib(self) -> float:
        """GiB of one GPU that an engine or a trainer may take."""
        return self.gpu_gib * self.usable_share

    def weights_gib(self, tensor_parallel: int) -> float:
        """The weights on each GPU of a server, in bf16 or quantized."""
        return (2 * self.parameters - self._spared_bytes) / tensor_parallel / GIB

    @property
    def _spared_bytes(self) -> float:
        """What quantized weights take less than bf16, over all GPUs of a server."""
        if self.quantization is None:
            return 0.0
        shape = self.architecture
        return served_bytes(shape) - served_bytes(shape, self.quantization)

    @property
    def spared_tokens(self) -> int:
        """Tokens of KV cache that fit where a server's weights in bf16 would have been."""
        return int(self._spared_bytes / self.kv_bytes)

    def server_gib(self, tensor_parallel: int, kv_tokens: Tokens) -> float:
        """GiB on each GPU of a server whose KV cache holds ``kv_tokens``."""
        kv = kv_tokens * self.kv_bytes / tensor_parallel / GIB
        return self.weights_gib(tensor_parallel) + kv + self.server_overhead_gib


CHANGED = 0.02
"""Share of a bf16 version that is sent: twice what was at the default learning rate (1e-6)."""


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Seconds of a training step; the formula is the module's.

    ``token_s`` and ``pair_s`` are GPU-seconds of a token and of a pair of tokens (forward, backward
    and recomputation); ``step_s`` what a step costs whatever is in it; the bandwidths are bytes a
    second of a collective inside a node and across nodes of ``node_gpus``. ``micro_tokens`` are the
    most of a micro batch; ``exposed`` is the share of the gathering that no arithmetic hides
    (chosen, not measured).
    """

    token_s: Seconds
    pair_s: Seconds
    step_s: Seconds
    facts: MemoryModel
    node_bandwidth: float
    network_bandwidth: float
    node_gpus: int = 8
    micro_tokens: Tokens = 16384
    exposed: float = 0.3
    gradient_bytes: float = 4.0
    """Bytes that a gradient worker sends for each trained parameter."""
    passes: float = 1.0
    """Times that a step computes its tokens forward and backward."""
    updates: int = 1
    """Optimizer updates of a step."""
    shared: float = 1.0
    """The share of ``busy_s`` that gradient workers can take part in: that of the first update."""
    link_bandwidth: float = 0.0
    """Bytes a second from a gradient worker to the trainer; 0 until something has come over the
    network, and then transfer counts nothing."""
    reload_s: Seconds = 0.0
    """Seconds from the end of a step until a gradient worker has loaded its version."""
    cp_size: int | None = 1
    """Ranks of a replica that share a forward pass, if it has a multiple of them; None: as few as
    have the memory."""
    ep_size: int = 1
    """Ranks of a replica that hold other experts of each layer, if it has a multiple of them."""

    def seconds(self, ranks: int, workload: Workload) -> Seconds:
        offload_s = self._offload_s(ranks, workload)
        return self.step_s + self.busy_s(ranks, workload) + offload_s

    def busy_s(self, ranks: int, workload: Workload) -> Seconds:
        """Seconds of a step that more ranks shorten, and gradient workers as ``shared`` says."""
        exchange_s = self._exchange_s(ranks, workload)
        waited_s = self._attend_s(ranks, workload) + self._travel_s(ranks, workload)
        waited_s += self._inputs_s(ranks, workload)
        return self.compute_s(ranks, workload) + self.exposed * exchange_s + waited_s

    @property
    def transfer_s(self) -> Seconds:
        """Seconds until the trainer has the gradients of a worker that has computed them."""
        if not self.link_bandwidth:
            return 0.0
        return self.gradient_bytes * self.facts.trained / self.link_bandwidth

    @property
    def lag_s(self) -> Seconds:
        """Seconds of a step in which a worker computes nothing, where the next begins at once."""
        return self.reload_s + self.transfer_s

    def compute_s(self, ranks: int, workload: Workload) -> Seconds:
        """Seconds of arithmetic of a step: shared evenly, but a trajectory stays on one rank, or on
        those that share a forward pass."""
        token_s = self.token_s * (1 + self._again)
        even = (token_s * workload.tokens + self.pair_s * workload.pairs) / ranks
        context = workload.longest_expected
        longest = token_s * context + self.pair_s * context**2 / 2
        return self.passes * max(even, longest / self.sharing(ranks, workload.longest.context))

    def communication_ratio(self, ranks: int, workload: Workload) -> float:
        """Seconds of communication, hidden or not, for each second of arithmetic."""
        waited_s = self._attend_s(ranks, workload) + self._travel_s(ranks, workload)
        moved_s = self._exchange_s(ranks, workload) + waited_s
        return moved_s / self.compute_s(ranks, workload)

    def memory_gib(self, ranks: int, longest_context: Tokens) -> float:
        """The most GiB that a rank holds at once, with every layer's activations computed again."""
        return self._shard_gib(self._shards(ranks, longest_context), longest_context)

    def longest_context(self, ranks: int) -> Tokens:
        """Tokens of the longest trajectory that a rank has the memory for; 0 where it has none for
        a micro batch."""
        return longest_context(lambda tokens: self.memory_gib(ranks, tokens), self.facts.usable_gib)

    def sharing(self, ranks: int, longest: Tokens) -> int:
        """Return how many of ``ranks`` share a forward pass of up to
        ``longest`` tokens (``cp_size``).
        """
        return self._fewest(self._shards(ranks, longest), longest)

    def _fewest(self, shards: int, longest: Tokens) -> int:
        if self.facts.scored_heads:
            return 1
        if self.cp_size is not None:
            return gcd(self.cp_size, shards)
        heads = self.facts.architecture.heads
        degrees = [n for n in range(1, shards + 1) if shards % n == 0 and heads.divides(n)]
        usable = self.facts.usable_gib
        fitting = (n for n in degrees if self._shared_gib(shards, longest, n) <= usable)
        return next(fitting, degrees[-1])

    def within(self, memory: float) -> TrainingCost:
        """Return the cost of ranks that have this share of each GPU's memory: where a host's cannot
        hold a replica so, all ranks share one."""
        return replace(self, facts=replace(self.facts, usable_share=memory))

    @property
    def of_worker(self) -> TrainingCost:
        """The cost of a gradient worker, whose GPUs hold no moments."""
        return replace(self, facts=replace(self.facts, optimizer=NO_MOMENTS))

    def scaled(self, factor: float) -> TrainingCost:
        """The same trainer with every second ``factor`` times as long."""
        return replace(
            self,
            token_s=self.token_s * factor,
            pair_s=self.pair_s * factor,
            step_s=self.step_s * factor,
            node_bandwidth=self.node_bandwidth / factor,
            network_bandwidth=self.network_bandwidth / factor,
        )

    def _shards(self, ranks: int, longest_context: Tokens) -> int:
        """Return how many of ``ranks`` share a replica."""
        node = self.node_gpus
        if ranks <= node or ranks % node:  # not several nodes, or uneven ones
            return ranks
        fits = self._shard_gib(node, longest_context) <= self.facts.usable_gib
        return shards_of(ranks, node, host_fits=fits)

    def _shard_gib(self, shards: int, longest: Tokens) -> float:
        return self._shared_gib(shards, longest, self._fewest(shards, longest))

    def _shared_gib(self, shards: int, longest: Tokens, sharing: int) -> float:
        # A row of a model that makes matrices of scores has one trajectory.
        tokens = longest if self.facts.scored_heads else max(self.micro_tokens, longest)
        return _rank_gib(self.facts, shards, tokens, sharing, self._parted(shards))

    def _parted(self, shards: int) -> int:
        """How many ranks of a replica hold other experts."""
        return parting(self.ep_size, shards, self.facts.architecture.routed_experts)

    def _travel_s(self, ranks: int, workload: Workload) -> Seconds:
        """Seconds that tokens are on the way to their experts and back, forward, once more where
        activations are computed again, and backward; nothing is computed meanwhile."""
        parted = self._parted(self._shards(ranks, workload.longest.context))
        if parted == 1:
            return 0.0
        shape = self.facts.architecture
        token_bytes = (
            3 * shape.routed_layers * shape.travelling_bytes(parted) * (parted - 1) / parted
        )
        inside = parted <= self.node_gpus
        bandwidth = self.node_bandwidth if inside else self.network_bandwidth
        return self.passes * token_bytes * workload.tokens / ranks / bandwidth

    def _attend_s(self, ranks: int, workload: Workload) -> Seconds:
        sharing = self.sharing(ranks, workload.longest.context)
        if sharing == 1:
            return 0.0
        shape = self.facts.architecture
        token_bytes = 3 * 2 * shape.layers * shape.heads.exchanged(sharing)
        inside = sharing <= self.node_gpus
        bandwidth = self.node_bandwidth if inside else self.network_bandwidth
        return self.passes * token_bytes * workload.tokens / ranks / bandwidth

    @property
    def _again(self) -> float:
        """What ``tiled_mlp`` adds to the seconds of a token, as a share of them."""
        shape = self.facts.architecture
        return FORWARD * shape.tiled_parameters / shape.active_parameters * self.facts.tiled_mlp

    def _inputs_s(self, ranks: int, workload: Workload) -> Seconds:
        """Seconds that the inputs of layers are on the way to the host's memory and back, on the
        stream that computes; two bytes a number."""
        if not self.facts.activation_offload:
            return 0.0
        shape = self.facts.architecture
        token_bytes = 2 * 2 * shape.layers * shape.hidden
        return self.passes * token_bytes * workload.tokens / ranks / HOST_BANDWIDTH

    def _offload_s(self, ranks: int, workload: Workload) -> Seconds:
        if self.facts.optimizer != "adamw_offload":
            return 0.0
        shards = self._shards(ranks, workload.longest.context)
        return self.updates * 16 * self.facts.trained / shards / HOST_BANDWIDTH

    def _gathered_bytes(self, shards: int) -> float:
        """Bytes that a rank receives of its replica in a micro-batch: twice the weights in
        bfloat16, and the gradients in float32."""
        facts, parted = self.facts, self._parted(shards)
        moved = 2 * 2 * facts.parameters + 4 * facts.trained
        if parted == 1:
            return moved * (shards - 1) / shards
        routed = 2 * 2 * facts.architecture.routed_parameters
        if facts.adapter is None:
            routed *= 2
        column = shards // parted
        return (moved - routed) * (shards - 1) / shards + routed / parted * (column - 1) / column

    def _exchange_s(self, ranks: int, workload: Workload) -> Seconds:
        shards = self._shards(ranks, workload.longest.context)
        replicas, trained = ranks // shards, self.facts.trained
        moved = self._gathered_bytes(shards)
        inside = shards <= self.node_gpus
        bandwidth = self.node_bandwidth if inside else self.network_bandwidth
        groups = ranks / self.sharing(ranks, workload.longest.context)
        micro_batches = self.passes * max(1.0, workload.tokens / groups / self.micro_tokens)
        gather_s = micro_batches * moved / bandwidth
        reduce_s = 2 * 4 * trained * (replicas - 1) / replicas / self.network_bandwidth
        return gather_s + self.updates * reduce_s


@lru_cache(maxsize=4096)
def _rank_gib(facts: MemoryModel, shards: int, tokens: Tokens, sharing: int, parted: int) -> float:
    """GiB of a rank that shares a replica with ``shards - 1`` others, and each forward pass with
    ``sharing - 1``; ``parted`` of them hold other experts. Plans ask again and again."""
    use = rank_memory(
        facts.architecture,
        world=shards,
        tokens=tokens,
        choice="full",
        optimizer=facts.optimizer,
        reference=facts.reference,
        cp_size=sharing,
        activation_offload=facts.activation_offload,
        tiled_mlp=facts.tiled_mlp,
        ep_size=parted,
    )
    return use.total / GIB + facts.trainer_overhead_gib


def passes_of(training: TrainingSpec) -> float:
    """Return how many times a recipe's step computes its tokens, forward and backward being 1.

    A pass without gradient counts ``FORWARD``. There is one more for the log-probabilities that the
    policy gives, before the first update, to what comes in later ones, or to all where that needs
    them (``scores_first``); one for the reference model's; and one before each update but the first
    for what a loss compares.
    """
    needs = training.needs
    once = 1 - 1 / training.minibatches if training.epochs == 1 else 1.0
    compares = needs.group_values or training.kl_in_reward
    before = 1.0 if compares or training.scores_first else once
    again = training.epochs - 1 / training.minibatches if needs.group_values else 0.0
    return training.epochs + FORWARD * (before + needs.reference + again)


def shared_part(training: TrainingSpec) -> float:
    """Return the share of a step's seconds of computing that gradient workers can take part in:
    that of its first update, less a pass over the whole batch before it. 0: they have no share."""
    if not training.shares_steps:
        return 0.0
    needs = training.needs
    without = needs.reference + (needs.group_values or training.kl_in_reward)
    first = 1 + FORWARD * without * (not training.scores_first)
    return first / training.minibatches / passes_of(training)


WAKE_S: Seconds = 5.0
"""Seconds until a server that sleeps serves again. ESTIMATED, NOT MEASURED ON A GPU: 16 GB of
weights at 4 to 8 GB/s from the host's memory, and their proof. The first that wakes replaces it."""


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Seconds that the GPUs of a move do nothing.

    ``to_training_s``: a server drained and stopped until its GPUs hold a gradient worker with the
    current weights. ``start_s``: a server, from its start until it is routed to, by its
    tensor-parallel degree. ``to_rollout_s``: the same on GPUs that come from training, where they
    work on while the server starts beside them. ``resize_s``: the trainer's core stopped, saved,
    restarted with another world and loaded, everyone waiting.
    """

    to_training_s: Seconds
    to_rollout_s: Seconds
    resize_s: Seconds
    start_s: Mapping[int, Seconds]

    def start(self, tensor_parallel: int) -> Seconds:
        """Seconds to start a server of this shape; the longest known where it was not measured."""
        return self.start_s.get(tensor_parallel, max(self.start_s.values(), default=0.0))

    def arrive(self, tensor_parallel: int) -> Seconds:
        """Seconds until GPUs that come from training have a server of this shape."""
        return min(self.to_rollout_s, self.start(tensor_parallel))

    def scaled(self, factor: float) -> MoveCost:
        """Return the same moves with every second ``factor`` times as long."""
        return MoveCost(
            self.to_training_s * factor,
            self.to_rollout_s * factor,
            self.resize_s * factor,
            {degree: seconds * factor for degree, seconds in self.start_s.items()},
        )


@dataclass(frozen=True, slots=True)
class Contention:
    """Delays of a run beside those of engines and trainer; measured where it runs, else the
    defaults.

    ``sync_s``: from a published version to a server that has proved it. ``stall_s``: how long of
    that the server's engine stands still. ``turn_s``: what a turn spends outside the engine. Where
    servers and the trainer share cores, a step of either takes ``serving_slowdown`` or
    ``training_slowdown`` times as long while the other works, and each rank of the trainer beyond
    the first slows all of them by the share ``rank_slowdown``.
    """

    sync_s: Seconds = 1.0
    stall_s: Seconds = 0.0
    turn_s: Seconds = 0.0
    serving_slowdown: float = 1.0
    training_slowdown: float = 1.0
    rank_slowdown: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Every price of one model on one GPU.

    ``servers`` maps a tensor-parallel degree to its prices; a degree that is missing cannot run.
    ``overhead_s`` is the part of every server's ``step_s`` that is the engine's and not a kernel's.
    ``provenance`` says, part by part, where the numbers come from.
    """

    name: str
    gpu: str
    model: str
    servers: Mapping[int, ServerLaw]
    training: TrainingCost
    moves: MoveCost
    overhead_s: Seconds
    provenance: Mapping[str, str]
    surroundings: Contention = Contention()

    @property
    def facts(self) -> MemoryModel:
        """The memory model of the model and the GPU."""
        return self.training.facts

    def serves(self, tensor_parallel: int) -> bool:
        """Whether a server of this degree has prices, and the memory for its weights and cache."""
        cost = self.servers.get(tensor_parallel)
        if cost is None:
            return False
        return self.facts.server_gib(tensor_parallel, cost.kv_tokens) <= self.facts.usable_gib

    def sharing(self, tensor_parallel: int, memory: float) -> ServerLaw | None:
        """The prices of a server that has this share of the memory of each of its GPUs, and for its
        KV cache what the weights leave of it; None where that is nothing, or it has no prices."""
        cost, facts = self.servers.get(tensor_parallel), self.facts
        if cost is None:
            return None
        taken_gib = facts.weights_gib(tensor_parallel) + server_overhead_gib(tensor_parallel)
        room = (memory * facts.gpu_gib - taken_gib) * tensor_parallel * GIB
        tokens = min(cost.kv_tokens, int(room / facts.kv_bytes))
        return cost.with_kv_tokens(tokens) if tokens > 0 else None

    def quantized(self, quantization: Quantization | None) -> Profile:
        """Return the same whose servers hold their weights so, and KV in the room that this leaves.

        Seconds stay those of bf16, until they are learned from the run's own steps; and a degree
        that bf16 has no room for has no prices.
        """
        facts = replace(self.facts, quantization=quantization)
        servers = {
            degree: cost.with_kv_tokens(cost.kv_tokens + facts.spared_tokens)
            for degree, cost in self.servers.items()
        }
        return replace(self, servers=servers, training=replace(self.training, facts=facts))

    def scaled(self, factor: float) -> Profile:
        """Return these costs with every server ``factor`` times as slow, and training as it is."""
        return replace(
            self,
            overhead_s=self.overhead_s * factor,
            servers={degree: cost.scaled(factor) for degree, cost in self.servers.items()},
        )

    def recalibrated(self, factors: Recalibration) -> Profile:
        """Return these costs times the factors: ``rollout`` for servers, ``training`` for steps."""
        slower = self.scaled(factors.rollout)
        return replace(slower, training=slower.training.scaled(factors.training))

    def with_moves_seen(self, starts: Starts, *, sleep: bool) -> Profile:
        """Return these costs with the moves that a run has seen in the place of estimates, and
        with its starts: a server's whatever its degree, and a trainer's for a resize.

        Where servers ``sleep`` and one has left its GPUs, those have it back after ``WAKE_S`` until
        a run has seen how long that takes.
        """
        named = {
            "to training": starts.to_training_s,
            "to rollout": starts.to_rollout_s,
            "a server": starts.server_s,
            "the trainer": starts.trainer_s,
        }
        seen = {what: seconds for what, seconds in named.items() if seconds is not None}
        if not seen:
            return self
        told = [f"seen in this run: {what} {seconds:.1f} s" for what, seconds in seen.items()]
        if sleep and "to training" in seen and "to rollout" not in seen:
            seen["to rollout"] = WAKE_S
            told.append(f"a server that sleeps wakes in {WAKE_S:.0f} s: ESTIMATED, NOT MEASURED")
        moves, server_s = self.moves, seen.get("a server")
        moves = MoveCost(
            to_training_s=seen.get("to training", moves.to_training_s),
            to_rollout_s=seen.get("to rollout", moves.to_rollout_s),
            resize_s=seen.get("the trainer", moves.resize_s),
            start_s=moves.start_s if server_s is None else dict.fromkeys(self.servers, server_s),
        )
        before = self.provenance.get("moves", "")
        words = "; ".join([*told, f"the others: {before}"])
        return replace(self, moves=moves, provenance={**self.provenance, "moves": words})

    def on_network(self, gigabits: float) -> Profile:
        """The same where a host's link carries so many gigabits a second: the gradients of a
        worker, and what a new version changes of the weights in bf16, take as long as that."""
        bandwidth = gigabits * 1e9 / 8
        version_s = CHANGED * 2 * self.facts.parameters / bandwidth
        around = replace(self.surroundings, sync_s=self.surroundings.sync_s + version_s)
        training = replace(self.training, link_bandwidth=bandwidth, reload_s=around.sync_s)
        return replace(self, training=training, surroundings=around)

    def to_json(self) -> str:
        """Return the profile as one JSON object, in seconds, bytes, GiB and tokens."""
        body = asdict(self)
        body["servers"] = [cost.to_dict() for _, cost in sorted(self.servers.items())]
        body["moves"]["start_s"] = {str(k): v for k, v in self.moves.start_s.items()}
        return json.dumps(body, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return the profile that ``to_json`` wrote.

        Raises:
            ProfileError: the text is no such profile; names the key.
            MixtureRefused: its model is a mixture of experts, and its servers have the law of a
                dense one.
        """
        body = _object(text)
        training = dict(_section(body, "training"))
        training["facts"] = _part(MemoryModel, _section(training, "facts", "training."), "facts")
        moves = dict(_section(body, "moves"))
        starts = _section(moves, "start_s", "moves.")
        moves["start_s"] = {int(degree): float(value) for degree, value in starts.items()}
        costs = [_server(cost) for cost in _list(body, "servers")]
        if not all(isinstance(cost, MixtureServerCost) for cost in costs):
            refuse_mixture(str(body.get("model", "")), {})
        given = {
            **body,
            "servers": {cost.tensor_parallel: cost for cost in costs},
            "training": _part(TrainingCost, training, "training"),
            "moves": _part(MoveCost, moves, "moves"),
        }
        if "surroundings" in body:
            found = _section(body, "surroundings")
            given["surroundings"] = _part(Contention, found, "surroundings")
        return _part(cls, given, "profile")


def _server(given: Any) -> ServerCost:
    """Return one server's prices; those of a mixture, if they have ``experts``."""
    mixture = isinstance(given, Mapping) and "experts" in given
    return _part(MixtureServerCost if mixture else ServerCost, given, "servers")


def _object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProfileError(f"line {error.lineno}: is not JSON ({error.msg})") from error
    if not isinstance(body, dict):
        raise ProfileError("is not a JSON object")
    return body


def _section(body: Mapping[str, Any], key: str, under: str = "") -> Mapping[str, Any]:
    value = body.get(key)
    if not isinstance(value, dict):
        raise ProfileError(f"{under}{key}: must be an object")
    return value


def _list(body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if not isinstance(value, list) or not value:
        raise ProfileError(f"{key}: must be a list with at least one entry")
    return value


def _part(kind: type[_Part], given: Any, where: str) -> _Part:
    """Return a ``kind`` made of a mapping.

    Raises:
        ProfileError: a key is unknown or missing, or a value is of another type; names it.
    """
    types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(given, Mapping):
        raise ProfileError(f"{where}: must be an object")
    unknown = sorted(set(given) - set(types))
    if unknown:
        raise ProfileError(f"{where}.{unknown[0]}: no such key; known: {', '.join(sorted(types))}")
    for key, value in given.items():
        if types[key] in ("float", "int", "Seconds", "Tokens") and not _is_amount(value):
            raise ProfileError(f"{where}.{key}: must be a number that is not negative")
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ProfileError(f"{where}: {error}") from error


def _is_amount(value: Any) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and 0 <= value < float("inf")
