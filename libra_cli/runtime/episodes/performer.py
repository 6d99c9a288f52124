"""Carries out what the machine wants of the environments; their failures become events.

Episodes that an earlier controller has begun are rebuilt when they are needed: reset with the same
seed, and given the turns they were given. Where an environment says something else than it said
then, the trajectory is played anew from its prompt, which costs it nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, assert_never

from libra_cli.config.errors import LibraError
from libra_cli.core.actions import (
    AdvanceEpisode,
    EpisodeAction,
    FinishEpisode,
    ForgetEpisode,
    StartEpisode,
)
from libra_cli.core.events import EpisodeAdvanced, EpisodeFailed, EpisodeStarted, Event
from libra_cli.core.types import Seconds, Tokens, TrajectoryId
from libra_cli.runtime.episodes.history import EpisodeHistory
from libra_cli.runtime.episodes.player import TurnResult


class EpisodePlayer(Protocol):
    """Plays the episodes of all trajectories in flight; each is a LibraError if it fails."""

    async def prepare(self, note: Callable[[str], None]) -> None:
        """Have made what episodes would else make first on each host, and tell how far it is."""

    async def check(self, seed: int) -> int:
        """Begin the first task, forget it, and return the length of its prompt in tokens."""

    async def start(
        self, trajectory: TrajectoryId, group: int, *, task_seed: int, seed: int
    ) -> array[int]:
        """Begin a task, and return the tokens of the prompt."""

    def environment_of(self, trajectory: TrajectoryId) -> str:
        """The label of the environment that was begun; empty if there is only one."""

    def role_of(self, trajectory: TrajectoryId) -> str:
        """The role of the environment that speaks first; empty if it has none."""

    def turn_limit_of(self, trajectory: TrajectoryId) -> Tokens | None:
        """The most tokens that its agent asks the next turn to have; None: it does not say."""

    def waited_of(self, trajectory: TrajectoryId) -> Seconds:
        """Seconds that it has waited so far for a place to be played at."""

    async def advance(
        self,
        trajectory: TrajectoryId,
        generated_ids: array[int],
        finish_reason: str,
        logprobs: Sequence[float] = (),
    ) -> TurnResult:
        """Take in a generated turn, and return what the environment answers, or the end."""

    async def finish(self, trajectory: TrajectoryId) -> TurnResult:
        """Score the episode as it is, since a limit is reached."""

    def forget(self, trajectory: TrajectoryId) -> None:
        """Drop the trajectory's episode; nothing happens if it has none."""

    async def close(self) -> None:
        """Forget all episodes and end whatever they shared."""


class _Forgotten(Exception):
    """An episode was forgotten while its environment worked."""


class _Different(LibraError):
    """An environment that was rebuilt says something else than it did."""


class EpisodePerformer:
    """The episodes of a run, one a trajectory."""

    def __init__(
        self,
        episodes: EpisodePlayer,
        *,
        run_seed: int,
        histories: Mapping[TrajectoryId, EpisodeHistory] | None = None,
    ) -> None:
        """``histories`` are of the episodes that an earlier controller has begun."""
        self._episodes = episodes
        self._histories = dict(histories or {})
        self._run_seed = run_seed
        self._asked: set[TrajectoryId] = set()
        """Episodes that are being begun or advanced, and were not forgotten meanwhile."""

    async def perform(self, action: EpisodeAction) -> Event | None:
        """Carry out one action. Never raises for what an environment may do."""
        try:
            return await self._perform(action)
        except _Forgotten:
            return None
        except _Different as error:
            self._episodes.forget(action.trajectory)
            return EpisodeFailed(action.trajectory, str(error), counts=False)
        except LibraError as error:
            return EpisodeFailed(action.trajectory, str(error))

    async def _perform(self, action: EpisodeAction) -> Event | None:
        trajectory = action.trajectory
        if isinstance(action, (AdvanceEpisode, FinishEpisode)):
            await self._rebuild(trajectory)
        match action:
            case StartEpisode():
                return await self._start(trajectory, action.task)
            case AdvanceEpisode():
                answer = self._episodes.advance(
                    trajectory, action.token_ids, action.finish_reason, action.logprobs
                )
                return self._advanced(trajectory, await self._answered(trajectory, answer))
            case FinishEpisode():
                answer = self._episodes.finish(trajectory)
                return self._advanced(trajectory, await self._answered(trajectory, answer))
            case ForgetEpisode():
                self._asked.discard(trajectory)
                self._histories.pop(trajectory, None)
                self._episodes.forget(trajectory)
                return None
            case _:
                assert_never(action)

    async def _rebuild(self, trajectory: TrajectoryId) -> None:
        """Bring the environment to where it was; raises LibraError."""
        history = self._histories.pop(trajectory, None)
        if history is None:
            return
        prompt_ids = await self._begin(trajectory, history.task)
        if prompt_ids is None:
            raise _Forgotten
        if prompt_ids != history.prompt_ids:
            raise _Different("its environment does not begin as it did for an earlier controller")
        for turn, said in history.turns:
            if said is None:
                return
            answering = self._episodes.advance(
                trajectory, turn.token_ids, turn.finish_reason, turn.logprobs
            )
            answer = await self._answered(trajectory, answering)
            if answer.done or answer.observation_ids != said:
                raise _Different("its environment does not answer as it did before")

    async def _start(self, trajectory: TrajectoryId, task: int | None) -> Event | None:
        self._histories.pop(trajectory, None)
        prompt_ids = await self._begin(trajectory, task)
        if prompt_ids is None:
            return None
        environment = self._episodes.environment_of(trajectory)
        role = self._episodes.role_of(trajectory)
        limit = self._episodes.turn_limit_of(trajectory)
        waited_s = self._episodes.waited_of(trajectory)
        return EpisodeStarted(trajectory, prompt_ids, environment, role, limit, waited_s)

    async def _begin(self, trajectory: TrajectoryId, task: int | None) -> array[int] | None:
        """Begin an episode, and return its prompt's tokens; None if it was forgotten meanwhile."""
        self._asked.add(trajectory)
        seed = episode_seed(self._run_seed, trajectory)
        place = trajectory.group if task is None else task
        try:
            prompt_ids = await self._episodes.start(
                trajectory, place, task_seed=self._run_seed, seed=seed
            )
            if trajectory in self._asked:
                return prompt_ids
            self._episodes.forget(trajectory)  # what was not there yet when it was forgotten
            return None
        finally:
            self._asked.discard(trajectory)

    async def _answered(
        self, trajectory: TrajectoryId, answering: Awaitable[TurnResult]
    ) -> TurnResult:
        """Return an episode's answer; raises _Forgotten if the episode was forgotten meanwhile."""
        self._asked.add(trajectory)
        try:
            answer = await answering
            if trajectory not in self._asked:
                raise _Forgotten
            return answer
        finally:
            self._asked.discard(trajectory)

    def _advanced(self, trajectory: TrajectoryId, answer: TurnResult) -> EpisodeAdvanced:
        return EpisodeAdvanced(
            trajectory,
            answer.observation_ids,
            answer.returns,
            answer.done,
            answer.reward,
            answer.metrics,
            answer.branch,
            answer.turn_reward,
            answer.role,
            answer.rewards,
            None if answer.done else self._episodes.turn_limit_of(trajectory),
            self._episodes.waited_of(trajectory),
        )


def episode_seed(run_seed: int, trajectory: TrajectoryId) -> int:
    """A seed of its own for each trajectory, the same in every run of this seed."""
    digest = hashlib.blake2b(f"{run_seed} {trajectory}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
