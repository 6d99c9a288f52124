"""libra's rollout server around an engine that computes nothing.

Every turn is three tokens, the last of which ends it. The form and the way of the messages are the
real ones.
"""

from __future__ import annotations

import sys
import types
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from libra_cli.node.rollout.turn import Answer, TurnTokens

SAID = (70, 71)
"""Letters of the small model's vocabulary; its turn ends with a token of the order's."""


class AtOnceEngine:
    """Answers every turn in the next step."""

    kv_tokens = 1 << 40
    about = "nothing is computed"

    def __init__(self, arguments: Sequence[str]) -> None:
        """Take vLLM's arguments, and need none of them."""
        self._turns: dict[str, Mapping[str, Any]] = {}
        self._label = "default"
        self._generated = 0

    @property
    def busy(self) -> bool:
        """Whether a turn waits."""
        return bool(self._turns)

    def add(self, name: str, order: Mapping[str, Any]) -> None:
        """Begin a turn."""
        self._turns[name] = order

    def step(self) -> list[tuple[str, Answer]]:
        """End every turn."""
        turns, self._turns = self._turns, {}
        return [(name, self._answered(order)) for name, order in turns.items()]

    def _answered(self, order: Mapping[str, Any]) -> Answer:
        turn = TurnTokens()
        turn.grow([*SAID, *order["stop_token_ids"][:1]], self._label)
        turn.logprobs.extend([-1.0] * len(turn.token_ids))
        if order["score_prompt"]:
            prompt = array("i", order["prompt_ids"])
            turn.prompt_logprobs.extend([-1.0] * (len(prompt) - 1))
        self._generated += len(turn.token_ids)
        return turn.answer("stop")

    def abort(self, name: str) -> Answer | None:
        """End a turn without a token."""
        return None if self._turns.pop(name, None) is None else TurnTokens().answer("abort")

    def prepare(self, directory: str) -> bool:
        """Have everything already."""
        return True

    def load(
        self, directory: str, label: str, *, tell: Callable[[list[Any]], None], **how: bool
    ) -> Answer:
        """Say so of any version."""
        self._label = label
        proof: Answer = {"different": [], "untraced": []}
        return {"load_s": 0.0, "proof_s": 0.0, "paused_s": 0.0, **proof}

    def counters(self) -> dict[str, float]:
        """What is asked for."""
        gauges = {"running": len(self._turns), "waiting": 0, "kv_use": 0.0}
        return {**gauges, "generated_tokens": self._generated}

    def close(self) -> None:
        """End nothing."""


if __name__ == "__main__":
    engine = types.ModuleType("libra_cli.node.rollout.engine")
    engine.VllmEngine = AtOnceEngine  # type: ignore[attr-defined]
    sys.modules[engine.__name__] = engine
    from libra_cli.node.rollout import server

    server.main()
