"""A mixture of experts: what it has in all, what a token meets of it, and what a step reads of it.

With E experts in a layer of which the router gives each token k, and n tokens in a step that are
routed alike and independently of one another, an expert is left out by all of them with the
probability (1 - k / E)^n. So a step reads of each layer, on average::

    D(n) = E (1 - (1 - k / E)^n)   experts

which is the mean of an occupancy (Feller, An Introduction to Probability Theory and Its
Applications, vol. 1, IV.2). Limit: routers are not uniform, and tokens of one sequence choose
alike, so a real step reads fewer.

Products take 2 FLOPs a parameter that a token meets, forward (arXiv 2001.08361), and attention
4 x layers x query units a token of context (arXiv 2204.02311, appendix B).

Of a token's activations an expert's part is there k times: its input and its output as it is
gathered and weighed (2 d), and 4 i of its inner units, as with transformers' grouped products.
Counted on tensors that autograd saved of layers of Qwen3-MoE in bfloat16, in five shapes: within
4 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

from libra_cli.config.training import LoraSpec, Optimizer
from libra_cli.core.costs.heads import Heads

Checkpointing: TypeAlias = Literal["none", "selective", "full"]
"""What of a layer is kept for the backward pass: ``training.activation_checkpointing``."""


def expected_experts(experts: int, chosen: int, tokens: Any) -> Any:
    """Distinct experts of a layer that ``tokens`` tokens choose: D(n) of the module.

    ``tokens`` is a number or an array.
    """
    return experts * (1.0 - (1.0 - chosen / experts) ** tokens)


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer; sizes are in units."""

    query: int
    """Units of all query heads together."""
    key: int
    """Units of all key heads together, and as many of values."""
    parameters: int
    cached: int
    """Numbers that a token leaves in the KV cache of a layer."""
    sides: Mapping[str, int]
    """Rows and columns, added up, of each matrix that an adapter may be put on."""
    head: int = 128
    """Units of one query head."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Attention:
        """Return the attention that a ``config.json`` describes.

        Raises:
            KeyError: a size is missing.
            TypeError, ValueError: a size is no number.
        """
        if config.get("kv_lora_rank"):
            return cls._latent(config)
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        head = int(config.get("head_dim") or hidden // heads)
        query, key = heads * head, int(config.get("num_key_value_heads") or heads) * head
        biases = 0
        if config.get("model_type") == "gpt_oss":  # also the output's bias, and a sink a head
            biases = query + 2 * key + hidden + heads
        elif config.get("attention_bias") or config.get("model_type") == "qwen2_moe":
            biases = query + 2 * key
        return replace(cls.grouped(hidden, query, key, biases), head=head)

    @classmethod
    def grouped(cls, hidden: int, query: int, key: int, biases: int = 0) -> Attention:
        """Attention of grouped queries (arXiv 2305.13245) with so many units of each."""
        sides = {
            "q_proj": hidden + query,
            "k_proj": hidden + key,
            "v_proj": hidden + key,
            "o_proj": query + hidden,
        }
        parameters = hidden * (2 * query + 2 * key) + biases
        return cls(query, key, parameters, 2 * key, sides)

    @classmethod
    def _latent(cls, config: Mapping[str, Any]) -> Attention:
        """Return multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        plain, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
        query, inner = heads * (plain + rope), int(config.get("q_lora_rank") or 0)
        sides = {
            "kv_a_proj_with_mqa": hidden + rank + rope,
            "kv_b_proj": rank + heads * (plain + value),
            "o_proj": heads * value + hidden,
        }
        parameters = (
            hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden
        )
        if inner:
            sides |= {"q_a_proj": hidden + inner, "q_b_proj": inner + query}
            parameters += hidden * inner + inner * query
        else:
            sides["q_proj"] = hidden + query
            parameters += hidden * query
        return cls(query, query, parameters, rank + rope, sides, head=plain + rope)


