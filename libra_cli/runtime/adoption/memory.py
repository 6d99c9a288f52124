"""What only the controller knows beside its machine: what it has asked, and what was played.

The same object is fed while a run goes on and while one is replayed, by the same events and
actions, so that both end up with the same.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from libra_cli.core.actions import AdvanceEpisode, ForgetEpisode, RuntimeAction, StartEpisode
from libra_cli.core.events import EpisodeAdvanced, EpisodeStarted, Event
from libra_cli.core.types import Seconds, TrajectoryId
from libra_cli.runtime.episodes.history import EpisodeHistory, RecordedTurn


@dataclass(frozen=True, slots=True)
class AskedAction:
    """An action that was given out ``at`` a time and has not ended yet."""

    at: Seconds
    action: RuntimeAction


@dataclass(slots=True)
class RunMemory:
    """What was asked for and played; actions are numbered from 1 as the machine gives them out."""

    number: int = 0
    asked: dict[int, AskedAction] = field(default_factory=dict)
    episodes: dict[TrajectoryId, EpisodeHistory] = field(default_factory=dict)

    def ask(self, action: RuntimeAction, *, now: Seconds) -> int:
        """Remember an action that the machine wants carried out, and return its number."""
        self.number += 1
        self.asked[self.number] = AskedAction(now, action)
        if isinstance(action, StartEpisode):
            self.episodes[action.trajectory] = EpisodeHistory(array("i"), task=action.task)
        elif isinstance(action, AdvanceEpisode):
            history = self.episodes.get(action.trajectory)
            if history is not None:
                history.turns.append(RecordedTurn(action))
        elif isinstance(action, ForgetEpisode):
            self.episodes.pop(action.trajectory, None)
        return self.number

    def action(self, number: int) -> RuntimeAction | None:
        """The action of that number, if it has not ended."""
        asked = self.asked.get(number)
        return asked.action if asked is not None else None

    def happened(self, event: Event | None, number: int) -> None:
        """An event is about to be handled; that action, if any, has ended in it, or in none."""
        self.asked.pop(number, None)
        if not isinstance(event, EpisodeStarted | EpisodeAdvanced):
            return
        history = self.episodes.get(event.trajectory)
        if history is None:  # it was forgotten meanwhile
            return
        if isinstance(event, EpisodeStarted):
            history.prompt_ids = event.prompt_ids
        elif not event.done and history.turns:
            last = history.turns[-1].turn
            history.turns[-1] = RecordedTurn(last, event.observation_ids)
