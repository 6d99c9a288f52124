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

A world of one computes under autocast: it keeps float32 inputs of the norms, and copies of the
weights in c bytes as long as their activations. Of an **adapter** with n parameters the states are
16 n / W beside c P / W of the model, which is held as it is computed with: so nothing is copied for
autocast, and the rest of the model has no gradients. **Server**: weights in c bytes over its GPUs
and ``SERVER_OVERHEAD_GIB``; the rest is KV cache.

The bytes were fitted to torch's memory tracker on the trainer's own code, with fake tensors:
eleven cases of 2 to 6 layers of true width in bfloat16 on 1 and 8 ranks, none further off than
13 %.

Guarantee: within 15 % of the same tracker for whole models, to which nothing was fitted (seven
cases, none further off than 5 %; ``tests/unit/node/model/test_memory.py`` has one of them), and the
update alone within 0.1 %, sharded or not. Limit: dense models; of an adapter nothing was compared;
what a CUDA context, its allocator and NCCL take is assumed (``TRAINER_OVERHEAD_GIB``); where hosts
are replicas and a step comes in parts (``training.stream``, gradient workers), 4 P / W more are
held while a part is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from libra_cli.config.errors import LibraError
from libra_cli.config.training import LoraSpec, Optimizer
from libra_cli.core.costs.mixtures import refuse_mixture
from libra_cli.core.types import Tokens

GIB = 2.0**30
BLOCK_LOGITS = 2**25
"""Logits of a block of the output layer, as in ``node.model.logprobs``."""
BLOCK_BYTES = 10
"""Of a logit of a block at its worst: two in float32, or one and its gradient, and one in c."""
CHECKPOINT_BYTES = 12
"""Of a parameter in a checkpoint: float32 weight and two moments (Kingma and Ba, arXiv 1412.6980).
"""
SERVER_OVERHEAD_GIB = 1.85
"""GiB a server takes on each GPU for CUDA graphs, activations and communication buffers."""
TRAINER_OVERHEAD_GIB = 6.0
"""GiB a rank takes for the CUDA context, communication buffers and fragmentation."""
USABLE_SHARE = 0.9
"""Share of a GPU's memory that an engine or a trainer may take; vLLM's default."""
Choice: TypeAlias = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a dense decoder-only transformer's memory follows from; sizes are numbers of units."""

    layers: int
    hidden: int
    query: int
    """Of all query heads together."""
    key: int
    """Of all key heads together, and as many of values."""
    inner: int
    vocabulary: int
    tied: bool
    """Whether the output layer is the embedding."""
    adapter: int | None = None
    """Parameters of the adapter that is trained in place of all; None if there is none."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: str) -> Architecture:
        """The shape that a ``config.json`` describes; ``model`` is told to people.

        Raises:
            MixtureRefused: it is a mixture of experts.
            LibraError: it lacks a size.
        """
        refuse_mixture(model, config)
        inside = config.get("text_config") or config
        try:
            heads, hidden = int(inside["num_attention_heads"]), int(inside["hidden_size"])
            head = int(inside.get("head_dim") or hidden // heads)
            return cls(
                layers=int(inside["num_hidden_layers"]),
                hidden=hidden,
                query=heads * head,
                key=int(inside.get("num_key_value_heads") or heads) * head,
                inner=int(inside["intermediate_size"]),
                vocabulary=int(inside["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LibraError(
                f"the config.json of {model} has no usable {error}",
                hint="what memory goes to is known for dense decoder-only transformers",
            ) from error

    def with_adapter(self, lora: LoraSpec | None) -> Architecture:
        """The same model of which such an adapter is trained.

        A matrix of m by n has rank x (m + n) parameters of it (arXiv 2106.09685).
        """
        return self if lora is None else replace(self, adapter=self._adapter_parameters(lora))

    def _adapter_parameters(self, lora: LoraSpec) -> int:
        hidden, query, key, inner = self.hidden, self.query, self.key, self.inner
        sides = {
            "q_proj": hidden + query,
            "k_proj": hidden + key,
            "v_proj": hidden + key,
            "o_proj": query + hidden,
            "gate_proj": hidden + inner,
            "up_proj": hidden + inner,
            "down_proj": inner + hidden,
        }
        everything = "all-linear" in lora.target_modules
        targets = sides if everything else lora.target_modules
        return self.layers * lora.rank * sum(sides[name] for name in targets)

    @property
    def trained(self) -> int:
        """Parameters that have a gradient and moments."""
        return self.parameters if self.adapter is None else self.adapter

    @property
    def matrices(self) -> int:
        """Of them those that Muon moves: of the layers, or of the adapter."""
        return self.layers * self.layer_parameters if self.adapter is None else self.adapter

    def moment_bytes(self, optimizer: Optimizer) -> float:
        """Bytes of the optimizer's moments, wherever they are: two in float32 of each parameter
        that is trained, and one of a matrix that Muon moves."""
        return 8.0 * self.trained - (4.0 * self.matrices if optimizer == "muon" else 0.0)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return self.hidden * (2 * self.query + 2 * self.key + 3 * self.inner)

    @property
    def outer_parameters(self) -> int:
        """Parameters of the embedding and the output layer."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All of them, but for norms."""
        return self.layers * self.layer_parameters + self.outer_parameters

    def kv_bytes(self, width: int = 2) -> int:
        """Bytes of KV cache of a token, over all layers and GPUs; ``width`` of a number."""
        return 2 * width * self.layers * self.key

    def layer_bytes(self, width: int = 2) -> int:
        """Bytes that autograd keeps of a token in a layer, of which nothing is computed again."""
        norms = 2 * (4 + 2 * width) * self.hidden + (4 + width) * (self.query + self.key)
        attention = width * (3 * self.query + 2 * self.key)
        return norms + attention + 4 * width * self.inner

    def kept_bytes(self, choice: Choice, width: int = 2) -> int:
        """Bytes that are kept of a token in a layer, by ``training.activation_checkpointing``."""
        if choice == "none":
            return self.layer_bytes(width)
        if choice == "full":
            return width * self.hidden
        products = self.query + 2 * self.key + 2 * self.hidden + 2 * self.inner
        return width * (products + self.query + self.hidden)


