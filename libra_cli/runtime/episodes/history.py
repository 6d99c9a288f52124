"""What an environment was given and has answered, from which an episode is rebuilt."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from libra_cli.core.actions import AdvanceEpisode


class RecordedTurn(NamedTuple):
    """A turn that an environment was given, and the tokens of its answer; None before that."""

    turn: AdvanceEpisode
    observation_ids: array[int] | None = None


@dataclass(slots=True)
class EpisodeHistory:
    """What an environment has seen of an episode that goes on, and what it has said."""

    prompt_ids: array[int]
    turns: list[RecordedTurn] = field(default_factory=list)
    task: int | None = None
    """The number of the task, as ``StartEpisode.task`` has it."""
