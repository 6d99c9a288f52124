"""Episodes that somebody else's agent plays, over HTTP, in place of libra's own loop.

    start      the environment gives the task, the agent begins; its first request is the prompt
    advance    the turn answers that request; the next one is what is observed, or the agent ends
    finish     a limit: the request that waits is refused, and so is all that follows, to the end
    forget     the agent is ended, with every process that it started, and its key with it

The tool return that the scheduler reads of a turn is what the agent did until its next request: it
took as long as there is between the answer and the request. A request that leaves the conversation
(``matching``) begins a branch.

The agent's own reward counts: what its function returns, or what is posted. Without one, the
environment scores the text of the last turn and its conversation. Of an agent in a sandbox the
environment always does, and the lower reward counts: what the model runs there has the agent's key,
and could post one for it. An agent that raises, ends with
another exit status than 0, is silent for ``agent.timeout_s`` or ends without a single turn has
failed, and a failure is never a reward: the trajectory is played again. Only where it was refused
something, for a limit, is its failure an end like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from libra_cli.config.errors import AgentFailed
from libra_cli.config.frozen_models import NOWHERE, ModelsAddress
from libra_cli.config.recipe import Recipe
from libra_cli.config.secrets import masker
from libra_cli.core.types import Seconds, Tokens, TrajectoryId
from libra_cli.envs.protocol import Message
from libra_cli.envs.session import Opening
from libra_cli.runtime.agents.frozen_models import AgentModels
from libra_cli.runtime.agents.play import AgentEnd, AgentPlay, Ask, PlayLimits, SaidTurn
from libra_cli.runtime.agents.runners import (
    LEAVE_S,
    AgentJob,
    AgentRunner,
    EnclosedRunner,
    runner_of,
)
from libra_cli.runtime.agents.server import AgentServer
from libra_cli.runtime.agents.tasks import AgentTasks
from libra_cli.runtime.episodes.player import TurnResult
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.episodes.workers import OpenOnNode, no_nodes


@dataclass(slots=True)
class _AgentEpisode:
    play: AgentPlay
    running: asyncio.Task[None] | None = None
    waited_s: Seconds = 0.0
    """Seconds until its agent began."""


class AgentEpisodes:
    """The agents of all trajectories in flight. It belongs to one event loop."""

    def __init__(
        self,
        recipe: Recipe,
        renderer: Renderer,
        run_dir: Path,
        *,
        note: Callable[[str], None],
        open_on: OpenOnNode = no_nodes,
        models: ModelsAddress = NOWHERE,
    ) -> None:
        """Find the environment and the agent; ``note`` tells the user something, once.

        ``open_on`` reaches the nodes of agents and of environments' workers; ``models`` is where
        the run's frozen models answer.

        Raises:
            LibraError: there is no such environment or agent.
        """
        assert recipe.agent is not None
        self._spec = recipe.agent
        self._renderer = renderer
        self._limits = PlayLimits(recipe.model.max_len, self._spec.max_branches)
        self._max_turns = recipe.rollout.max_turns
        known = [one.get_secret_value() for one in self._spec.secrets.values()]
        self._mask = masker(known)  # an agent's last words are kept in the run's database
        self.tasks = AgentTasks(recipe, run_dir, open_on)
        self._runner = self._runner_of(run_dir / "agents", open_on)
        seen = AgentModels(self._spec.served, models)
        self.server = AgentServer(recipe, self._runner, seen, run_dir, note=note)
        self._episodes: dict[TrajectoryId, _AgentEpisode] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Tasks of agents that are being ended."""

    def _runner_of(self, directory: Path, open_on: OpenOnNode) -> AgentRunner:
        if not self._spec.in_sandbox:
            return runner_of(self._spec, directory, open_on, lambda: self.server.port)
        seconds = self._spec.timeout_s * (self._max_turns + 1)
        return EnclosedRunner(
            self._spec, self.tasks.run_agent, lambda: self.server.port, timeout_s=seconds
        )

    @property
    def running(self) -> int:
        """The number of episodes that were begun and not forgotten."""
        return len(self._episodes)

    async def prepare(self, note: Callable[[str], None]) -> None:
        """Have made what environments would else make in their first episodes on each host, and
        listen for agents.

        Raises:
            EnvironmentBroken: it cannot be made.
        """
        await self.tasks.prepare(note)
        await self.server.start()

    async def check(self, seed: int) -> int:
        """Begin each first task without its agent; return the tokens of the longest prompt.

        Raises:
            LibraError: it cannot be begun.
        """
        look = self._runner.check if isinstance(self._runner, EnclosedRunner) else None
        openings = await self.tasks.check(TrajectoryId(group=-1, member=0), seed, look)
        return max(len(self._renderer.prompt(one.messages, one.tools)) for one in openings)

    def environment_of(self, trajectory: TrajectoryId) -> str:
        """The label of the environment that was begun; empty if there is only one."""
        return self.tasks.environment_of(trajectory)

    def role_of(self, trajectory: TrajectoryId) -> str:
        """Nothing: an agent has branches of its own, and plays no environment with roles."""
        return ""

    def turn_limit_of(self, trajectory: TrajectoryId) -> Tokens | None:
        """The most tokens that its agent asks the next turn to have; None: it does not say."""
        return self._episodes[trajectory].play.turn_limit

    def waited_of(self, trajectory: TrajectoryId) -> Seconds:
        """Seconds that it has waited so far for its agent or its environment to begin."""
        return self._episodes[trajectory].waited_s + self.tasks.waited_of(trajectory)

    async def start(
        self, trajectory: TrajectoryId, group: int, *, task_seed: int, seed: int
    ) -> array[int]:
        """Begin a task and its agent, and return the tokens of the agent's first prompt.

        Raises:
            LibraError: the environment or the agent failed.
        """
        play = AgentPlay(
            secrets.token_urlsafe(24),
            self.server.model,
            self._renderer,
            self._limits,
            self._spec.match,
        )
        episode = self._episodes[trajectory] = _AgentEpisode(play)
        try:
            opening = await self.tasks.reset(trajectory, group, task_seed=task_seed, seed=seed)
            _check_wanted(play)
            job = self._job(trajectory, play, opening)
            self.server.add(play)
            episode.running = asyncio.create_task(self._play(play, job))
            asked = time.monotonic()
            await play.taken.wait()
            episode.waited_s = time.monotonic() - asked
            first = await self._next(play)
            if isinstance(first, AgentEnd):
                raise _failed(play, first.error or AgentFailed("the agent ended without a turn"))
        except BaseException:  # a cancellation too: what was begun must be ended
            self.forget(trajectory)
            raise
        return first.tokens

    def _job(self, trajectory: TrajectoryId, play: AgentPlay, opening: Opening) -> AgentJob:
        task = {
            "data": opening.task,
            "messages": [_plain(message) for message in opening.messages],
            "tools": opening.tools,
        }
        url = f"{self.server.url}/t/{play.key}"
        return AgentJob(str(trajectory), task, url, play.key, play.model, self._spec.served)

    async def _play(self, play: AgentPlay, job: AgentJob) -> None:
        try:
            reward = await self._runner.run(job, play.taken)
        except AgentFailed as error:
            play.end(AgentEnd(error=AgentFailed(self._mask(str(error)), hint=error.hint)))
        except Exception as error:  # noqa: BLE001  nobody would be told; no more threads is one
            why = self._mask(f"the agent cannot be run: {error}")
            play.end(AgentEnd(error=AgentFailed(why)))
        else:
            play.end(AgentEnd(reward))

    async def _next(self, play: AgentPlay) -> Ask | AgentEnd:
        """What the agent does next.

        Raises:
            AgentFailed: it is silent for too long, or nobody wants to know any more.
        """
        await play.taken.wait()
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                event = await play.inbox.get()
        except TimeoutError:
            raise AgentFailed(
                f"the agent neither asked nor ended for {self._spec.timeout_s:g} s after turn "
                f"{play.turns}",
                hint="raise agent.timeout_s if it is slow",
            ) from None
        _check_wanted(play)
        return event

    async def advance(
        self,
        trajectory: TrajectoryId,
        generated_ids: array[int],
        finish_reason: str,
        logprobs: Sequence[float] = (),
    ) -> TurnResult:
        """Answer the agent with a generated turn, and return what it does next.

        Raises:
            LibraError: the agent failed, or the environment did in scoring.
        """
        play = self._episodes[trajectory].play
        play.said(SaidTurn(generated_ids, logprobs, finish_reason))
        answered = time.monotonic()
        event = await self._next(play)
        if isinstance(event, AgentEnd):
            return await self._ended(trajectory, play, event)
        returns = play.returned(event, time.monotonic() - answered)
        return TurnResult(event.tokens, returns, done=False, reward=None, branch=event.branch)

    async def finish(self, trajectory: TrajectoryId) -> TurnResult:
        """Refuse the agent everything until it ends, since a limit is reached.

        Raises:
            EnvironmentBroken: the environment failed in scoring.
        """
        play = self._episodes[trajectory].play
        play.limit(
            f"this trajectory is over: it has {play.turns} turns, and rollout.max_turns of the "
            f"recipe is {self._max_turns}"
        )
        end: Ask | AgentEnd = AgentEnd()
        with contextlib.suppress(AgentFailed):  # it goes on by itself, and nobody waits for it
            end = await self._next(play)
        assert isinstance(end, AgentEnd), "a request passed the limit"
        return await self._ended(trajectory, play, end)

    async def _ended(self, trajectory: TrajectoryId, play: AgentPlay, end: AgentEnd) -> TurnResult:
        _check_wanted(play)  # the environment is closed with it
        if end.error is not None and not play.limited:
            raise _failed(play, end.error)
        told = play.reward if end.reward is None else end.reward
        if told is not None and not isfinite(told):
            raise AgentFailed(f"the agent's reward is {told}")
        if told is not None and not self._spec.in_sandbox:
            return TurnResult(array("i"), (), done=True, reward=told)
        scored = await self.tasks.score(trajectory, play.text, play.conversation)
        reward = scored.reward if told is None else min(told, scored.reward)
        return TurnResult(array("i"), (), done=True, reward=reward, metrics=scored.metrics)

    def forget(self, trajectory: TrajectoryId) -> None:
        """End the agent, if there is one, and close the environment."""
        episode = self._episodes.pop(trajectory, None)
        if episode is not None:
            self.server.remove(episode.play)
            episode.play.close()
            if episode.running is not None:
                self._leaving.add(episode.running)
                episode.running.add_done_callback(self._leaving.discard)
                episode.running.cancel()
        self.tasks.forget(trajectory)

    async def close(self) -> None:
        """End all agents, which have ``LEAVE_S`` seconds to go, then the server and the runner."""
        for trajectory in list(self._episodes):
            self.forget(trajectory)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=LEAVE_S)
        await self.server.close()
        await self._runner.close()
        await self.tasks.close()


def _check_wanted(play: AgentPlay) -> None:
    if play.forgotten:
        raise AgentFailed("the trajectory was given up")


def _failed(play: AgentPlay, error: AgentFailed) -> AgentFailed:
    """The error, with what the agent was refused last, since that may be why."""
    if not play.refusal:
        return error
    return AgentFailed(f"{error}; it was refused: {play.refusal}", hint=error.hint)


def _plain(message: Message) -> dict[str, Any]:
    """Return a message in the form of Chat Completions."""
    plain: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for number, call in enumerate(calls)
        ]
    return plain
