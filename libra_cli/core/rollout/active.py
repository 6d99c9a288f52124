"""A trajectory in play: the stages between its prompt and its reward, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from libra_cli.core.events import TurnGenerated
from libra_cli.core.lifecycle import follow
from libra_cli.core.sampling.overlong import overlong_penalty
from libra_cli.core.scheduling.server_queues import Request
from libra_cli.core.types import Seconds, SlotId, Tokens, ToolReturn, Trajectory, WeightVersion


class Stage(StrEnum):
    """The stages of a trajectory between its prompt and its reward."""

    RESETTING = "resetting"
    WAITING = "waiting"
    GENERATING = "generating"
    ADVANCING = "advancing"
    TAUGHT = "taught"


S = Stage

TRANSITIONS: dict[Stage, dict[Stage, str]] = {
    S.RESETTING: {
        S.WAITING: "the environment has said the prompt",
    },
    S.WAITING: {
        S.GENERATING: "a server has a seat for it",
    },
    S.GENERATING: {
        S.ADVANCING: "the turn is whole",
        S.WAITING: "the server drains, died or did not answer, or the reply does not count",
    },
    S.ADVANCING: {
        S.WAITING: "the environment has answered the turn and goes on",
        S.TAUGHT: "its episode is over, and its teacher is asked about its tokens",
    },
    S.TAUGHT: {},
}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits at which a trajectory is cut: turns, tokens a turn, tokens in all; and what it
    costs to come near the last one.
    """

    max_turns: int
    max_turn_tokens: int
    max_len: int
    penalty: float = 0.0
    buffer: Tokens = 0

    def penalty_of(self, context: Tokens) -> float:
        """Return what a trajectory that ends with ``context`` tokens loses of its reward."""
        return overlong_penalty(
            context, most=self.max_len, buffer=self.buffer, penalty=self.penalty
        )


@dataclass(slots=True)
class ActiveTrajectory:
    """A trajectory that has no reward yet. ``turn`` is the reply the environment is looking at."""

    trajectory: Trajectory
    stage: Stage = Stage.RESETTING
    slot: SlotId | None = None
    #: Of the Generate action it waits for.
    request: int = 0
    queued_at: Seconds = 0.0
    ended_at: Seconds = 0.0
    #: Since when its environment has it.
    asked_at: Seconds = 0.0
    turn: TurnGenerated | None = None
    #: Replies that broke off in this turn because their server drained, in order.
    parts: list[TurnGenerated] = field(default_factory=list)
    #: The most tokens of this turn, if its agent asks for fewer than the limits allow.
    turn_limit: Tokens | None = None
    #: What it waits for or waited for last, and the cache key of its last turn.
    asked: Request | None = None
    turn_key: WeightVersion | None = None
    #: The version of its first turn, where KV is kept over loads: it uses none of older ones.
    kv_since: WeightVersion | None = None
    prompt: Tokens = 0
    #: The digest of what it was shown last: its prompt, or an observation.
    shown: int = 0
    #: Tokens it has yet to generate, by the policy's estimator; 0 where that has none.
    expected: float = 0.0
    returns: list[ToolReturn] = field(default_factory=list)
    #: Of an episode that is over, while its teacher is asked.
    reward: float = 0.0
    #: Where this turn broke off, of servers that may have died just then.
    broke_at: set[SlotId] = field(default_factory=set)

    def enter(self, stage: Stage) -> None:
        """Change the stage along ``TRANSITIONS``.

        Raises:
            IllegalMove: the table has no such change.
        """
        self.stage = follow(TRANSITIONS, self.stage, stage, self.trajectory.id)

    def came_back(self, now: Seconds, waited_s: Seconds) -> None:
        """Count the seconds since its environment was asked; of all of them so far the trajectory
        waited ``waited_s`` for a place.
        """
        self.trajectory.environment_s += now - self.asked_at
        self.trajectory.waited_s = max(self.trajectory.waited_s, waited_s)
        self.asked_at = now

    def left_to_generate(self, limits: Limits) -> Tokens:
        """Return how many more tokens the model may generate in this turn."""
        said = sum([len(part.token_ids) for part in self.parts])
        most = min(limits.max_turn_tokens, self.turn_limit or limits.max_turn_tokens)
        return min(most - said, limits.max_len - len(self.trajectory.token_ids))

    def next_request(self, now: Seconds) -> Request:
        """Ask for its next turn, or for the rest of one that broke off."""
        trajectory = self.trajectory
        return Request(
            trajectory=trajectory.id,
            context=len(trajectory.token_ids),
            generated=trajectory.generated,
            turns=trajectory.turns,
            tools=trajectory.tools,
            waiting_since=now,
            last_slot=self.slot,
            last_key=self.turn_key,
            kv_since=self.kv_since,
            expected=self.expected,
        )