PUBLISHED: Mapping[str, Architecture] = MappingProxyType(
    {
        "Qwen3-0.6B": Architecture(28, 1024, 2048, 1024, 3072, 151936, tied=True),
        "Qwen3-1.7B": Architecture(28, 2048, 2048, 1024, 6144, 151936, tied=True),
        "Qwen3-4B": Architecture(36, 2560, 4096, 1024, 9728, 151936, tied=True),
        "Qwen3-8B": Architecture(36, 4096, 4096, 1024, 12288, 151936, tied=False),
        "Qwen3-14B": Architecture(40, 5120, 5120, 1024, 17408, 151936, tied=False),
        "Qwen3-32B": Architecture(64, 5120, 8192, 1024, 25600, 151936, tied=False),
    }
)
"""Sizes of the config.json that is published under a name, for where no file is at hand."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a process by what they are for; ``moment`` is when it holds the most."""

    parts: Mapping[str, float]
    moment: str = ""

    @property
    def total(self) -> float:
        """All of them, in bytes."""
        return sum(self.parts.values())


def rank_memory(
    shape: Architecture,
    *,
    world: int,
    tokens: Tokens,
    choice: Choice,
    width: int = 2,
    optimizer: Optimizer = "adamw",
    reference: bool = False,
) -> MemoryUse:
    """The most that a rank of the trainer holds that shares a replica with ``world - 1`` others;
    ``tokens`` are those of its micro-batch. ``reference``: the first policy is kept beside it."""
    offloads = optimizer == "adamw_offload"
    frozen = 0 if shape.adapter is None else width * shape.parameters
    states = {
        "weights": (frozen + 4.0 * shape.trained) / world,
        "gradients": 4.0 * shape.trained / world,
        "moments": 0.0 if offloads else shape.moment_bytes(optimizer) / world,
        "reference": _reference(shape, world, width) if reference else 0.0,
    }
    moments = {
        "head": _head(shape, world, tokens, choice, width),
        "layer": _layer(shape, world, tokens, choice, width),
        "reduction": _reduction(shape, world, width),
        "update": {"update": _update(shape, optimizer) / world},
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return MemoryUse({**states, **moments[moment]}, moment)


def _update(shape: Architecture, optimizer: Optimizer) -> float:
    """Bytes of the optimizer's own step, beside the states."""
    if optimizer == "adamw_offload":
        return 12.0 * min(max(shape.vocabulary, shape.inner) * shape.hidden, shape.trained)
    if optimizer == "adamw":
        return 4.0 * shape.trained
    few, many = sorted((shape.hidden, max(shape.inner, shape.query)))
    matrix = 10.0 * few * many + 4.0 * few * few if shape.adapter is None else 0.0
    return max(4.0 * (shape.trained - shape.matrices), matrix)


def _reference(shape: Architecture, world: int, width: int) -> float:
    if shape.adapter is not None:
        return 0.0
    gathered = width * shape.outer_parameters if world > 1 else 0
    return 4.0 * shape.parameters / world + gathered


def shards_of(ranks: int, node_ranks: int, *, host_fits: bool) -> int:
    """How many of these ranks share a replica: those of each node, where there are several nodes
    with ``node_ranks`` each and ``host_fits``, that is each has the memory; else all of them."""
    several = node_ranks > 1 and ranks > node_ranks and ranks % node_ranks == 0
    return node_ranks if several and host_fits else ranks


def server_contexts(
    shape: Architecture, *, tensor_parallel: int, room: float, max_len: Tokens, width: int = 2
) -> float:
    """Contexts of ``max_len`` that the KV cache of a server holds, whose GPUs have ``room`` bytes
    each for it and for the weights."""
    cache = room * tensor_parallel - width * shape.parameters
    return max(0.0, cache / (shape.kv_bytes(width) * max_len))


def _activations(
    shape: Architecture, world: int, tokens: Tokens, choice: Choice, width: int
) -> float:
    kept = shape.kept_bytes(choice, width)
    copies = 0
    if world == 1 and width < 4 and shape.adapter is None:  # under autocast
        kept += {"none": 12, "selective": 4 - width, "full": 4 - width}[choice] * shape.hidden
        copies = 0 if choice == "full" else width * shape.layers * shape.layer_parameters
    return float(tokens * shape.layers * kept + copies)


def _head(
    shape: Architecture, world: int, tokens: Tokens, choice: Choice, width: int
) -> dict[str, float]:
    matrix = shape.vocabulary * shape.hidden
    own = width if world > 1 else 4
    blocks = BLOCK_BYTES * min(BLOCK_LOGITS, tokens * shape.vocabulary)
    states = (4 + 4 + 2 * width + (8 if world == 1 else 0)) * shape.hidden * tokens
    return {
        "activations": _activations(shape, world, tokens, choice, width),
        "gathered weights": float(width * shape.outer_parameters) if world > 1 else 0.0,
        "head": float((own * matrix if shape.adapter is None else 0) + blocks + states),
    }


def _layer(
    shape: Architecture, world: int, tokens: Tokens, choice: Choice, width: int
) -> dict[str, float]:
    matrix = shape.vocabulary * shape.hidden
    own = width if world > 1 else 4
    again = 0 if choice == "none" else shape.layer_bytes(width)
    passing = 3 * width * shape.inner + width * shape.hidden
    held = _activations(shape, world, tokens, choice, width) + float(tokens * (again + passing))
    gathered = width * (shape.outer_parameters + 2 * shape.layer_parameters) if world > 1 else 0
    reduced = (own + 4 if world > 1 else own) * (
        shape.layer_parameters if shape.adapter is None else shape.adapter / shape.layers
    )
    return {
        "activations": held,
        "gathered weights": float(gathered),
        "head": float(own * matrix) if shape.adapter is None else 0.0,
        "buffers": float(reduced),
    }


def _reduction(shape: Architecture, world: int, width: int) -> dict[str, float]:
    outer = shape.outer_parameters if shape.adapter is None else 0
    if world > 1:
        return {"buffers": float((width + 4) * outer)}
    return {"buffers": float(4 * outer * (3 if shape.tied else 1))}
