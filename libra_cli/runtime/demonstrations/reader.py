"""Reads the demonstrations of a run: in place of an environment, and of the servers.

Which conversation a group gets follows from its number and ``run.seed``, as tasks do
(``runtime.tasks.mixture``), so that a run that goes on has those that are left. A conversation that
cannot be rendered is dropped and told, as a group whose environment breaks is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from libra_cli.config.environment import TaskSourceSpec
from libra_cli.config.errors import LibraError
from libra_cli.core.actions import EpisodeAction, StartEpisode
from libra_cli.core.events import DemonstrationRead, EpisodeFailed, Event
from libra_cli.core.types import TrajectoryId
from libra_cli.runtime.demonstrations.conversations import read_conversation
from libra_cli.runtime.demonstrations.tokens import render_conversation
from libra_cli.runtime.tasks.mixture import Tasks

if TYPE_CHECKING:
    from libra_cli.runtime.episodes.renderer import Renderer


def check_demonstrations(sources: Sequence[TaskSourceSpec]) -> int:
    """Read every row as a conversation, and return their number.

    Raises:
        LibraError: a file cannot be read, or a row is no conversation.
    """
    rows = Tasks(sources)
    for number, row in enumerate(rows.every(), 1):
        try:
            read_conversation(row)
        except LibraError as error:
            files = ", ".join(source.path for source in sources)
            raise LibraError(f"{files}: conversation {number}: {error}", hint=error.hint) from error
    return len(rows)


class Demonstrations:
    """The demonstrations of a run, one a trajectory."""

    def __init__(
        self, sources: Sequence[TaskSourceSpec], renderer: Renderer, *, seed: int, max_len: int
    ) -> None:
        """Read the files; ``max_len`` is in tokens.

        Raises:
            EnvironmentBroken: a file cannot be read.
        """
        self._rows = Tasks(sources)
        self._renderer = renderer
        self._seed = seed
        self._max_len = max_len

    async def perform(self, action: EpisodeAction) -> Event | None:
        """Read a conversation; of other actions there is nothing to do."""
        if not isinstance(action, StartEpisode):
            return None
        try:
            return self.read(action.trajectory)
        except LibraError as error:
            return EpisodeFailed(action.trajectory, f"the demonstration cannot be used: {error}")

    def read(self, trajectory: TrajectoryId) -> DemonstrationRead:
        """Read that of a group.

        Raises:
            LibraError: it is no conversation, or the template cannot render it.
        """
        row = self._rows.at(trajectory.group, self._seed)
        rendered = render_conversation(
            self._renderer, read_conversation(row), max_len=self._max_len
        )
        return DemonstrationRead(trajectory, rendered.token_ids, rendered.loss_mask, rendered.turns)
