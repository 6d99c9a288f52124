"""What the model that drafts takes of a server's memory, beside the policy.

A head (EAGLE) is counted by its files, which may have an embedding of its own or not; MTP layers
have the policy's embedding and output layer and are as large as its layers, with a matrix that
joins two hidden states. Either keeps KV cache of each token in its own layers. How many drafts are
right is not known before it is measured, so no price of a step counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra_cli.core.costs.architecture import Architecture, DenseTransformer


@dataclass(frozen=True, slots=True)
class HeadSize:
    """The size of a model that drafts."""

    parameters: float
    kv_numbers: int
    """Numbers of KV cache that a token has in its layers, over all GPUs."""

    def bytes(self, width: int = 2) -> float:
        """Bytes of its weights over all GPUs, each of which takes ``width``."""
        return width * self.parameters

    def kv_bytes(self, width: int = 2) -> int:
        """Bytes of KV cache of a token."""
        return width * self.kv_numbers


def head_of_files(config: Mapping[str, Any], parameters: float) -> HeadSize:
    """Return the size of an EAGLE head by its config.json and the ``parameters`` in its files.

    Raises:
        KeyError, TypeError, ValueError: the config.json lacks a size.
    """
    shape = DenseTransformer.from_config(config)
    return HeadSize(parameters, shape.kv_bytes(1))


def mtp_layers(config: Mapping[str, Any], policy: Architecture) -> HeadSize:
    """Return the size of the MTP layers of a policy with this config.json."""
    inner = config.get("text_config") or config
    count = int(inner.get("num_nextn_predict_layers") or inner.get("mtp_num_hidden_layers") or 1)
    one = policy.layer_parameters + 2 * policy.hidden**2
    return HeadSize(count * one, count * policy.kv_bytes(1) // policy.layers)
