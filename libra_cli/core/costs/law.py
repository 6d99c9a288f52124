"""What a law of a rollout server's time has to say, whatever model the server runs.

The scheduler, the planner and the simulator ask a law for seconds and never for its coefficients,
so a model whose steps follow another law is one more file beside ``costs.server``, which holds the
linear law of dense models, and ``costs.mixture_server``.

Seconds are those of one server. Arguments that say ``Any`` may be numbers or numpy arrays of equal
shape, and the result is of that shape.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

from libra_cli.core.costs.server import ServerCost, TrajectoryWork
from libra_cli.core.types import Seconds, Tokens


class ServerLaw(Protocol):
    """Seconds of the engine steps of one server of a (model, GPU, tensor-parallel) shape.

    Every law grows with each of its arguments and is never negative.
    """

    @property
    def tensor_parallel(self) -> int:
        """GPUs of one server."""

    @property
    def kv_tokens(self) -> Tokens:
        """Tokens that the server's KV cache holds."""

    @property
    def chunk_tokens(self) -> Tokens:
        """The most tokens that a step computes (vLLM's ``max_num_batched_tokens``)."""

    @property
    def sequence_s(self) -> Seconds:
        """Seconds that one more sequence adds to a decoding step,
        without the reading of its context.
        """

    def context_s(self, context: Tokens) -> Seconds:
        """Seconds that a decoding step takes to read the KV cache of ``context`` tokens."""

    def decode_step_s(self, batch: float, kv_tokens: float) -> Seconds:
        """Seconds of one step that decodes ``batch`` sequences holding ``kv_tokens`` in all."""

    def decode_line(self, batch: int, kv_tokens: int) -> tuple[Seconds, Seconds, int]:
        """Time of the next decode step, its growth a step, and for how many steps that holds."""

    def prefill_s(self, tokens: Tokens, context: Tokens) -> Seconds:
        """Seconds to compute ``tokens`` prompt tokens on top of ``context`` cached ones, alone."""

    def mixed_step_s(
        self, batch: float, kv_tokens: float, chunk: int, chunk_context: float, requests: int = 0
    ) -> Seconds:
        """Seconds of one step: a decode batch, and ``chunk`` tokens after ``chunk_context``.

        ``requests`` are those that the chunk is the first of.
        """

    def recompute_s(self, tokens: Any, context: Any) -> Any:
        """Seconds to compute so many tokens again beside others, in contexts of that length."""

    def trajectory_work(
        self, *, prompt: Any, generated: Any, observed: Any, context: Any, turns: Any
    ) -> TrajectoryWork:
        """Return the server's time for trajectories of these tokens;
        ``context`` is the mean at their turns.
        """

    def step_share(self, running: Any) -> Any:
        """Return the share of ``trajectory_work``'s ``engine_s`` that
        steps of ``running`` sequences take.
        """

    def decode_amounts(self, running: float, kv_tokens: float) -> tuple[float, ...]:
        """Return the amount of each of ``decode_prices`` in one step."""

    @property
    def decode_prices(self) -> tuple[Seconds, ...]:
        """The prices that are learned from steps as they are seen (``costs.online``)."""

    def repriced(self, decode_prices: tuple[Seconds, ...], level: float) -> Self:
        """Return the same law with these decode prices, and
        everything else ``level`` times as long.
        """

    def scaled(self, factor: float) -> Self:
        """The same with every second ``factor`` times as long."""

    def with_kv_tokens(self, tokens: Tokens) -> Self:
        """The same with a KV cache of so many tokens."""

    def linear(self) -> ServerCost:
        """Return the linear law that this one nears in large batches, for tables."""

    def floor(self) -> ServerCost:
        """Return a linear law that no step of this one is below, for bounds."""

    def to_dict(self) -> dict[str, float]:
        """Return the fields by name, in seconds and tokens."""
