"""Trajectories under way, as their turns tell them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from libra_cli.core.evidence import PlayedTurn
from libra_cli.core.observed.tool_times import ToolTimes
from libra_cli.core.records import TrajectoryRecord, TurnRecord
from libra_cli.core.types import Seconds, Tokens
from libra_cli.core.workload import TrajectorySample

Member: TypeAlias = tuple[int, int, int]
"""The group, member and attempt numbers of a trajectory."""


@dataclass(slots=True)
class _InPlay:
    """A trajectory under way: its last turn, its prompt's tokens, and what it has waited for."""

    last: TurnRecord
    prompt: Tokens
    generated: Tokens
    began_at: Seconds
    turns: int = 1
    tool_s: Seconds = 0.0

    @property
    def so_far(self) -> TrajectorySample:
        """Return the trajectory as far as it has come."""
        context = self.last.prompt_tokens + self.last.generated_tokens
        generated = max(1, self.generated)
        prompt = min(self.prompt, max(0, context - generated))
        observed = max(0, context - generated - prompt)
        return TrajectorySample(prompt, generated, observed, self.turns, self.tool_s)


class TrajectoriesUnderWay:
    """Trajectories under way that have played a turn."""

    def __init__(self, finished: int) -> None:
        self._under_way: dict[Member, _InPlay] = {}
        self.tools = ToolTimes(finished)

    def turn(self, row: TurnRecord) -> PlayedTurn:
        """Return the turn, with the tokens of its prompt that no cache can have held."""
        who = (row.group_id, row.member, row.attempt)
        one = self._under_way.get(who)
        cached = 0
        if one is None:
            self._under_way[who] = _InPlay(
                row, row.prompt_tokens, row.generated_tokens, min(row.queued_at, row.started_at)
            )
        else:
            before, one.last = one.last, row
            one.turns += 1
            one.generated += row.generated_tokens
            tool_s = max(0.0, row.queued_at - before.ended_at)
            one.tool_s += tool_s
            self.tools.returned(tool_s)
            if before.slot == row.slot:
                cached = before.prompt_tokens + before.generated_tokens
        self.tools.played(row.ended_at - row.queued_at)
        return played_turn(row, cached)

    def alive_since(self, at: Seconds | None) -> dict[Member, TrajectorySample]:
        """Return the trajectories under way, as far as they have come; with a time, those that
        asked for their first turn then or later."""
        return {
            who: one.so_far
            for who, one in self._under_way.items()
            if at is None or one.began_at >= at
        }

    def began_since(self, row: TrajectoryRecord, at: Seconds | None) -> bool:
        """Whether a trajectory under way asked for its first turn then or later."""
        one = self._under_way.get((row.group_id, row.member, row.attempt))
        return one is not None and at is not None and one.began_at >= at

    def tool_s(self, who: Member, queued_at: Seconds) -> Seconds:
        """Seconds that a trajectory under way has waited for tools until ``queued_at``, when its
        last turn was asked for."""
        one = self._under_way.get(who)
        return one.tool_s + max(0.0, queued_at - one.last.ended_at) if one else 0.0

    def ended(self, row: TrajectoryRecord) -> TrajectorySample | None:
        """Return the trajectory's lengths; None if it never played a turn.

        Its time in tools is from the end of a turn until the next one is asked for.
        """
        one = self._under_way.pop((row.group_id, row.member, row.attempt), None)
        if one is None or row.generated_tokens < 1:
            return None
        if row.state == "finished":
            self.tools.finished(one.tool_s, row.turns - 1)
        prompt = max(0, min(one.prompt, row.context_tokens - row.generated_tokens))
        return TrajectorySample(
            prompt=prompt,
            generated=row.generated_tokens,
            observed=max(0, row.context_tokens - row.generated_tokens - prompt),
            turns=row.turns,
            tool_s=one.tool_s + sum(call.latency_s for call in one.last.tools),
        )


def played_turn(row: TurnRecord, cached: Tokens) -> PlayedTurn:
    """Return a turn of whose prompt its server may have had so many tokens from the one before."""
    return PlayedTurn(
        row.slot,
        row.started_at,
        row.ended_at,
        row.prompt_tokens,
        max(0, row.prompt_tokens - cached),
        row.generated_tokens,
    )
