"""A causal language model that answers with log-probabilities of chosen tokens instead of logits.

While a question is open, the model's output layer gives ``chosen_logprobs`` of the chosen positions
in place of its logits, and the model returns that. It stays the model's own forward pass, so FSDP2
gathers the layer's weight, DDP and autocast do what they do, and a tied weight is as any other.
A model that changes its logits after the output layer (caps or scales them) cannot be asked so;
that is found out with a question of two tokens, and it is asked for whole logits instead.

Where ranks share a row (``context_parallel``), each asks about its part, and all have the answers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from libra_cli.config.errors import TrainerError
from libra_cli.node.model.context_parallel import ContextGroup
from libra_cli.node.model.images import ImagePlaces, RowImages
from libra_cli.node.model.logprobs import (
    ChosenTokens,
    chosen_logprobs,
    fp32_logits,
    token_logprobs,
)
from libra_cli.node.model.packed_attention import PackedSequences, use_packed_attention
from libra_cli.node.model.routers import RolloutRoutes, Routes

log = logging.getLogger("libra.model")

CAP = "final_logit_softcapping"
"""The key of a model's settings that caps its logits, as Gemma's."""


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """Tokens of sequences in one row, and which of them are to be scored."""

    token_ids: Tensor
    """``[1, T]``: the tokens of the row."""
    positions: Tensor
    """``[1, T]``: of each token in its sequence; with images ``[4, 1, T]``, and then in time, down
    and across."""
    packed: PackedSequences
    places: Tensor
    """``[N]``: where in the row the tokens to score are; none is the first of its sequence."""
    turns: Tensor | None = None
    """``[S]``: where turns begin before which the hidden state is wanted; none where a sequence
    does."""
    routes: Routes | None = None
    """The experts that routers are told to choose."""
    images: RowImages | None = None
    """The images that some of the tokens stand for."""

    @property
    def targets(self) -> Tensor:
        """``[N]``: the ids of the tokens to score."""
        return self.token_ids[0, self.places]


@dataclass(frozen=True, slots=True)
class _Question:
    """What the model of this rank is asked: of a row of t tokens, of its part of one."""

    token_ids: Tensor
    """``[1, t]``: the tokens of this rank's part of the row."""
    positions: Tensor
    """``[1, t]``: the position of each of them in its sequence."""
    packed: PackedSequences
    """Where the sequences are in the whole row."""
    before: Tensor
    """``[n]``: where in these tokens those are that come before the ``targets``."""
    targets: Tensor
    """``[n]``: the ids of the tokens to score."""
    turns: Tensor | None
    """``[s]``: where in these tokens the hidden state is wanted."""
    counts: list[int]
    """How many targets each rank is asked about."""
    turn_counts: list[int]
    routes: Routes | None = None
    images: RowImages | None = None

    @classmethod
    def whole(cls, request: ScoringRequest) -> _Question:
        turns = None if request.turns is None else request.turns - 1
        return cls(
            request.token_ids,
            request.positions,
            request.packed,
            before=request.places - 1,
            targets=request.targets,
            turns=turns,
            counts=[],
            turn_counts=[],
            routes=request.routes,
            images=request.images,
        )

    @classmethod
    def part(cls, request: ScoringRequest, context: ContextGroup) -> _Question:
        """Make this rank's part; what a row lacks to be cut is a sequence of its own at the end."""
        whole, missing = cls.whole(request), context.padding(request.token_ids.shape[1])
        tokens = request.token_ids.shape[1] + missing
        start, stop = context.span(tokens)
        counts = context.counts(whole.before, tokens)
        first = sum(counts[: context.rank])
        own = slice(first, first + counts[context.rank])
        turns, turn_counts = whole.turns, list[int]()
        if turns is not None:
            turn_counts = context.counts(turns, tokens)
            first = sum(turn_counts[: context.rank])
            turns = turns[first : first + turn_counts[context.rank]] - start
        more = torch.arange(missing, device=request.positions.device)[None]
        packed = replace(request.packed, context=context)
        if missing:
            packed = replace(
                packed,
                lengths=(*packed.lengths, missing),
                starts=pad(packed.starts, (0, 1), value=tokens),
            )
        return cls(
            pad(request.token_ids, (0, missing))[:, start:stop],
            torch.cat((request.positions, more), 1)[:, start:stop],
            packed,
            before=whole.before[own] - start,
            targets=whole.targets[own],
            turns=turns,
            counts=counts,
            turn_counts=turn_counts,
            routes=request.routes and request.routes.part(start, stop, missing),
        )


