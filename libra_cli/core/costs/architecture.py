"""What a model's memory follows from: its parameters, and what a token leaves in its layers.

``costs.memory`` asks an ``Architecture`` for bytes and never for its layers' widths, so a family
that is built otherwise is one more class, and one more line in ``architecture_of``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from libra_cli.config.errors import LibraError
from libra_cli.config.training import LoraSpec, Optimizer
from libra_cli.core.costs.heads import Heads
from libra_cli.core.costs.mixture_transformer import Checkpointing, MixtureTransformer
from libra_cli.core.costs.mixtures import experts_of


class Architecture(Protocol):
    """A model as the memory law sees it; ``width`` is the bytes of a number in compute."""

    @property
    def layers(self) -> int: ...

    @property
    def hidden(self) -> int:
        """Units of the hidden state."""

    @property
    def vocabulary(self) -> int:
        """Rows of the output layer."""

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""

    @property
    def adapter(self) -> int | None:
        """Parameters of the adapter that is trained in place of all; None if there is none."""

    @property
    def parameters(self) -> int:
        """All parameters but those of norms."""

    @property
    def active_parameters(self) -> int:
        """The parameters that one token is multiplied with: all, but for experts not chosen."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest transformer layer."""

    @property
    def outer_parameters(self) -> int:
        """Parameters of the embedding and the output layer."""

    @property
    def trained(self) -> int:
        """Parameters that have a gradient and optimizer states: all, or the adapter's."""

    @property
    def matrices(self) -> int:
        """Trained parameters that Muon updates."""

    @property
    def splits_rows(self) -> bool:
        """Whether ranks may train on parts of a sequence."""

    @property
    def heads(self) -> Heads:
        """The sizes of a layer's attention heads."""

    @property
    def scored_heads(self) -> int:
        """Query heads of a layer of whose scores the trainer makes matrices, a row of the whole
        context for every token: 0 where it attends by torch's kernels, which make none."""

    @property
    def routed_experts(self) -> int:
        """Experts of a layer that routers choose among; 0 of a dense model."""

    @property
    def routed_layers(self) -> int:
        """Layers that have experts."""

    @property
    def routed_parameters(self) -> int:
        """Parameters of all of them, in all layers."""

    def layer_of_rank(self, ep_size: int) -> int:
        """Parameters of a layer that a rank gathers, of whose experts ``ep_size`` hold others."""

    def travelling_bytes(self, ep_size: int, width: int = 2) -> int:
        """Bytes of a token of a layer on its way to its experts, and on the way back, where
        ``ep_size`` ranks hold others; 0 where each has all."""

    @property
    def largest_matrix(self) -> tuple[int, int]:
        """Rows and columns of the largest matrix of a layer, the smaller number first."""

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest tensor."""

    def with_adapter(self, lora: LoraSpec | None) -> Architecture:
        """The same model of which such an adapter is trained."""

    def moment_bytes(self, optimizer: Optimizer) -> float:
        """Bytes of the optimizer's moments, wherever they are."""

    def kv_bytes(self, width: int = 2) -> int:
        """Bytes of KV cache of a token, over all layers and GPUs."""

    def layer_bytes(self, width: int = 2) -> int:
        """Bytes that autograd keeps of a token in a layer, of which nothing is computed again."""

    def kept_bytes(self, choice: Checkpointing, width: int = 2) -> int:
        """Bytes that are kept of a token in a layer, by ``training.activation_checkpointing``."""

    def passing_bytes(self, width: int = 2) -> int:
        """Bytes of a token while a layer's feed-forward part is computed, which nobody keeps."""

    def tiled_bytes(self, width: int = 2) -> int:
        """The part of ``layer_bytes`` that ``training.tiled_mlp`` needs for one tile alone."""

    @property
    def tiled_parameters(self) -> int:
        """Parameters, in all layers, of what is computed once more with ``training.tiled_mlp``."""


def architecture_of(config: Mapping[str, Any], model: str) -> Architecture:
    """The architecture that a ``config.json`` describes; ``model`` is told to people.

    Raises:
        LibraError: it lacks a size.
    """
    experts = experts_of(config)
    try:
        if experts:
            return MixtureTransformer.from_config(config, experts)
        return DenseTransformer.from_config(config)
    except (KeyError, TypeError, ValueError) as error:
        raise LibraError(
            f"the config.json of {model} has no usable {error}",
            hint="what memory goes to is known for decoder-only transformers, with experts or not",
        ) from error


