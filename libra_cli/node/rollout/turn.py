"""Collects what is generated of one turn, in the form in which it is sent to the controller."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Answer: TypeAlias = dict[str, Any]
"""A map that the controller is sent as msgpack."""


class TurnRefused(ValueError):
    """The turn itself is wrong: it would be refused again."""


def reason_of(output: Any) -> str:
    """Return why the turn of an output of vLLM's has ended. Since 0.33 one that vLLM rejects, and
    ends as a failure, says what was wrong with it."""
    error = getattr(output, "error", None)
    return str(output.finish_reason) if error is None else f"{error.code}: {error.message}"


@dataclass(slots=True)
class TurnTokens:
    """The tokens of a turn that is being generated, with log-probability, version and experts."""

    prompt_tokens: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """Log-probability of each of ``token_ids`` after temperature, in nats."""
    prompt_logprobs: array[float] = field(default_factory=lambda: array("f"))
    """Log-probabilities of the prompt's tokens but the first, in nats; empty unless asked for."""
    routes_from: int = 0
    """The first token of the context whose experts are wanted."""
    routes: list[NDArray[Any]] = field(default_factory=list)
    """``[tokens, layers, k]`` each: the experts that routers chose for the tokens from there on;
    empty unless the server was asked for them."""
    spans: list[list[Any]] = field(default_factory=list)
    """A list for each version: its label, its first token, and the one after its last."""

    def grow(self, token_ids: Sequence[int], label: str) -> None:
        """Append tokens that the version of that label has generated."""
        if not self.spans or self.spans[-1][0] != label:
            self.spans.append([label, len(self.token_ids), 0])
        self.token_ids.extend(token_ids)
        self.spans[-1][2] = len(self.token_ids)

    def answer(self, finish_reason: str) -> Answer:
        """Return all of it; ``finish_reason`` is vLLM's: stop, length, abort, or a failure."""
        return {
            "token_ids": self.token_ids.tobytes(),
            "logprobs": self.logprobs.tobytes(),
            "prompt_logprobs": self.prompt_logprobs.tobytes(),
            "spans": self.spans,
            "finish_reason": finish_reason,
            "routes": self._routes(),
        }

    def _routes(self) -> Answer | None:
        if not self.routes:
            return None
        whole = np.concatenate(self.routes)
        return {
            "start": self.routes_from,
            "layers": whole.shape[1],
            "chosen": whole.shape[2],
            "bytes": whole.itemsize,
            "ids": whole.tobytes(),
        }
