"""Compares what a server decodes with what it scores: the proof of the kernels that sample.

Checksums say what the parameters of a server are, and the probe is a prefill. All tokens of a turn
but its first come from decoding, which on GPUs runs CUDA graphs and may read tensors that are
derived from parameters (MLA's ``W_UK_T``, scales, workspaces): a reload can leave either on what
was there before (vllm-project/vllm 48312, 41670). So a server generates a few tokens, at its first
version and at every ``EVERY``-th, and scores the same text as a prompt. Both are of the same
weights, and no trainer is needed.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libra_cli.config.errors import ServerError
from libra_cli.config.recipe import ModelSpec
from libra_cli.core.actions import Generate, SyncServer
from libra_cli.core.events import TurnFailed
from libra_cli.core.launch.process import Dtype, dtype_of
from libra_cli.core.types import Slot, SlotId, Tokens, TrajectoryId
from libra_cli.runtime.rollout.connection import Sampling, ServerConnection
from libra_cli.runtime.weights.probe_bounds import GapBounds, probe_gap

PROMPT: Tokens = 16
"""Tokens of the probe that the generation begins with."""
DECODED: Tokens = 32
EVERY = 20
"""Versions of a process from one check to the next."""
SAMPLED = Sampling(temperature=1.0, top_p=1.0, stop_token_ids=(), to_the_end=True)
"""The tokens are sampled, as those of turns are: the likeliest would come from other kernels, and
text that repeats itself is so sure that old weights give it the same log-probabilities."""
NOBODY = -1
"""The number of a request and of a group that no trajectory has."""
_HELP = (
    "to decode without CUDA graphs: rollout: {engine: safe}; to allow more: weight_sync.tolerance"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Expected:
    """What right kernels differ by at most, in nats a token: at a process's first check, and a
    number that no later bound is below."""

    first: float
    later: float


EXPECTED: Mapping[tuple[Dtype, bool], Expected] = {
    ("float32", False): Expected(1e-3, 1e-3),
    ("float32", True): Expected(0.02, 0.005),
    ("bfloat16", False): Expected(0.2, 0.05),
    ("bfloat16", True): Expected(0.2, 0.05),
}
"""The bounds depend on the format and on whether there is a GPU. On CPUs decoding and scoring gave
the same numbers, bit by bit, in both formats and in int8 (vLLM 0.32, a model of four layers).
Between computations in bfloat16 on GPUs 0.008 to 0.03 was measured by others (vime 64, Fast-LLM
525), of mixtures two to three times that; float32 may be computed in TF32 there, whose numbers have
three bits more than bfloat16's."""


class DecodeCheck:
    """Has servers compare the two, and counts when that is due."""

    def __init__(self, model: ModelSpec, tolerance: float | None) -> None:
        """Compare nothing yet; ``tolerance`` is ``weight_sync.tolerance``, which may allow more."""
        self._model = model
        self._tolerance = tolerance or 0.0
        self._synced: dict[SlotId, tuple[int, int]] = {}
        """Incarnation and the versions that it has taken."""
        self._bounds: dict[Expected, GapBounds] = {}

    async def reason(
        self, server: ServerConnection, slot: Slot, action: SyncServer, prompt: Sequence[int]
    ) -> str:
        """Why the server decodes with other weights than it scores with; empty if it does not, or
        if nothing is due.

        Raises:
            ServerError: it generated or scored nothing.
        """
        incarnation, versions = self._synced.get(slot.id, (action.incarnation, 0))
        if incarnation != action.incarnation:
            versions = 0
        if versions % EVERY == 0:
            began = time.monotonic()
            gap = await decode_gap(server, action, prompt)
            took_ms = 1e3 * (time.monotonic() - began)
            _log.info("%s decodes within %.2g nats of scoring, %.0f ms", slot.id, gap, took_ms)
            if reason := self._bounds_of(slot).reason(slot.id, action.incarnation, gap):
                return f"{reason}; {_HELP}"
        self._synced[slot.id] = (action.incarnation, versions + 1)
        return ""

    def _bounds_of(self, slot: Slot) -> GapBounds:
        expected = EXPECTED[dtype_of(self._model, [slot]), bool(slot.gpus)]
        wrong = max(expected.first, self._tolerance)
        what = "decoding differs from scoring the same tokens"
        made = GapBounds(wrong=wrong, least=expected.later, what=what)
        return self._bounds.setdefault(expected, made)


async def decode_gap(server: ServerConnection, action: SyncServer, prompt: Sequence[int]) -> float:
    """Return the mean |difference| between decoding tokens and scoring them, in nats a token.

    Raises:
        ServerError: the server generated or scored nothing.
    """
    asked = Generate(
        request=NOBODY,
        trajectory=TrajectoryId(NOBODY, 0),
        slot=action.slot,
        incarnation=action.incarnation,
        prompt_ids=array("i", prompt[:PROMPT]),
        max_tokens=DECODED,
        cache_key=action.published.version,
        priority=-1,
    )
    done = await server.generate(asked, SAMPLED)
    if isinstance(done, TurnFailed):
        await server.check()  # which says it where the server cannot be reached
        raise ServerError(f"{action.slot}: no tokens to compare: {done.reason}")
    scored = await server.probe([*done.prompt_ids, *done.token_ids], action.published)
    return probe_gap(tuple(done.logprobs), scored[-len(done.token_ids) :])
