"""The routers of a mixture of experts: what balances them, and the choices of a rollout's routers.

**Routes** (R3, arXiv 2510.11370). Rollout and training compute in other kernels, so their routers
now and then choose other experts, and then the two policies differ by more than rounding. Given
the experts that the rollout chose, a router here weighs those: with x its logits, S the experts of
a token and c the model's routed_scaling_factor (1 where it has none), w_e is c f(x)_e or
c f(x)_e / sum over S of f(x), where f is softmax (Qwen, OLMoE, Mixtral) or sigmoid (DeepSeek, GLM),
as the model has it. Groups of experts and a correction bias matter for choosing alone, and the
choice is the rollout's. So routers have gradients, of the experts that were chosen.

**Balance.** transformers' loss (Switch Transformers, arXiv 2101.03961, eq. 4 to 6) multiplies two
means over all tokens of a batch, so its sum over micro-batches is another number. Here it is of
each sequence by itself, as DeepSeek-V3's (arXiv 2412.19437, eq. 17): with T tokens in a sequence,
L layers, E experts and p the softmax of a router's logits::

    f_e = tokens and layers whose k largest p have e, over L T        P_e = mean of p_e over L T
    balance = E sum over e of f_e P_e

which for a batch of one sequence is transformers' number. A sequence weighs what it adds to the
loss's divisor (its generated tokens, usually), so the gradient of the whole batch is the same
however the batch is cut into micro-batches and over ranks.

Guarantee: prompt tokens count as generated ones do; f has no gradient. Limit: ranks that share a
row (``training.cp_size``) have parts of sequences, and are refused for the balance. A router that
weighs experts in another way is refused at the first pass that it is told what to choose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from libra_cli.config.errors import TrainerError

OUTPUTS = 3
"""Number of a router's outputs: logits, weights of the chosen experts, and which these are."""
ROUNDING = 0.02
"""Tolerance of a weight: several times that of bfloat16."""
ROUTE_SUMS = ("routes_told", "routes_differ")
"""Counts of (token, layer): those of which a router is told the experts, and of these those in
which it would have chosen another set of experts itself."""
TINY = 1e-20
"""What transformers adds to a sum of sigmoids."""
Score: TypeAlias = Literal["softmax", "sigmoid"]


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers of a transformers model in the order of its layers; none of a dense model."""
    told: Iterator[Any] = (getattr(part, "_can_record_outputs", None) for part in model.modules())
    kinds = {one["router_logits"].target_class for one in told if one and "router_logits" in one}
    return [part for part in model.modules() if type(part) in kinds]


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts that were chosen for the tokens of a row."""

    experts: Tensor
    """int64, ``[tokens, layers, k]``; 0 in layers without experts."""
    known: Tensor
    """bool, ``[tokens]``: where it is false, the router chooses."""

    def part(self, start: int, stop: int, missing: int) -> Routes:
        """Return those of the tokens from ``start`` to ``stop``, after ``missing`` tokens of which
        nothing is known were put at the end."""
        experts = pad(self.experts, (0, 0, 0, 0, 0, missing))
        return Routes(experts[start:stop], pad(self.known, (0, missing))[start:stop])


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """How a kind of routers weighs the experts that were chosen."""

    score: Score
    normed: bool
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float

    def of(self, logits: Tensor, experts: Tensor) -> Tensor:
        """What ``experts`` weigh, ``[tokens, k]``, in float32; of ``logits`` ``[tokens, E]``."""
        if self.score == "softmax" and self.normed:  # the rest of the sum cancels
            return self.scale * torch.softmax(logits.gather(-1, experts).float(), dim=-1)
        every = logits.float()
        scores = torch.softmax(every, dim=-1) if self.score == "softmax" else every.sigmoid()
        chosen = scores.gather(-1, experts)
        if self.normed:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + TINY)
        return self.scale * chosen


class RolloutRoutes:
    """Lets the routers of a model choose as they are told."""

    def __init__(self, model: nn.Module) -> None:
        self.routes: Routes | None = None
        """What routers choose in every pass until it is changed, also when a backward pass computes
        activations again; None: what they will."""
        self._counts: dict[str, Tensor] | None = None
        self._weights: dict[nn.Module, RouterWeights] = {}
        wanted = {id(router) for router in routers_of(model)}
        for name, part in model.named_modules():
            if id(part) in wanted:
                part.register_forward_hook(partial(self._choose, _layer_of(name)))

    def _choose(
        self, layer: int, router: nn.Module, inputs: object, output: Any
    ) -> tuple[Tensor, ...] | None:
        if self.routes is None:
            return None
        if not isinstance(output, tuple) or len(output) != OUTPUTS:
            raise _not_followed(router)
        logits, scores, own = output
        if router not in self._weights:
            self._weights[router] = weights_of(router, logits, scores, own)
        known = self.routes.known
        experts = torch.where(known[:, None], self.routes.experts[:, layer], own)
        self._count(known, experts, own)
        weights = self._weights[router].of(logits, experts)
        return logits, weights.to(scores.dtype), experts

    @contextmanager
    def counting(self) -> Iterator[dict[str, Tensor]]:
        """The ``ROUTE_SUMS`` of the forward pass inside; empty if nothing is told.

        What activation checkpointing computes again in the backward pass is not counted.
        """
        self._counts = {}
        try:
            yield self._counts
        finally:
            self._counts = None

    def _count(self, known: Tensor, experts: Tensor, own: Tensor) -> None:
        if self._counts is None:
            return
        others = (experts.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1)
        for name, more in zip(ROUTE_SUMS, (known.sum(), others.sum()), strict=True):
            self._counts[name] = self._counts.get(name, 0) + more


