"""Plays what is trained and what is evaluated, each by a player of its own.

The player of an evaluation counts its tasks from 0 and draws them by the evaluation's seed, so that
they are the same at every evaluation, and others than those that are trained on.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from libra_cli.config.errors import RecipeError
from libra_cli.config.recipe import Recipe
from libra_cli.core.evaluation.groups import evaluated_task
from libra_cli.core.types import GroupId, Seconds, Tokens, TrajectoryId, is_evaluation
from libra_cli.runtime.agents.episodes import AgentEpisodes
from libra_cli.runtime.agents.tasks import AgentTasks
from libra_cli.runtime.episodes.performer import EpisodePlayer
from libra_cli.runtime.episodes.places import EnvironmentSources
from libra_cli.runtime.episodes.player import Episodes, TurnResult
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.episodes.workers import OpenOnNode, no_nodes
from libra_cli.runtime.rollout.connection import Sampling
from libra_cli.runtime.store.images import ImageStore


def evaluation_players(
    recipe: Recipe,
    trained: EpisodePlayer,
    renderer: Renderer,
    *,
    run_directory: Path | None = None,
    images: ImageStore | None = None,
    open_on: OpenOnNode = no_nodes,
) -> list[EpisodePlayer]:
    """Make the player of each evaluation; agents play all, in environments of their own.

    Raises:
        LibraError: an environment cannot be found, its tasks cannot be read, or there are too few.
    """
    if isinstance(trained, AgentEpisodes):
        own = {
            entry: EnvironmentSources(*recipe.environments_of(entry), run_directory, open_on)
            for entry, spec in enumerate(recipe.evaluation)
            if spec.tasks or spec.environment is not None
        }
        for entry, sources in own.items():
            asked = recipe.evaluation[entry].num_tasks
            _check_count(recipe.evaluation_names[entry], asked, sources.num_tasks)
        _give_tasks(trained.tasks, own)
        return [trained] * len(recipe.evaluation)
    players: list[EpisodePlayer] = []
    for entry, name in enumerate(recipe.evaluation_names):
        environments, labels = recipe.environments_of(entry)
        player = Episodes(
            environments,
            labels,
            renderer,
            run_directory=run_directory,
            images=images,
            open_on=open_on,
        )
        _check_count(name, recipe.evaluation[entry].num_tasks, player.num_tasks)
        players.append(player)
    return players


def _give_tasks(tasks: AgentTasks, own: Mapping[int, EnvironmentSources]) -> None:
    """Give agents the tasks of evaluations that have an environment of their own, by entry."""

    def of(trajectory: TrajectoryId) -> EnvironmentSources | None:
        is_other = is_evaluation(trajectory.group)
        return own.get(evaluated_task(trajectory.group).entry) if is_other else None

    tasks.give_others(own.values(), of)


def _check_count(name: str, asked: int, known: int | None) -> None:
    """Refuse an evaluation that asks for more tasks than its files have."""
    if known is not None and known < asked:
        raise RecipeError(
            f"evaluation {name}: its files have {known} tasks, and num_tasks is {asked}",
            hint=f"in evaluation: num_tasks: {known}",
        )


class EvaluatedEpisodes:
    """All episodes of a run: those it trains on, and those of its evaluations."""

    def __init__(
        self, recipe: Recipe, trained: EpisodePlayer, evaluated: Sequence[EpisodePlayer]
    ) -> None:
        """``evaluated`` has the player of each of the recipe's evaluations."""
        self._seeds = [spec.seed for spec in recipe.evaluation]
        self._names = recipe.evaluation_names
        self._trained = trained
        self._evaluated = list(evaluated)

    def _player(self, trajectory: TrajectoryId) -> EpisodePlayer:
        if not is_evaluation(trajectory.group):
            return self._trained
        return self._evaluated[evaluated_task(trajectory.group).entry]

    @property
    def _players(self) -> list[EpisodePlayer]:
        others = [one for one in self._evaluated if one is not self._trained]
        return [self._trained, *others]

    async def prepare(self, note: Callable[[str], None]) -> None:
        """Have made what environments would else make in their first episodes on each host.

        Raises:
            EnvironmentBroken: it cannot be made.
        """
        for player in self._players:
            await player.prepare(note)

    async def check(self, seed: int) -> int:
        """Begin each first task, forget it, and return the tokens of the longest prompt.

        Raises:
            LibraError: one cannot be begun.
        """
        return max([await player.check(seed) for player in self._players])

    def environment_of(self, trajectory: TrajectoryId) -> str:
        """The label of the environment that was begun; of an evaluation, its name."""
        if is_evaluation(trajectory.group):
            return self._names[evaluated_task(trajectory.group).entry]
        return self._trained.environment_of(trajectory)

    def role_of(self, trajectory: TrajectoryId) -> str:
        """The role of the environment that speaks first; empty if it has none."""
        return self._player(trajectory).role_of(trajectory)

    def turn_limit_of(self, trajectory: TrajectoryId) -> Tokens | None:
        """The most tokens that its agent asks the next turn to have; None: it does not say."""
        return self._player(trajectory).turn_limit_of(trajectory)

    def waited_of(self, trajectory: TrajectoryId) -> Seconds:
        """Seconds that it has waited so far for a place to be played at."""
        return self._player(trajectory).waited_of(trajectory)

    async def start(
        self, trajectory: TrajectoryId, group: int, *, task_seed: int, seed: int
    ) -> array[int]:
        """Begin the task of a group, and return the tokens of the prompt.

        Raises:
            LibraError: it cannot be begun.
        """
        if is_evaluation(group):
            task = evaluated_task(group)
            group, task_seed = task.task, self._seeds[task.entry]
        return await self._player(trajectory).start(
            trajectory, group, task_seed=task_seed, seed=seed
        )

    async def advance(
        self,
        trajectory: TrajectoryId,
        generated_ids: array[int],
        finish_reason: str,
        logprobs: Sequence[float] = (),
    ) -> TurnResult:
        """Return what follows a generated turn.

        Raises:
            LibraError: the environment or the agent failed.
        """
        player = self._player(trajectory)
        return await player.advance(trajectory, generated_ids, finish_reason, logprobs)

    async def finish(self, trajectory: TrajectoryId) -> TurnResult:
        """Score what there is, since a limit is reached.

        Raises:
            LibraError: the environment or the agent failed.
        """
        return await self._player(trajectory).finish(trajectory)

    def forget(self, trajectory: TrajectoryId) -> None:
        self._player(trajectory).forget(trajectory)

    async def close(self) -> None:
        """Forget all episodes and end whatever they shared."""
        await asyncio.gather(*(player.close() for player in self._players))


class SamplingOf:
    """How the turns of a group are sampled: as the run's, or as its evaluation's."""

    def __init__(self, recipe: Recipe, stop_token_ids: tuple[int, ...], *, vocabulary: int) -> None:
        """Read the recipe's sampling; token ids are below ``vocabulary``."""

        def sampling(temperature: float, top_p: float) -> Sampling:
            return Sampling(temperature, top_p, stop_token_ids, vocabulary=vocabulary)

        self._trained = sampling(recipe.rollout.temperature, recipe.rollout.top_p)
        self._evaluated = [sampling(one.temperature, one.top_p) for one in recipe.evaluation]

    def __call__(self, group: GroupId) -> Sampling:
        if not is_evaluation(group):
            return self._trained
        return self._evaluated[evaluated_task(group).entry]
