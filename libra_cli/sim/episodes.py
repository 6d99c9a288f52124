"""The environments of a simulated run: recorded episodes, played turn by turn.

A trajectory's recorded future stays in here. The machine learns of a turn when it is generated and
of a tool's return when it comes back; only an oracle that is asked for on purpose knows more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.types import (
    Seconds,
    Tokens,
    ToolOutcome,
    ToolReturn,
    TrajectoryId,
    is_evaluation,
)
from libra_cli.sim.counted import ids
from libra_cli.sim.models import SimModels
from libra_cli.sim.traces import RecordedEpisode, Turn
from libra_cli.sim.virtual_time import VirtualTime

CHARACTERS = 4
"""Characters a token: the machine is told the characters that tools return, traces count tokens."""


@dataclass(slots=True)
class Play:
    """A recorded trajectory, and how far it has been played."""

    episode: RecordedEpisode
    turn: int = 0
    #: Tokens that a server is asked for.
    wanted: Tokens = 0
    #: Tokens of this turn that were generated before a server aborted it.
    said: Tokens = 0
    #: Tokens some server has computed at some time.
    known: Tokens = 0


class SimEpisodes:
    """Every trajectory in play. ``turn_s`` is what a turn spends outside engine and tool."""

    def __init__(
        self,
        time: VirtualTime,
        groups: Iterator[tuple[RecordedEpisode, ...]],
        turn_s: Seconds,
        models: SimModels,
    ) -> None:
        """``models`` are asked by every trajectory at its end."""
        self._time = time
        self._models = models
        self._groups = groups
        self._turn_s = turn_s
        self._drawn: list[tuple[RecordedEpisode, ...]] = []
        #: Recordings behind the tasks of evaluations.
        self._evaluated: dict[int, tuple[RecordedEpisode, ...]] = {}
        self.plays: dict[TrajectoryId, Play] = {}

    def perform(self, action: a.EpisodeAction) -> None:
        """Start, advance, finish or forget an episode; its event follows in virtual time."""
        match action:
            case a.AdvanceEpisode():
                self._advance(action)
            case a.StartEpisode():
                self._start(action)
            case a.FinishEpisode():
                self._finish(action)
            case a.ForgetEpisode():
                self.plays.pop(action.trajectory, None)
            case _:
                assert_never(action)

    def episode(self, trajectory: TrajectoryId) -> RecordedEpisode:
        """The recording behind a trajectory. Its future: for oracles only."""
        if is_evaluation(trajectory.group):
            if trajectory.group not in self._evaluated:
                self._evaluated[trajectory.group] = next(self._groups)
            members = self._evaluated[trajectory.group]
            return members[trajectory.member % len(members)]
        while len(self._drawn) <= trajectory.group:
            self._drawn.append(next(self._groups))
        return self._drawn[trajectory.group][trajectory.member]

    def _start(self, action: a.StartEpisode) -> None:
        episode = self.episode(action.trajectory)
        self.plays[action.trajectory] = Play(episode)
        self._time.later(e.EpisodeStarted(action.trajectory, ids(episode.prompt)), 0.0)

    def _advance(self, action: a.AdvanceEpisode) -> None:
        play = self.plays[action.trajectory]
        turn = play.episode.turns[play.turn]
        play.turn += 1
        done = play.turn == len(play.episode.turns)
        event = e.EpisodeAdvanced(
            action.trajectory,
            ids(0 if done else turn.observation),
            returns_of(turn),
            done,
            play.episode.reward if done else None,
        )
        after_s = turn.tool_s + self._turn_s
        if done:
            self._models.ask(event, after_s)
        else:
            self._time.later(event, after_s)

    def _finish(self, action: a.FinishEpisode) -> None:
        reward = self.plays[action.trajectory].episode.reward
        event = e.EpisodeAdvanced(action.trajectory, ids(0), (), True, reward)
        self._models.ask(event, 0.0)


def returns_of(turn: Turn) -> tuple[ToolReturn, ...]:
    """What the tools of a recorded turn returned; an outcome that is not recorded counts as ok."""
    if not turn.tool:
        return ()
    outcome = turn.outcome or ToolOutcome.OK
    return (ToolReturn(turn.tool, outcome, turn.tool_s, turn.observation * CHARACTERS),)