def _layer_of(name: str) -> int:
    found = re.search(r"layers\.(\d+)\.", name)
    if found is None:
        raise TrainerError(f"the router {name} is in no numbered layer")
    return int(found[1])


def weights_of(router: nn.Module, logits: Tensor, scores: Tensor, own: Tensor) -> RouterWeights:
    """How a router weighs experts, found from what it gave those that it chose itself.

    Raises:
        TrainerError: it is none of the ways that are known.
    """
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    ways = [
        RouterWeights(score, normed, scale) for score in get_args(Score) for normed in (True, False)
    ]
    with torch.no_grad():
        apart = {way: _apart(way.of(logits, own), scores.float()) for way in ways}
    best = min(ways, key=apart.__getitem__)
    if apart[best] > ROUNDING:
        raise _not_followed(router)
    return best


def _apart(weights: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to what is wanted or to 1, whichever is more."""
    return float(((weights - wanted).abs() / wanted.abs().clamp(min=1.0)).max())


def _not_followed(router: nn.Module) -> TrainerError:
    return TrainerError(
        f"the choices of {type(router).__name__} cannot follow a rollout's: they are weighed "
        "neither by a softmax nor by a sigmoid",
        hint="set training.rollout_routes: false",
    )


class RouterBalance:
    """The balance of a model's routers, if its config.json asks for it.

    ``output_router_logits`` says that it is part of the loss, ``router_aux_loss_coef`` how much it
    weighs, as in transformers.
    """

    def __init__(self, model: Any, *, cp_size: int = 1) -> None:
        """Watch the routers.

        Raises:
            TrainerError: ranks are to share a row.
        """
        config = model.config.get_text_config()
        routers = routers_of(model) if getattr(config, "output_router_logits", False) else []
        self.coefficient: float = getattr(config, "router_aux_loss_coef", 0.0) if routers else 0.0
        self._recorded: list[Tensor] | None = None
        if not self.coefficient:
            return
        if cp_size > 1:
            raise TrainerError(
                f"{type(model).__name__} is trained with a balance of its routers "
                "(output_router_logits in its config.json), which ranks that share a row "
                "cannot compute",
                hint="set training.cp_size to 1, or output_router_logits to false in config.json",
            )
        self._chosen = int(config.num_experts_per_tok)
        for router in routers:
            router.register_forward_hook(self._record)

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """The logits of each router, ``[tokens, experts]``, of the forward pass inside.

        What activation checkpointing computes again in the backward pass is not recorded.
        """
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _record(self, router: nn.Module, inputs: object, output: tuple[Tensor, ...]) -> None:
        if self._recorded is not None:
            self._recorded.append(output[0])

    def loss(self, logits: Sequence[Tensor], lengths: Sequence[int], weights: Tensor) -> Tensor:
        """The balance of each sequence times its weight, summed, times the coefficient.

        ``logits`` are each router's of one row, ``lengths`` the tokens of its sequences, and
        ``weights`` ``[sequences]``.
        """
        balances = balance_of(logits, lengths, self._chosen)
        return self.coefficient * (balances * weights).sum()


def balance_of(logits: Sequence[Tensor], lengths: Sequence[int], chosen: int) -> Tensor:
    """The balance of each sequence, ``[sequences]``; the formula is the module's."""
    first = logits[0]
    sizes = torch.tensor(lengths, device=first.device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=first.device), sizes)
    met = torch.zeros(len(lengths), first.shape[-1], device=first.device)
    meant = torch.zeros_like(met)
    for layer in logits:
        shares = torch.softmax(layer.float(), dim=-1)
        best = shares.detach().topk(chosen, dim=-1).indices
        met = met.index_add(0, owner, torch.zeros_like(shares).scatter_(1, best, 1.0))
        meant = meant.index_add(0, owner, shares)
    tokens = (sizes * len(logits))[:, None]
    return first.shape[-1] * (met / tokens * meant / tokens).sum(-1)