@dataclass(frozen=True, slots=True)
class MixtureTransformer:
    """A decoder-only transformer with routed experts in most of its layers; sizes are in units."""

    layers: int
    dense_layers: int
    """Layers without experts, of ``layers``."""
    hidden: int
    attention: Attention
    inner: int
    """Inner units of a layer without experts."""
    experts: int
    """Routed experts of a layer."""
    chosen: int
    """Experts that the router chooses for a token, of ``experts``."""
    expert_inner: int
    shared_inner: int
    """Inner units of the shared expert, which every token is multiplied with; 0 without one."""
    vocabulary: int
    tied: bool
    """Whether the output layer is the embedding."""
    biased: bool = False
    """Whether router and experts have biases (gpt-oss)."""
    gated: bool = False
    """Whether a gate weighs what every token meets (Qwen2-MoE)."""
    balanced: bool = False
    """Whether the balance of its routers over whole sequences is part of the loss."""
    adapter: int | None = None
    """Parameters of the adapter that is trained in place of all; None if there is none."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], experts: int) -> MixtureTransformer:
        """The shape that a ``config.json`` describes, with so many experts in a layer.

        Raises:
            KeyError, TypeError, ValueError: it lacks a size, or has one that is none.
        """
        inside = config.get("text_config") or config
        expert_inner = int(inside.get("moe_intermediate_size") or inside["intermediate_size"])
        shared = int(inside.get("shared_expert_intermediate_size") or 0)
        layers = int(inside["num_hidden_layers"])
        return cls(
            layers=layers,
            dense_layers=_dense_layers(inside, layers),
            hidden=int(inside["hidden_size"]),
            attention=Attention.from_config(inside),
            inner=int(inside["intermediate_size"]),
            experts=experts,
            chosen=int(inside["num_experts_per_tok"]),
            expert_inner=expert_inner,
            shared_inner=shared + int(inside.get("n_shared_experts") or 0) * expert_inner,
            vocabulary=int(inside["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            biased=inside.get("model_type") == "gpt_oss",
            gated=bool(shared),
            balanced=bool(inside.get("output_router_logits")),
        )

    def with_adapter(self, lora: LoraSpec | None) -> Self:
        """The same model of which such an adapter is trained.

        ``all-linear`` has the matrices of attention and of what every token meets; experts have
        adapters of their own where these are asked for.
        """
        return self if lora is None else replace(self, adapter=self._adapter_parameters(lora))

    def _adapter_parameters(self, lora: LoraSpec) -> int:
        found = 0
        everything = "all-linear" in lora.target_modules
        for layers, inner in (
            (self.layers - self.dense_layers, self.shared_inner),
            (self.dense_layers, self.inner),
        ):
            sides = dict(self.attention.sides)
            if inner:
                side = self.hidden + inner
                sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), side)
            named = sides if everything else (one for one in lora.target_modules if one in sides)
            found += layers * lora.rank * sum(sides[name] for name in named)
        if lora.experts:
            sides_of_one = 3 * (self.hidden + self.expert_inner)
            found += (self.layers - self.dense_layers) * self.experts * lora.rank * sides_of_one
        return found

    @property
    def splits_rows(self) -> bool:
        """Whether ranks may train on parts of a sequence."""
        return not self.balanced

    @property
    def query(self) -> int:
        """Units of all query heads together."""
        return self.attention.query

    @property
    def heads(self) -> Heads:
        return Heads(self.attention.query, self.attention.key, self.attention.head)

    @property
    def scored_heads(self) -> int:
        return 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer."""
        biases = 2 * self.expert_inner + self.hidden if self.biased else 0
        return 3 * self.hidden * self.expert_inner + biases

    @property
    def _common(self) -> int:
        """Parameters that every token meets in a layer with experts."""
        router = self.experts * (self.hidden + self.biased)
        shared = 3 * self.hidden * self.shared_inner + self.gated * self.hidden
        return self.attention.parameters + router + shared

    @property
    def _dense(self) -> int:
        """Parameters of a layer without experts."""
        return self.attention.parameters + 3 * self.hidden * self.inner

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer with experts."""
        return self._common + self.experts * self.expert_parameters

    @property
    def routed_experts(self) -> int:
        """Experts of a layer that its router chooses among."""
        return self.experts

    @property
    def routed_layers(self) -> int:
        """Layers that have experts."""
        return self.layers - self.dense_layers

    @property
    def routed_parameters(self) -> int:
        """Parameters of the experts of all layers."""
        return self.routed_layers * self.experts * self.expert_parameters

    def layer_of_rank(self, ep_size: int) -> int:
        """Parameters of a layer that a rank gathers, of whose experts ``ep_size`` hold others."""
        return self._common + self.experts * self.expert_parameters // ep_size

    def travelling_bytes(self, ep_size: int, width: int = 2) -> int:
        """Bytes of a token of a layer that are sent to its experts, and that come back."""
        return width * 2 * self.chosen * self.hidden if ep_size > 1 else 0

    @property
    def outer_parameters(self) -> int:
        """Parameters of the embedding and the output layer."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    def _of(self, experts: float) -> float:
        """Parameters of the model with so many experts in a layer."""
        sparse = self._common + experts * self.expert_parameters
        outer, dense = self.outer_parameters, self.dense_layers * self._dense
        return outer + dense + (self.layers - self.dense_layers) * sparse

    @property
    def parameters(self) -> int:
        return int(self._of(self.experts))

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, embedding and output layer included."""
        return int(self._of(self.chosen))

    def read_bytes(self, tokens: float, width: int = 2) -> float:
        """Bytes of weights that a step with so many tokens reads, without the embedding: of it a
        token reads a row."""
        embedding = 0 if self.tied else self.vocabulary * self.hidden
        return width * (self._of(expected_experts(self.experts, self.chosen, tokens)) - embedding)

    @property
    def trained(self) -> int:
        """Parameters that have a gradient and moments: all, for each expert may be chosen."""
        return self.parameters if self.adapter is None else self.adapter

    @property
    def matrices(self) -> int:
        """Trained parameters that Muon moves: matrices of the layers, but those of experts, which
        lie in tensors of three axes; or of the adapter."""
        if self.adapter is not None:
            return self.adapter
        sparse = self.layers - self.dense_layers
        return sparse * self._common + self.dense_layers * self._dense

    def moment_bytes(self, optimizer: Optimizer) -> float:
        """Bytes of the optimizer's moments, wherever they are."""
        return 8.0 * self.trained - (4.0 * self.matrices if optimizer == "muon" else 0.0)

    def kv_bytes(self, width: int = 2) -> int:
        """Bytes of KV cache of a token, over all layers and GPUs; ``width`` of a number."""
        return width * self.layers * self.attention.cached

    def layer_bytes(self, width: int = 2) -> int:
        """Bytes that autograd keeps of a token in a layer with experts,
        of which nothing is computed again.
        """
        query, key = self.attention.query, self.attention.key
        norms = 2 * (4 + 2 * width) * self.hidden + (4 + width) * (query + key)
        attention = width * (3 * query + 2 * key)
        experts = self.chosen * (4 * self.expert_inner + 2 * self.hidden)
        router = 4 * self.experts + 8 * 4 * self.chosen
        return norms + attention + router + width * (experts + 4 * self.shared_inner)

    def kept_bytes(self, choice: Checkpointing, width: int = 2) -> int:
        """Bytes that are kept of a token in a layer, by ``training.activation_checkpointing``."""
        if choice == "none":
            return self.layer_bytes(width)
        if choice == "full":
            return width * self.hidden
        query, key = self.attention.query, self.attention.key
        experts = self.chosen * (2 * self.expert_inner + self.hidden) + self.experts
        shared = 2 * self.shared_inner + (self.hidden if self.shared_inner else 0)
        products = query + 2 * key + self.hidden + experts + shared
        return width * (products + query + self.hidden)

    @property
    def largest_matrix(self) -> tuple[int, int]:
        """Rows and columns of the largest matrix of a layer, the smaller number first."""
        few, many = sorted((self.hidden, max(self.query, self.shared_inner, self._dense_inner)))
        return few, many

    @property
    def _dense_inner(self) -> int:
        return self.inner if self.dense_layers else 0

    @property
    def largest_parameter(self) -> int:
        """Numbers of the largest tensor: first matrices of all
        experts of a layer, or the embedding.
        """
        fused = self.experts * 2 * self.expert_inner * self.hidden
        return max(self.vocabulary * self.hidden, fused)

    def passing_bytes(self, width: int = 2) -> int:
        """Bytes of a token while a layer's feed-forward part is computed, which nobody keeps."""
        experts = self.chosen * (3 * self.expert_inner + self.hidden)
        return width * (experts + 3 * self.shared_inner + self.hidden)

    def tiled_bytes(self, width: int = 2) -> int:
        """Return 0: experts are not tiled."""
        return 0

    @property
    def tiled_parameters(self) -> int:
        """Return 0: experts are not tiled."""
        return 0


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers without experts: the first ones of DeepSeek and GLM, named ones of Qwen."""
    kinds = config.get("mlp_layer_types")
    if kinds:
        return list(kinds).count("dense")
    named = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step") or 1)
    first = int(config.get("first_k_dense_replace") or 0)
    return sum(
        number < first or number in named or (number + 1) % step > 0 for number in range(layers)
    )
