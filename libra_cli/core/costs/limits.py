"""What a recipe lets a trajectory grow to, for work that nobody has played yet.

A run ends a trajectory at ``max_len`` tokens or ``max_turns`` turns, and a turn at
``max_turn_tokens``. Whoever expects longer trajectories than were seen has to end them there too: a
trainer is otherwise asked for memory, and a server for KV cache, that no trajectory will ever need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from libra_cli.core.types import Tokens

if TYPE_CHECKING:
    from libra_cli.core.costs.workload import TrajectorySample


@dataclass(frozen=True, slots=True)
class TrajectoryLimits:
    """The most tokens of a context at its end, the most turns, and the most tokens of a turn."""

    max_len: Tokens
    max_turns: int
    max_turn_tokens: Tokens

    def allow(self, sample: TrajectorySample) -> bool:
        """Whether a run can play such a trajectory to its end; turns are judged by their mean."""
        return (
            sample.context <= self.max_len
            and sample.turns <= self.max_turns
            and sample.generated <= sample.turns * self.max_turn_tokens
        )

    def cut(self, sample: TrajectorySample) -> TrajectorySample:
        """The same as far as a run plays it, as if every turn were alike and it grew evenly."""
        if self.allow(sample):
            return sample
        turns = min(sample.turns, self.max_turns)
        share = turns / sample.turns
        shorter = replace(
            sample,
            generated=min(max(1, int(sample.generated * share)), turns * self.max_turn_tokens),
            observed=int(sample.observed * share),
            turns=turns,
            tool_s=sample.tool_s * share,
        )
        return shorter if shorter.context <= self.max_len else self._within_length(shorter)

    def _within_length(self, sample: TrajectorySample) -> TrajectorySample:
        prompt = min(sample.prompt, self.max_len - 1)
        room = self.max_len - prompt
        share = room / (sample.context - sample.prompt)
        share = min(1.0, share)
        generated = min(max(1, int(sample.generated * share)), room)
        return replace(
            sample,
            prompt=prompt,
            generated=generated,
            observed=min(room - generated, sample.observed),
            turns=max(1, ceil(sample.turns * share)),
            tool_s=sample.tool_s * share,
        )