@dataclass(frozen=True, slots=True)
class DenseTransformer:
    """A decoder-only transformer in which each token meets every weight; sizes are in units."""

    layers: int
    hidden: int
    query: int
    """Units of all query heads together."""
    key: int
    """Units of all key heads together, and as many of values."""
    inner: int
    vocabulary: int
    tied: bool
    """Whether the output layer is the embedding."""
    adapter: int | None = None
    """Parameters of the adapter that is trained in place of all; None if there is none."""
    head: int = 128
    """Units of one head."""
    scored_heads: int = 0
    """All query heads where scores are capped, as Gemma 2's, and else none."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DenseTransformer:
        """The shape that a ``config.json`` describes.

        Raises:
            KeyError, TypeError, ValueError: it lacks a size, or has one that is none.
        """
        inside = config.get("text_config") or config
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
            head=head,
            scored_heads=heads if inside.get("attn_logit_softcapping") is not None else 0,
        )

    def with_adapter(self, lora: LoraSpec | None) -> DenseTransformer:
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
    def heads(self) -> Heads:
        return Heads(self.query, self.key, self.head)

    @property
    def trained(self) -> int:
        return self.parameters if self.adapter is None else self.adapter

    @property
    def matrices(self) -> int:
        """Trained parameters that Muon moves: the matrices of the layers, or of the adapter."""
        return self.layers * self.layer_parameters if self.adapter is None else self.adapter

    def moment_bytes(self, optimizer: Optimizer) -> float:
        """Bytes of the optimizer's moments, wherever they are: two in float32 of each parameter
        that is trained, and one of a matrix that Muon moves."""
        return 8.0 * self.trained - (4.0 * self.matrices if optimizer == "muon" else 0.0)

    @property
    def layer_parameters(self) -> int:
        return self.hidden * (2 * self.query + 2 * self.key + 3 * self.inner)

    @property
    def routed_experts(self) -> int:
        return 0

    @property
    def routed_layers(self) -> int:
        return 0

    @property
    def routed_parameters(self) -> int:
        return 0

    def layer_of_rank(self, ep_size: int) -> int:
        """Parameters of a layer, whatever ``ep_size`` is: there are no experts."""
        return self.layer_parameters

    def travelling_bytes(self, ep_size: int, width: int = 2) -> int:
        """Nothing: there are no experts."""
        return 0

    @property
    def outer_parameters(self) -> int:
        """Parameters of the embedding and the output layer."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters

    @property
    def splits_rows(self) -> bool:
        """Whether ranks may train on parts of a sequence: where torch's kernels attend."""
        return not self.scored_heads

    @property
    def active_parameters(self) -> int:
        """All parameters: a dense model multiplies each token with all."""
        return self.parameters

    def kv_bytes(self, width: int = 2) -> int:
        """Bytes of KV cache of a token, over all layers and GPUs; ``width`` of a number."""
        return 2 * width * self.layers * self.key

    def layer_bytes(self, width: int = 2) -> int:
        """Bytes that autograd keeps of a token in a layer, of which nothing is computed again."""
        norms = 2 * (4 + 2 * width) * self.hidden + (4 + width) * (self.query + self.key)
        attention = width * (3 * self.query + 2 * self.key)
        return norms + attention + 4 * width * self.inner

    def kept_bytes(self, choice: Checkpointing, width: int = 2) -> int:
        """Bytes that are kept of a token in a layer, by ``training.activation_checkpointing``."""
        if choice == "none":
            return self.layer_bytes(width)
        if choice == "full":
            return width * self.hidden
        products = self.query + 2 * self.key + 2 * self.hidden + 2 * self.inner
        return width * (products + self.query + self.hidden)

    @property
    def largest_matrix(self) -> tuple[int, int]:
        """Rows and columns of the largest matrix of a layer, the smaller number first."""
        few, many = sorted((self.hidden, max(self.inner, self.query)))
        return few, many

    @property
    def largest_parameter(self) -> int:
        """Numbers of the largest tensor: of a layer, or the embedding."""
        few, many = self.largest_matrix
        return max(self.vocabulary * self.hidden, few * many)

    def passing_bytes(self, width: int = 2) -> int:
        """Bytes of a token while a layer's feed-forward part is computed, which nobody keeps."""
        return width * (3 * self.inner + self.hidden)

    def tiled_bytes(self, width: int = 2) -> int:
        return 4 * width * self.inner

    @property
    def tiled_parameters(self) -> int:
        """Parameters of the feed-forward parts of all layers."""
        return 3 * self.hidden * self.inner * self.layers


PUBLISHED: Mapping[str, DenseTransformer] = MappingProxyType(
    {
        "Qwen3-0.6B": DenseTransformer(28, 1024, 2048, 1024, 3072, 151936, tied=True),
        "Qwen3-1.7B": DenseTransformer(28, 2048, 2048, 1024, 6144, 151936, tied=True),
        "Qwen3-4B": DenseTransformer(36, 2560, 4096, 1024, 9728, 151936, tied=True),
        "Qwen3-8B": DenseTransformer(36, 4096, 4096, 1024, 12288, 151936, tied=False),
        "Qwen3-14B": DenseTransformer(40, 5120, 5120, 1024, 17408, 151936, tied=False),
        "Qwen3-32B": DenseTransformer(64, 5120, 8192, 1024, 25600, 151936, tied=False),
    }
)
"""Sizes of the config.json that is published under a name, for where no file is at hand."""


def published(name: str) -> Architecture | None:
    """The architecture of the model that is published under a name; None if it is not known."""
    return PUBLISHED.get(name) or _PUBLISHED_MIXTURES.get(name)


_PUBLISHED_MIXTURES: Mapping[str, MixtureTransformer] = MappingProxyType(
    {
        "Qwen3-30B-A3B": MixtureTransformer.from_config(
            {
                "hidden_size": 2048,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "vocab_size": 151936,
            },
            experts=128,
        )
    }
)
