"""What a calibration asks of servers and a trainer, and the laws its answers are fitted to.

**Servers** are kept in a steady state: ``players`` trajectories, each always in a turn. A turn
finds ``cached`` tokens of its context in the prefix cache, computes ``fresh`` ones and generates
``generate`` on average; lengths are drawn, so that turns begin and end at different times, as in
a run. With n players, in the T seconds of a turn the engine makes about as many steps as a turn has
tokens, and does the work of n turns::

    T = turn_s + a steps + b n (generate - 1) + c n (generate - 1) context
        + r n + p1 n fresh + p2 n fresh (cached + fresh / 2)

with the prices of ``costs.server``. ``turn_s`` is what a turn spends outside the engine.

**The trainer** takes steps on made-up batches: ``seconds = step_s + token_s T + pair_s Q``.

Guarantee: pure; the same sizes for the same recipe. Limit: the mean of T is explained, not how it
varies; all servers of a shape are priced as one, under the same load at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil

from libra_cli.core.costs.fitting import Fit, Observed, fit
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.types import Seconds, Tokens

BLOCK: Tokens = 16
"""Tokens of a block of the prefix cache, which holds whole blocks only: vLLM's default."""
FRESH: Tokens = 8
"""Prompt tokens that a usual turn computes: what the pointer-chase tool returns; chosen."""
TURNS: tuple[Tokens, ...] = (4, 24)
"""Generated tokens of a turn, on average, short and long; chosen."""
KV_SHARE = 0.8
"""Share of the KV cache that a load may fill, so that nothing is preempted; chosen."""
SERVER_PRICES = (
    "a step",
    "a sequence",
    "a cached token",
    "a prompt token",
    "a pair of tokens",
    "a request",
    "a turn outside",
)
TRAINING_PRICES = ("a step", "a token", "a pair of tokens")


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A steady state of one server; tokens are means over the turns."""

    players: int
    cached: Tokens
    fresh: Tokens
    generate: float

    def amounts(self, chunk_tokens: Tokens) -> tuple[float, ...]:
        """Return the amount of each of ``SERVER_PRICES`` that the
        server does in the time of one turn.
        """
        decoded = self.players * (self.generate - 1)
        context = self.cached + self.fresh + self.generate / 2
        computed = self.players * self.fresh
        steps = self.generate - 1 + max(1, ceil(self.fresh / chunk_tokens))
        pairs = computed * (self.cached + self.fresh / 2)
        return (steps, decoded, decoded * context, computed, pairs, self.players, 1.0)

    def __str__(self) -> str:
        return (
            f"{self.players} at once, {self.cached} cached, {self.fresh} computed, "
            f"{self.generate:g} generated"
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """A made-up training batch: so many trajectories of so many tokens."""

    trajectories: int
    length: Tokens

    def amounts(self) -> tuple[float, ...]:
        """Return the amount of each of ``TRAINING_PRICES`` in a step on this batch."""
        tokens = self.trajectories * self.length
        return (1.0, tokens, tokens * self.length / 2)

    def __str__(self) -> str:
        return f"{self.trajectories} trajectories of {self.length} tokens"


def server_loads(max_num_seqs: int, max_len: Tokens, kv_tokens: Tokens) -> Iterator[ServerLoad]:
    """The loads to measure: a grid of batch sizes, contexts and turns, and growing prompts."""
    players = _doubling(max_num_seqs)
    short, long = _blocks(max_len // 16), _blocks(max_len * 3 // 4)
    for number, cached, turn in product(players, (short, long), TURNS):
        room = min(max_len, int(KV_SHARE * kv_tokens / number))
        # Drawn lengths are at most twice their mean.
        if cached + FRESH + 2 * turn <= room:
            yield ServerLoad(number, cached, FRESH, turn)
    fresh = sorted({_blocks(max_len // part) for part in (8, 4, 2)} | {max_len - BLOCK})
    for number, tokens in product(sorted({1, min(4, max_num_seqs)}), fresh):
        if tokens * number <= KV_SHARE * kv_tokens:
            yield ServerLoad(number, 0, tokens, 1)
    half = _blocks(max_len // 2)
    if max_len <= KV_SHARE * kv_tokens:
        yield ServerLoad(1, half, max_len - half - BLOCK, 1)


def sharing_loads(max_num_seqs: int, max_len: Tokens) -> Iterator[ServerLoad]:
    """The loads to repeat while the trainer works: a server full, and a quarter full."""
    cached = _blocks(max_len // 16)
    for number in sorted({max_num_seqs, max(1, max_num_seqs // 4)}, reverse=True):
        yield ServerLoad(number, cached, FRESH, TURNS[0])


def training_batches(trajectories: int, max_len: Tokens) -> Iterator[Batch]:
    """Batches of an eighth of a step's trajectories to all of them, short and long."""
    numbers = sorted({max(1, trajectories // part) for part in (8, 3, 1)})
    lengths = sorted({max(8, max_len // part) for part in (16, 8, 4)})
    for number, length in product(numbers, lengths):
        yield Batch(number, length)


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4, ... below ``most``, and ``most``."""
    numbers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*numbers, most]


def _blocks(tokens: Tokens) -> Tokens:
    """The tokens rounded down to whole blocks, at least one."""
    return max(BLOCK, tokens // BLOCK * BLOCK)


@dataclass(frozen=True, slots=True)
class ServerFit:
    """The prices of a server, and the seconds a turn spends outside it."""

    cost: ServerCost
    turn_s: Seconds
    fit: Fit


def fit_server(
    measured: Iterable[tuple[ServerLoad, Seconds]],
    *,
    tensor_parallel: int,
    kv_tokens: Tokens,
    chunk_tokens: Tokens,
) -> ServerFit:
    """Prices from the mean seconds of a turn under each load.

    Raises:
        FittingError: too few loads, or times that say nothing.
    """
    points = [Observed(load.amounts(chunk_tokens), seconds) for load, seconds in measured]
    found = fit(f"servers of {tensor_parallel}", SERVER_PRICES, points)
    step_s, sequence_s, kv_token_s, prefill_token_s, prefill_pair_s, request_s, turn_s = (
        found.prices
    )
    cost = ServerCost(
        tensor_parallel=tensor_parallel,
        step_s=step_s,
        sequence_s=sequence_s,
        kv_token_s=kv_token_s,
        prefill_token_s=prefill_token_s,
        prefill_pair_s=prefill_pair_s,
        kv_tokens=kv_tokens,
        chunk_tokens=chunk_tokens,
        request_s=request_s,
    )
    return ServerFit(cost, turn_s, found)


def fit_training(measured: Sequence[tuple[Batch, Seconds]], *, ranks: int) -> Fit:
    """The prices of a step, a token and a pair, in rank-seconds.

    Raises:
        FittingError: too few batches, or times that say nothing.
    """
    points = []
    for batch, seconds in measured:
        once, tokens, pairs = batch.amounts()
        points.append(Observed((once, tokens / ranks, pairs / ranks), seconds))
    return fit("training", TRAINING_PRICES, points)
