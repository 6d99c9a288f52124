"""The conversations of an episode: one of a plain environment, one for each role of others.

Each is a branch of the trajectory. Branches are numbered in the order in which their roles first
speak, as the core numbers them (``core.types.BranchPoint``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from libra_cli.core.types import BranchPoint, Tokens
from libra_cli.envs.protocol import Message, ToolSchema
from libra_cli.envs.session import Conversation, Opening

REWARD_OF = "reward/{}"
"""The metric that has the reward of a role."""


@dataclass(slots=True)
class Speaker:
    """One conversation: what a role has read and said, and what it has yet to read."""

    role: str
    branch: int
    tools: list[ToolSchema] = field(default_factory=list)
    conversation: list[Message] = field(default_factory=list)
    unread: list[Message] = field(default_factory=list)
    """What it reads before it speaks again."""
    last: Sequence[int] | None = None
    """Token ids of its last turn; None before the first."""
    tokens: Tokens = 0
    """Tokens of its branch so far."""

    def hear(self, messages: Iterable[Message]) -> None:
        """Keep what others have said until it speaks again."""
        heard = [*messages]
        self.conversation += heard
        self.unread += heard

    def read(self) -> list[Message]:
        """Return what it has not read yet, and count that as read."""
        unread, self.unread = self.unread, []
        return unread

    def say(self, turn: Sequence[int], message: Message) -> None:
        """Add a generated turn."""
        self.last, self.tokens = turn, self.tokens + len(turn)
        self.conversation.append(message)


class Speakers:
    """The speakers of an episode, whose turn it is, and what each role has earned.

    An environment without roles has one speaker, whose role is the empty name.
    """

    def __init__(self, opening: Opening) -> None:
        self.roles = tuple(opening.roles)
        self.current = Speaker(opening.role, 0, opening.tools)
        """The speaker whose turn it is, or was last."""
        self.current.hear(opening.messages)
        self._speakers = {opening.role: self.current}
        self._earned: defaultdict[str, float] = defaultdict(float)
        self._untold: defaultdict[str, float] = defaultdict(float)

    def pass_to(self, role: str, messages: Iterable[Message]) -> None:
        """Let a role speak next, when it has read the messages."""
        if role not in self._speakers:
            self._speakers[role] = Speaker(role, len(self._speakers))
        self.current = self._speakers[role]
        self.current.hear(messages)

    @property
    def point(self) -> BranchPoint:
        """Where what the speaker reads next follows."""
        known = self.current.tokens > 0
        return BranchPoint(self.current.branch if known else 0, self.current.tokens)

    @property
    def conversation(self) -> Conversation:
        """All messages of the episode, by role where it has roles."""
        if not self.roles:
            return list(self.current.conversation)
        empty: dict[str, list[Message]] = {role: [] for role in self.roles}
        return empty | {
            role: list(speaker.conversation) for role, speaker in self._speakers.items()
        }

    def earn(self, rewards: Mapping[str, float]) -> None:
        """Add to what roles have earned."""
        for role, reward in rewards.items():
            self._earned[role] += reward
            self._untold[role] += reward

    def take_earned(self) -> dict[str, float]:
        """Return what roles that have spoken have earned since it was last taken, without zeros."""
        spoken = [role for role, speaker in self._speakers.items() if speaker.last is not None]
        taken = {role: self._untold.pop(role, 0.0) for role in spoken}
        return {role: reward for role, reward in taken.items() if reward}

    @property
    def reward(self) -> float:
        """What the episode has earned; with roles the mean over them."""
        return fmean(self._earned[role] for role in self.roles or ("",))

    @property
    def metrics(self) -> dict[str, float]:
        """The reward of each role, by the metric's name; empty without roles."""
        return {REWARD_OF.format(role): self._earned[role] for role in self.roles}
