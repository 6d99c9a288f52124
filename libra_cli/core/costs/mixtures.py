"""Mixtures of experts: recognised, and refused by prices that are of dense models.

A step of a mixture reads the weights of the experts that its tokens happen to choose: the more
tokens, the more weights, until all are read. No straight line follows that: fitted to measured
times of experts it is 63 % off on average, and the law of ``costs.mixture_server`` 5 %. So prices
that a run learns of itself, and those that are measured by ``libra bench --calibrate``, are refused
for them; those of a profile with that law are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from libra_cli.config.errors import InputError

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json for the number of experts: Qwen, Mixtral, DeepSeek, ERNIE."""
_NAMED = re.compile(r"(?:^|[-_/])(?:A\d+(?:\.\d+)?B|\d+x\d+B)(?:$|[-_])|moe|mixtral", re.IGNORECASE)


class MixtureRefused(InputError):
    """A price is wanted for a mixture of experts, and what there is follows the law of others."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(
            f"{model} is a mixture of experts ({why}): what a step of it costs depends on which "
            "experts its tokens choose, and these prices do not",
            hint="name a profile with a law for it, as a800-qwen3-30b-a3b has "
            "(planner.profile), or keep the plan of the recipe (planner: {kind: fixed})",
        )


def experts_of(config: Mapping[str, Any]) -> int:
    """The number of experts a model's config.json names; 0 for a dense one."""
    inner = config.get("text_config")
    counts = [part.get(key) for part in (config, inner or {}) for key in EXPERT_KEYS]
    most = max((count for count in counts if isinstance(count, int)), default=0)
    return most if most > 1 else 0


def refused_routes(config: Mapping[str, Any]) -> str:
    """Why training cannot follow the choices of rollout's routers; empty if it can."""
    return "" if experts_of(config) else "the model has no experts"


def is_named_mixture(model: str) -> bool:
    """Whether a model's name says that it is one: Qwen3-30B-A3B, Mixtral-8x7B, OLMoE."""
    return _NAMED.search(model) is not None


def refuse_mixture(model: str, config: Mapping[str, Any]) -> None:
    """Raises MixtureRefused for a mixture, by its config.json, or by its name where that is empty.

    ``model`` is a name or a path, and told to people.
    """
    experts = experts_of(config)
    if experts:
        raise MixtureRefused(model, f"{experts} experts in its config.json")
    if not config and is_named_mixture(model.rstrip("/").rpartition("/")[2]):
        raise MixtureRefused(model, "by its name")
