"""Decides for every step of a server whether it checks drafts (speculative decoding).

Drafts save steps and make each dearer: with few requests a step costs the reading of the weights
and checked tokens are nearly free, with many they are paid like any other. Which wins depends on
the load, the model and the text, so it is measured where it is used: tokens a second with and
without drafts, of steps with a like number of requests. No I/O.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

EXPLORE = 512
"""Steps at a load of which ``TRIAL`` are of the kind that is not used there."""
TRIAL = 16
"""Steps in a row of one kind while it is tried. A step after a switch still has the other's cost
in its caches, and a mean of 16 steps tells differences of some 5 %."""
MEMORY = 64
"""Steps that a mean remembers: its weights fall by 1 / MEMORY a step."""


@dataclass(slots=True)
class _Rate:
    """Tokens and seconds, each a sum whose older terms weigh less."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        keep = 1 - 1 / MEMORY
        self.tokens = keep * self.tokens + tokens
        self.seconds = keep * self.seconds + seconds

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class DraftSwitch:
    """What is known of steps with drafts and without, by the load."""

    def __init__(self) -> None:
        self._rates: defaultdict[tuple[int, bool], _Rate] = defaultdict(_Rate)
        self._steps: defaultdict[int, int] = defaultdict(int)
        self._best: dict[int, bool] = {}
        """Whether drafts were better when it was last asked; a trial does not end half-way."""

    def choose(self, running: int) -> bool:
        """Whether the next step, of ``running`` requests, is to check drafts."""
        load = running.bit_length()
        step = self._steps[load]
        if step < 2 * TRIAL:
            return step < TRIAL
        if step % EXPLORE < TRIAL:
            return not self._best[load]
        self._best[load] = self._rates[load, True].per_second >= self._rates[load, False].per_second
        return self._best[load]

    def observe(self, running: int, *, drafts: bool, tokens: int, seconds: float) -> None:
        """A step of ``running`` requests with or without drafts gave ``tokens`` in ``seconds``."""
        load = running.bit_length()
        self._steps[load] += 1
        self._rates[load, drafts].add(tokens, seconds)
