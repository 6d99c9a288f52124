"""A causal language model that answers with log-probabilities of chosen tokens instead of logits.

While a question is open, the model's output layer gives ``chosen_logprobs`` of the chosen positions
in place of its logits, and the model returns that. It stays the model's own forward pass, so FSDP2
gathers the layer's weight, DDP and autocast do what they do, and a tied weight is as any other.
A model that changes its logits after the output layer (caps or scales them) cannot be asked so;
that is found out with a question of two tokens, and it is asked for whole logits instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from libra_cli.node.model.logprobs import ChosenTokens, chosen_logprobs, token_logprobs
from libra_cli.node.model.packed_attention import PackedSequences, use_packed_attention

log = logging.getLogger("libra.model")


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """Tokens of sequences in one row, and which of them are to be scored."""

    token_ids: Tensor
    """``[1, T]``."""
    positions: Tensor
    """``[1, T]``: of each token in its sequence."""
    packed: PackedSequences
    places: Tensor
    """``[N]``: where in the row the tokens to score are; none is the first of its sequence."""
    turns: Tensor | None = None
    """``[S]``: where turns begin before which the hidden state is wanted; none where a sequence
    does."""

    @property
    def targets(self) -> Tensor:
        """The tokens to score, ``[N]``."""
        return self.token_ids[0, self.places]


class ScoringModel:
    """Scores tokens with a model; ``call`` is the model, or what wraps it."""

    def __init__(self, model: nn.Module, call: Callable[..., Any], device: torch.device) -> None:
        """*Collective*, if the model is sharded."""
        self._call = call
        self.packs = use_packed_attention(model)
        """Whether a request may hold more than one sequence."""
        self._head = model.get_output_embeddings()
        self._open: tuple[ScoringRequest, float, bool] | None = None
        self._answer: Tensor | None = None
        self._turns: Tensor | None = None
        self.hidden: Tensor | None = None
        """``[S, width]``: the last hidden states at the tokens before the ``turns`` of the request
        that was answered last, without gradient; None if it named none."""
        self._head.register_forward_pre_hook(self._keep_hidden)
        self._in_blocks = type(self._head) is nn.Linear and self._head.bias is None
        if self._in_blocks:
            self._logits = self._head.forward
            self._head.forward = self._forward
            self._in_blocks = self._returns_what_the_head_gives(device)
        if not self._in_blocks:
            log.warning(
                "%s: its logits are more than a product with its output layer's weight, so they "
                "are kept whole: tokens x vocabulary of them",
                type(model).__name__,
            )

    def logprobs(
        self, request: ScoringRequest, *, temperature: float, entropy_gradient: bool = False
    ) -> ChosenTokens:
        """The scores of the tokens to score; entropies have a gradient where it is asked for."""
        if not self._in_blocks:
            logits = self._run(request)[0, request.places - 1]
            return token_logprobs(
                logits,
                request.targets,
                temperature=temperature,
                entropy_gradient=entropy_gradient,
            )
        self._open = request, temperature, entropy_gradient
        try:
            logprobs, entropy, greedy = self._run(request)
        finally:
            self._open = self._answer = None
        return ChosenTokens(
            logprobs, entropy if entropy_gradient else entropy.detach(), greedy.detach()
        )

    def _run(self, request: ScoringRequest) -> Tensor:
        self._turns, self.hidden = request.turns, None
        where: dict[str, Any] = {}
        if self.packs:
            where = {"position_ids": request.positions, "packed": request.packed}
        try:
            logits: Tensor = self._call(
                input_ids=request.token_ids, use_cache=False, **where
            ).logits
        finally:
            self._turns = None  # the model is called by others too
        return logits

    def _keep_hidden(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """What the output layer is given; whatever it then does with it."""
        if self._turns is not None:
            self.hidden = inputs[0][0, self._turns - 1].detach()

    def _forward(self, hidden: Tensor) -> Tensor:
        """The output layer's, in place of its own."""
        if self._open is None:
            return self._logits(hidden)
        request, temperature, entropy_gradient = self._open
        results = chosen_logprobs(
            hidden[0, request.places - 1],
            self._head.weight,
            request.targets,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
        )
        self._answer = torch.stack(results)
        return self._answer

    def _returns_what_the_head_gives(self, device: torch.device) -> bool:
        with torch.no_grad():
            request = one_sequence(torch.zeros(2, dtype=torch.int64, device=device))
            self._open = request, 1.0, False
            unchanged = self._run(request) is self._answer
        self._open = self._answer = None
        return unchanged


def one_sequence(token_ids: Tensor) -> ScoringRequest:
    """All tokens of one sequence ``[T]`` but the first, which nothing predicts."""
    length, device = len(token_ids), token_ids.device
    everything = torch.arange(length, device=device)
    return ScoringRequest(
        token_ids=token_ids[None],
        positions=everything[None],
        packed=PackedSequences(
            (length,), torch.tensor([0, length], dtype=torch.int32, device=device)
        ),
        places=everything[1:],
    )
