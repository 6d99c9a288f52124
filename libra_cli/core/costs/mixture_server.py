"""A server of a mixture of experts: its steps read the weights of the experts that are chosen.

    step = a + e x D(tokens in the step) + b x batch + c x KV tokens + ...

and the rest as in ``costs.server``. ``a`` holds the weights that every step reads, ``e`` is the
reading of one expert of every layer, and D is the number of distinct experts that so many tokens
choose of a layer (``mixture_transformer.expected_experts``): 8 of Qwen3-30B-A3B's 128 for one
token, 52 for eight, 112 for 32. Times of vLLM's fused experts of that model (RTX PRO 6000,
LLMServingSim, MIT), for steps of 1 to 2,048 tokens that meet as many experts as D says, are 6.7 us
an expert and 0.11 us a token, 5 % off on average and 17 % at worst; straight lines in the tokens
are 63 % off on average.

Guarantee: never negative, and grows with every argument. Limit: D is of uniform routers; expert
parallelism, where GPUs wait for the one with the most experts, is not in here; p1 is of the
parameters that a token meets, with whatever efficiency the profile says.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from libra_cli.core.costs.mixture_transformer import expected_experts
from libra_cli.core.costs.server import ENDLESS, ServerCost, TrajectoryWork
from libra_cli.core.types import Seconds


@dataclass(frozen=True, slots=True)
class MixtureServerCost(ServerCost):
    """The law of the module; ``step_s`` is ``a``.

    Raises ValueError as ``ServerCost`` does, and where a token would not meet 1 to ``experts``
    experts.
    """

    experts: int = 0
    """Routed experts of a layer."""
    chosen: int = 0
    """Experts that the router chooses for a token, of ``experts``."""
    expert_s: Seconds = 0.0
    """Seconds to read one expert of every layer: ``e``."""

    def __post_init__(self) -> None:
        ServerCost.__post_init__(self)
        if not self.expert_s >= 0:
            raise ValueError(f"expert_s must be at least 0, not {self.expert_s}")
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"chosen must be 1 to experts ({self.experts}), not {self.chosen}")

    def reading_s(self, tokens: Any) -> Any:
        """Seconds to read the experts that so many tokens of a step choose."""
        return self.expert_s * expected_experts(self.experts, self.chosen, tokens)

    def decode_step_s(self, batch: float, kv_tokens: float) -> Seconds:
        """Seconds of one step that decodes ``batch`` sequences holding ``kv_tokens`` in all."""
        reading_s: Seconds = self.reading_s(batch)
        return ServerCost.decode_step_s(self, batch, kv_tokens) + reading_s

    def decode_line(self, batch: int, kv_tokens: int) -> tuple[Seconds, Seconds, int]:
        """Time of the next decode step, its growth a step, and for how many steps that holds."""
        return self.decode_step_s(batch, kv_tokens), self.kv_token_s * batch, ENDLESS

    def prefill_s(self, tokens: int, context: int) -> Seconds:
        """Seconds to compute ``tokens`` prompt tokens on top of ``context`` cached ones, alone."""
        whole, rest = divmod(tokens, self.chunk_tokens)
        reading_s = whole * self.reading_s(self.chunk_tokens) + self.reading_s(rest)
        return ServerCost.prefill_s(self, tokens, context) + float(reading_s)

    def mixed_step_s(
        self, batch: float, kv_tokens: float, chunk: int, chunk_context: float, requests: int = 0
    ) -> Seconds:
        """Seconds of one step: a decode batch, and ``chunk`` tokens after ``chunk_context``.

        ``requests`` are those that the chunk is the first of.
        """
        alone = ServerCost.mixed_step_s(self, batch, kv_tokens, chunk, chunk_context, requests)
        # The decoding part read the experts of the batch; the chunk's tokens choose more.
        return alone + float(self.reading_s(batch + chunk) - self.reading_s(batch))

    def trajectory_work(
        self, *, prompt: Any, generated: Any, observed: Any, context: Any, turns: Any
    ) -> TrajectoryWork:
        """Return the time of trajectories by ``ServerCost``'s law,
        as if each step read all experts.
        """
        return self.linear().trajectory_work(
            prompt=prompt, generated=generated, observed=observed, context=context, turns=turns
        )

    def step_share(self, running: Any) -> Any:
        """Return the time of a step of ``running`` sequences over
        that of a step that reads all experts.
        """
        return (self.step_s + self.reading_s(running)) / self.linear().step_s

    def decode_amounts(self, running: float, kv_tokens: float) -> tuple[float, ...]:
        """Return 1, the distinct experts read, the sequences and their KV tokens, of one step."""
        met = expected_experts(self.experts, self.chosen, running)
        return (1.0, met, running, kv_tokens)

    @property
    def decode_prices(self) -> tuple[Seconds, ...]:
        """The coefficients a, e, b and c of a decode step."""
        return (self.step_s, self.expert_s, self.sequence_s, self.kv_token_s)

    def repriced(self, decode_prices: tuple[Seconds, ...], level: float) -> Self:
        """Return the same law with these decode prices, and
        everything else ``level`` times as long.
        """
        step_s, expert_s, sequence_s, kv_token_s = decode_prices
        return replace(
            self,
            step_s=step_s,
            expert_s=expert_s,
            sequence_s=sequence_s,
            kv_token_s=kv_token_s,
            prefill_token_s=self.prefill_token_s * level,
            prefill_pair_s=self.prefill_pair_s * level,
            request_s=self.request_s * level,
        )

    def linear(self) -> ServerCost:
        """Return the linear law that this one nears in large
        batches: each step reads all experts.
        """
        return self._line(self.experts)

    def floor(self) -> ServerCost:
        """Return a linear law that no step is below: each reads the experts of one token."""
        return self._line(self.chosen)

    def _line(self, met: int) -> ServerCost:
        same = {one.name: getattr(self, one.name) for one in fields(ServerCost)}
        return ServerCost(**{**same, "step_s": self.step_s + self.expert_s * met})
