"""What a server's time goes into: a linear law of one engine step.

A continuous-batching engine works in steps. A step reads the weights once, advances every decoding
sequence by one token, reads their KV cache, and may compute a chunk of prompt tokens on the side::

    step = a + b x batch + c x KV tokens                       the decoding part
             + p1 x max(0, chunk - max(0, free - batch))       the chunk's matrix products
             + p2 x chunk x (context + chunk / 2)              the chunk's attention
             + r x requests                                    those whose prompts are in the chunk

``r`` is what a request costs the server whatever its size: to take it in, schedule it and answer.
It is 0 in prices made of kernels, and most of a short turn where the model is tiny. ``a`` holds the
weights and whatever a step costs before it does anything. Reading the weights takes as long as
multiplying them by one or two hundred tokens, so the first ``free`` tokens of a step ride on that
reading and only the rest is paid for: measured GEMMs (RTX PRO 6000, A100, H100) are flat up to
there and linear after. The decode law is the usual one (Vidur, arXiv 2405.05465; Splitwise,
arXiv 2311.18677). Mixtures of experts have their own, ``costs.mixture_server``.

Guarantee: every price is non-negative, and grows with every argument. Limit: straight lines through
measurements that have steps in them: for dense models 1 to 4 % off the kernel data on average, 14 %
at worst. Nor is in here that a prompt chunk slows the attention of the sequences decoding beside
it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Self

from libra_cli.core.types import Bucket, Seconds, Tokens

ENDLESS = 1 << 62
"""A number of steps larger than any request has."""


class TrajectoryWork(NamedTuple):
    """The time that trajectories take of a server, as numbers or arrays, in seconds.

    ``work_s`` passes the slower the more others there are, and ``prompt_s`` likewise where a prompt
    is not cached. ``engine_s`` passes whoever else is there: a step for each generated token and
    for each chunk of prompt, of which ``chunks_s`` are the chunks'.
    """

    work_s: Any
    prompt_s: Any
    engine_s: Any
    chunks_s: Any


@dataclass(frozen=True, slots=True)
class ServerCost:
    """One server of a (model, GPU, tensor-parallel) shape; times in seconds, sizes in tokens.

    ``step_s`` (a) is paid by every engine step, ``sequence_s`` (b) for each decoding sequence in
    it, ``kv_token_s`` (c) for each token of KV cache these read. ``request_s`` (r) is paid for each
    request, with its prompt, whatever its size. ``prefill_token_s`` (p1) is paid
    for each prompt token beyond the ``free_tokens`` that a step computes while it reads the
    weights, ``prefill_pair_s`` (p2) for each prompt token times a token it attends to.
    ``kv_tokens`` is the KV cache of the server, ``chunk_tokens`` the most tokens a step may
    compute (vLLM's ``max_num_batched_tokens``). Raises ValueError for a negative price or a
    capacity below one token.
    """

    tensor_parallel: int
    step_s: float
    sequence_s: float
    kv_token_s: float
    prefill_token_s: float
    prefill_pair_s: float
    kv_tokens: int
    chunk_tokens: int = 2048
    free_tokens: int = 0
    request_s: float = 0.0

    def __post_init__(self) -> None:
        prices = {
            "step_s": self.step_s,
            "sequence_s": self.sequence_s,
            "kv_token_s": self.kv_token_s,
            "prefill_token_s": self.prefill_token_s,
            "prefill_pair_s": self.prefill_pair_s,
            "free_tokens": self.free_tokens,
            "request_s": self.request_s,
        }
        for name, price in prices.items():
            if not price >= 0:
                raise ValueError(f"{name} must be at least 0, not {price}")
        sizes = {
            "tensor_parallel": self.tensor_parallel,
            "kv_tokens": self.kv_tokens,
            "chunk_tokens": self.chunk_tokens,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")

    def context_s(self, context: Tokens) -> Seconds:
        return self.kv_token_s * context

    def decode_step_s(self, batch: float, kv_tokens: float) -> float:
        """Seconds of one step that decodes ``batch`` sequences holding ``kv_tokens`` in all."""
        return self.step_s + self.sequence_s * batch + self.kv_token_s * kv_tokens

    def decode_line(self, batch: int, kv_tokens: int) -> tuple[float, float, int]:
        """Time of the next decode step, its growth a step, and for how many steps that holds."""
        step = self.step_s + self.sequence_s * batch + self.kv_token_s * kv_tokens
        return step, self.kv_token_s * batch, ENDLESS

    def prefill_s(self, tokens: int, context: int) -> float:
        """Seconds to compute ``tokens`` prompt tokens on top of ``context`` cached ones, alone."""
        whole, rest = divmod(tokens, self.chunk_tokens)
        matrices = whole * self._chunk_s(self.chunk_tokens, 0) + self._chunk_s(rest, 0)
        pairs = self.prefill_pair_s * tokens * (context + tokens / 2)
        return (whole + (rest > 0)) * self.step_s + matrices + pairs

    def mixed_step_s(
        self,
        batch: float,
        kv_tokens: float,
        chunk: int,
        chunk_context: float,
        requests: int = 0,
    ) -> float:
        """Seconds of one step: a decode batch, and ``chunk`` tokens after ``chunk_context``.

        ``requests`` are those that the chunk is the first of.
        """
        attention = self.prefill_pair_s * chunk * (chunk_context + chunk / 2)
        decode = self.decode_step_s(batch, kv_tokens)
        return decode + self._chunk_s(chunk, batch) + attention + self.request_s * requests

    def recompute_s(self, tokens: Any, context: Any) -> Any:
        """Seconds to compute so many tokens again beside others, in contexts of that length."""
        return tokens * (self.prefill_token_s + self.prefill_pair_s * context / 2)

    def trajectory_work(
        self, *, prompt: Any, generated: Any, observed: Any, context: Any, turns: Any
    ) -> TrajectoryWork:
        chunks = (prompt + observed) / self.chunk_tokens
        decode_s = (self.sequence_s + self.kv_token_s * context) * generated
        observed_s = (self.prefill_token_s + self.prefill_pair_s * context) * observed
        return TrajectoryWork(
            work_s=decode_s + self.request_s * turns + observed_s,
            prompt_s=self.recompute_s(prompt, prompt),
            engine_s=self.step_s * (generated + chunks),
            chunks_s=self.step_s * chunks,
        )

    def step_share(self, running: Any) -> Any:
        """Return 1: a dense model's step takes the same for any
        number of sequences, but for ``work_s``.
        """
        return 1.0

    def decode_amounts(self, running: float, kv_tokens: float) -> tuple[float, ...]:
        """Return 1, the sequences and their KV tokens, of one step."""
        return (1.0, running, kv_tokens)

    @property
    def decode_prices(self) -> tuple[Seconds, ...]:
        """The coefficients a, b and c of a decode step."""
        return (self.step_s, self.sequence_s, self.kv_token_s)

    def repriced(self, decode_prices: tuple[Seconds, ...], level: float) -> Self:
        """Return the same law with these decode prices, and
        everything else ``level`` times as long.
        """
        step_s, sequence_s, kv_token_s = decode_prices
        return replace(
            self,
            step_s=step_s,
            sequence_s=sequence_s,
            kv_token_s=kv_token_s,
            prefill_token_s=self.prefill_token_s * level,
            prefill_pair_s=self.prefill_pair_s * level,
            request_s=self.request_s * level,
        )

    def scaled(self, factor: float) -> Self:
        """Return the same law with every second ``factor`` times as long."""
        return self.repriced(tuple(price * factor for price in self.decode_prices), factor)

    def with_kv_tokens(self, tokens: Tokens) -> Self:
        """Return the same law with a KV cache of ``tokens`` tokens."""
        return replace(self, kv_tokens=tokens)

    def linear(self) -> ServerCost:
        """Return this law itself: it is linear."""
        return self

    def floor(self) -> ServerCost:
        """Return this law itself: it is its own lower bound."""
        return self

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    def _chunk_s(self, chunk: int, batch: float) -> float:
        free = self.free_tokens - batch
        paid = chunk - free if free > 0 else chunk
        return self.prefill_token_s * paid if paid > 0 else 0.0


def guessed_cost(bucket: Bucket) -> ServerCost:
    """The costs of a server of unknown speed: chosen for a mid-sized model; only ratios matter."""
    return ServerCost(
        tensor_parallel=bucket.tensor_parallel,
        step_s=0.02,
        sequence_s=1e-4,
        kv_token_s=1e-7,
        prefill_token_s=1e-4,
        prefill_pair_s=0.0,
        kv_tokens=bucket.max_num_seqs * bucket.up_to_tokens,
    )
