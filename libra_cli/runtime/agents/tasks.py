"""Gives agents their tasks from the recipe's environments, which may also score the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.config.recipe import Recipe
from libra_cli.core.types import Seconds, TrajectoryId
from libra_cli.envs.agents.command import CommandEnd
from libra_cli.envs.agents.enclosed import EnclosedJob
from libra_cli.envs.protocol import Message
from libra_cli.envs.session import Opening, Scored
from libra_cli.runtime.episodes.calls import CallLine
from libra_cli.runtime.episodes.places import (
    EnvironmentSource,
    EnvironmentSources,
    EpisodeEnvironment,
)
from libra_cli.runtime.episodes.workers import OpenOnNode, no_nodes


@dataclass(frozen=True, slots=True)
class _AgentTask:
    source: EnvironmentSource
    environment: EpisodeEnvironment
    line: CallLine


class AgentTasks:
    """The environments of all trajectories in play: each gives the task and may score the end."""

    def __init__(self, recipe: Recipe, run_directory: Path, open_on: OpenOnNode = no_nodes) -> None:
        """Find the environments and read the tasks.

        Raises:
            EnvironmentBroken: there is no such environment, or the tasks cannot be read.
        """
        self._trained = EnvironmentSources(
            recipe.environment, recipe.environment_labels, run_directory, open_on
        )
        self._sources = list(self._trained)
        self._others_of: Callable[[TrajectoryId], EnvironmentSources | None] = lambda _: None
        self._tasks: dict[TrajectoryId, _AgentTask] = {}

    def give_others(
        self,
        others: Iterable[EnvironmentSources],
        of: Callable[[TrajectoryId], EnvironmentSources | None],
    ) -> None:
        """Give some trajectories tasks of ``others``; ``of`` returns whose, or None for the run's
        own."""
        self._sources += [source for one in others for source in one]
        self._others_of = of

    async def prepare(self, note: Callable[[str], None]) -> None:
        """Have made what environments would else make in their first episodes on each host.

        Raises:
            EnvironmentBroken: it cannot be made.
        """
        for source in self._sources:
            await source.prepare(note)

    async def check(
        self, probe: TrajectoryId, seed: int, look: Callable[[str], Awaitable[None]] | None = None
    ) -> list[Opening]:
        """Begin and forget the first task of each environment; ``look`` at it, by its name.

        Raises:
            EnvironmentBroken: one cannot be begun.
            AgentFailed: ``look`` says that an agent cannot.
        """
        openings = []
        for source in self._sources:
            try:
                openings.append(await self._reset(probe, source, 0, seed, seed))
                if look is not None:
                    await look(str(probe))
            finally:
                self.forget(probe)
        return openings

    def environment_of(self, trajectory: TrajectoryId) -> str:
        """The label of the environment that was begun; empty if the run trains on only one."""
        return self._tasks[trajectory].source.label if len(self._trained) > 1 else ""

    def waited_of(self, trajectory: TrajectoryId) -> Seconds:
        """Seconds that the trajectory has waited so far for calls of its environment to begin."""
        return self._tasks[trajectory].line.waited_s

    async def reset(
        self, trajectory: TrajectoryId, group: int, *, task_seed: int, seed: int
    ) -> Opening:
        """Make an environment and begin the group's task.

        ``group`` counts those that take tasks of the same environments, from 0.

        Raises:
            EnvironmentBroken: it cannot be begun.
        """
        source, index = (self._others_of(trajectory) or self._trained).of(group)
        return await self._reset(trajectory, source, index, task_seed, seed)

    async def _reset(
        self,
        trajectory: TrajectoryId,
        source: EnvironmentSource,
        index: int,
        task_seed: int,
        seed: int,
    ) -> Opening:
        row = source.task(index, task_seed)
        line = CallLine()
        environment = await source.begin(line)
        task = self._tasks[trajectory] = _AgentTask(source, environment, line)
        opening = await source.run(
            task.line, "reset", lambda: environment.reset(row, index, task_seed, seed)
        )
        if opening.roles:
            raise EnvironmentBroken(
                f"environment {source.name!r} has the roles {', '.join(opening.roles)}, and an "
                "agent plays none",
                hint="leave out agent: the policy then plays all of them (libra help multi-agent)",
            )
        return opening

    async def run_agent(self, trajectory: str, job: EnclosedJob) -> CommandEnd:
        """Run an agent in the sandbox of the task of a trajectory, given by its name.

        It goes on if this is cancelled, until the trajectory is forgotten.

        Raises:
            EnvironmentBroken: there is no such sandbox, or the agent cannot be started in it.
        """
        task = next(one for known, one in self._tasks.items() if str(known) == trajectory)
        return await task.source.calls.run_on(task.line, lambda: task.environment.run_agent(job))

    async def score(
        self, trajectory: TrajectoryId, answer: str, conversation: Sequence[Message]
    ) -> Scored:
        """Have the trajectory's environment score the agent's last answer.

        Raises:
            EnvironmentBroken: it failed.
        """
        task = self._tasks[trajectory]
        environment = task.environment
        return await task.source.run(
            task.line, "score", lambda: environment.score(answer, conversation)
        )

    def forget(self, trajectory: TrajectoryId) -> None:
        """Close the trajectory's environment; nothing happens if it has none."""
        task = self._tasks.pop(trajectory, None)
        if task is not None:
            task.environment.close(task.line)

    async def close(self) -> None:
        """Close what is left, and whatever the environments shared."""
        for trajectory in list(self._tasks):
            self.forget(trajectory)
        for source in self._sources:
            await source.close()