class ScoringModel:
    """Scores tokens with a model; ``call`` is the model, or what wraps it."""

    def __init__(
        self,
        model: nn.Module,
        call: Callable[..., Any],
        device: torch.device,
        context: ContextGroup | None = None,
        *,
        fp32_head: bool = False,
    ) -> None:
        """*Collective*, if the model is sharded or ranks share a row. With ``fp32_head`` the output
        layer gives logits of fp32.

        Raises:
            TrainerError: ranks are to share a row, and the model's layers cannot.
        """
        self._call, self._context, self._fp32_head = call, context, fp32_head
        self.packs = use_packed_attention(model)
        """Whether a request may hold more than one sequence."""
        if context is not None:
            check_shared_rows(model, context.size, packs=self.packs)
        self.told = RolloutRoutes(model)
        """What this rank's routers are told to choose."""
        self._seen = ImagePlaces(model)
        self._head = model.get_output_embeddings()
        self._open: tuple[_Question, float, bool] | None = None
        self._answer: Tensor | None = None
        self._turns: Tensor | None = None
        self.hidden: Tensor | None = None
        """``[S, width]``: the last hidden states at the tokens before the ``turns`` of the request
        that was answered last, without gradient; None if it named none."""
        self._head.register_forward_pre_hook(self._keep_hidden)
        self._text = model.config.get_text_config()
        self._cap: float | None = None
        """What the model caps its logits to, which is done in blocks in its place."""
        plain, self._logits = type(self._head) is nn.Linear, self._head.forward
        if fp32_head and plain:
            self._logits = self._head.forward = partial(fp32_logits, head=self._head)
        self._in_blocks = plain and self._head.bias is None
        if self._in_blocks:
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
        """*Collective*, if ranks share the row, which each is given as a whole. The scores of the
        tokens to score; entropies have a gradient where it is asked for."""
        if self._context is None:
            return self._answered(_Question.whole(request), temperature, entropy_gradient)
        question = _Question.part(request, self._context)
        own = self._answered(question, temperature, entropy_gradient)
        logprobs, entropy, greedy = self._context.gather(torch.stack(own, 1), question.counts).T
        if self.hidden is not None:
            self.hidden = self._context.gather(self.hidden, question.turn_counts)
        return ChosenTokens(
            logprobs, entropy if entropy_gradient else entropy.detach(), greedy.detach()
        )

    def _answered(
        self, question: _Question, temperature: float, entropy_gradient: bool
    ) -> ChosenTokens:
        if not self._in_blocks:
            logits = self._run(question)[0, question.before]
            return token_logprobs(
                logits,
                question.targets,
                temperature=temperature,
                entropy_gradient=entropy_gradient,
            )
        self._open = question, temperature, entropy_gradient
        try:
            with self._uncapped():
                logprobs, entropy, greedy = self._run(question)
        finally:
            self._open = self._answer = None
        return ChosenTokens(
            logprobs, entropy if entropy_gradient else entropy.detach(), greedy.detach()
        )

    def _run(self, question: _Question) -> Tensor:
        self._turns, self.hidden = question.turns, None
        self.told.routes = question.routes
        where: dict[str, Any] = {}
        if self.packs:
            where = {"position_ids": question.positions, "packed": question.packed}
        if question.images is not None:
            self._seen.mask = question.images.mask
            where["pixel_values"] = question.images.values
            where["image_grid_thw"] = question.images.grids
        try:
            logits: Tensor = self._call(
                input_ids=question.token_ids, use_cache=False, **where
            ).logits
        finally:
            self._turns = None  # the model is called by others too
        return logits

    def _keep_hidden(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """What the output layer is given; whatever it then does with it."""
        if self._turns is not None:
            self.hidden = inputs[0][0, self._turns].detach()

    def _forward(self, hidden: Tensor) -> Tensor:
        """Answer the open question in place of the output layer; without one, give its logits."""
        if self._open is None:
            return self._logits(hidden)
        question, temperature, entropy_gradient = self._open
        results = chosen_logprobs(
            hidden[0, question.before],
            self._head.weight,
            question.targets,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
            fp32_head=self._fp32_head,
            cap=self._cap,
        )
        self._answer = torch.stack(results)
        return self._answer

    @contextlib.contextmanager
    def _uncapped(self) -> Iterator[None]:
        """Have the model return what its output layer gives, as without ``CAP`` in its settings."""
        if self._cap is None:
            yield
            return
        setattr(self._text, CAP, None)
        try:
            yield
        finally:
            setattr(self._text, CAP, self._cap)

    def _returns_what_the_head_gives(self, device: torch.device) -> bool:
        """Whether the model returns that, or would without a cap, which is done here then."""
        if self._answers_unchanged(device):
            return True
        self._cap = getattr(self._text, CAP, None)
        with self._uncapped():
            return self._cap is not None and self._answers_unchanged(device)

    def _answers_unchanged(self, device: torch.device) -> bool:
        with torch.no_grad():
            request = one_sequence(torch.zeros(2, dtype=torch.int64, device=device))
            question = _Question.whole(request)
            if self._context is not None:
                question = _Question.part(request, self._context)
            self._open = question, 1.0, False
            unchanged = self._run(question) is self._answer
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


def check_shared_rows(model: nn.Module, ranks: int, *, packs: bool) -> None:
    """Check that ``ranks`` ranks can share a row.

    Raises:
        TrainerError: a layer of the model looks at several tokens and is no attention, or its heads
            cannot be dealt evenly.
    """
    config: Any = model.config
    heads = int(config.get_text_config().num_attention_heads)
    if packs and heads % ranks == 0:
        return
    why = f"its {heads} heads are no multiple of it" if packs else "not all its layers can"
    raise TrainerError(
        f"{type(model).__name__} cannot be trained with training.cp_size {ranks}: {why}",
        hint="set training.cp_size to 1, or to a divisor of the model's attention heads",
    )
