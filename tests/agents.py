"""Agents of tests, and a stand-in for the machine that plays their trajectories.

``FakeMachine`` is what the machine is to ``AgentEpisodes``: it begins trajectories, answers each
request with the next scripted turn, and keeps the tokens by the core's own rules, so that a prompt
which is not the exact continuation of a branch fails the test.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from libra_cli.config.frozen_models import NOWHERE, ModelsAddress
from libra_cli.config.recipe import Recipe
from libra_cli.core.events import TurnGenerated
from libra_cli.core.rollout.turns import append_turn, extend_masked, go_on_at
from libra_cli.core.types import (
    ToolReturn,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    WeightVersion,
)
from libra_cli.runtime.agents.episodes import AgentEpisodes
from libra_cli.runtime.episodes.player import TurnResult
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.hosts.transport import ByteStream

DEADLINE_S = 60.0
"""Far more than anything takes; a test that needs it has failed."""
KEY = WeightVersion(1, 0)


def recipe(agent: dict[str, Any], **changes: Any) -> Recipe:
    """A recipe with this agent, for pointer-chase."""
    base: dict[str, Any] = {
        "run": {"name": "agents"},
        "nodes": [{"host": "a", "slots": 2, "pool": ["rollout", "train"]}],
        "model": {"path": "/models/small", "max_len": 512},
        "environment": {"name": "pointer-chase", "args": {"failure_rate": 0.0}},
        "rollout": {"max_turns": 8, "max_turn_tokens": 32},
        "agent": agent,
    }
    for section, values in changes.items():
        merge = isinstance(values, dict)
        base[section] = {**base.get(section, {}), **values} if merge else values
    return Recipe.model_validate(base)


@dataclass
class FakeMachine:
    """Plays one trajectory at a time."""

    episodes: AgentEpisodes
    renderer: Renderer
    max_turns: int = 8
    turn_s: float = 0.0
    """How long every turn takes."""
    finish_reason: str = "stop"
    """Of every turn."""
    notes: list[str] = field(default_factory=list)
    """What the user was told."""
    returns: list[ToolReturn] = field(default_factory=list)
    limits: list[int | None] = field(default_factory=list)
    """The most tokens that the agent asked each turn to have."""
    trajectory: Trajectory = field(init=False)

    async def play(self, turns: Iterable[str], *, member: int = 0) -> TurnResult:
        """Begin a trajectory and answer its requests with these turns, until it is done."""
        who = TrajectoryId(0, member)
        self.trajectory = trajectory = Trajectory(who)
        try:
            prompt = await self.episodes.start(who, 0, task_seed=0, seed=member)
            self._observe(prompt)
            for text in turns:
                self.limits.append(self.episodes.turn_limit_of(who))
                said = array("i", [*self.renderer.encode(text), self.renderer.end_of_turn])
                self._say(said)
                await asyncio.sleep(self.turn_s)
                logprobs = array("f", [-0.5] * len(said))
                result = await self.episodes.advance(who, said, self.finish_reason, logprobs)
                self.returns += result.returns
                if not result.done and trajectory.turns >= self.max_turns:
                    result = await self.episodes.finish(who)
                if result.done:
                    return result
                if result.branch is not None:
                    go_on_at(trajectory, result.branch)
                self._observe(result.observation_ids)
            raise AssertionError("the agent asked for more turns than the test has")
        finally:
            self.episodes.forget(who)

    def _observe(self, tokens: array[int]) -> None:
        self.trajectory.token_ids.extend(tokens)
        extend_masked(self.trajectory, len(tokens))

    def _say(self, tokens: array[int]) -> None:
        turn = TurnGenerated(
            request=1,
            trajectory=self.trajectory.id,
            slot="a/0",
            incarnation=0,
            prompt_ids=self.trajectory.token_ids[:],
            token_ids=tokens,
            logprobs=array("f", [-0.5] * len(tokens)),
            spans=(VersionSpan(0, 0, len(tokens)),),
            newest=KEY,
            cache_key=KEY,
            finish_reason="stop",
            started_at=0.0,
        )
        append_turn(self.trajectory, turn)
        self.trajectory.turns += 1

    @property
    def texts(self) -> list[str]:
        """The text of each branch."""
        return [self.renderer.decode(branch.token_ids) for branch in self.trajectory.branches]


async def open_here(node: str, process: str, module: str) -> ByteStream:
    """A module of ours on a node that is this machine."""
    return await LocalTransport().open_stream([sys.executable, "-m", module])


def fake_machine(
    agent: dict[str, Any],
    renderer: Renderer,
    run_dir: Path,
    address: ModelsAddress = NOWHERE,
    **changes: Any,
) -> FakeMachine:
    """The fake machine of a recipe with this agent; its frozen models answer at ``address``."""
    made = recipe(agent, **changes)
    notes: list[str] = []
    episodes = AgentEpisodes(
        made, renderer, run_dir, note=notes.append, open_on=open_here, models=address
    )
    return FakeMachine(episodes, renderer, made.rollout.max_turns, notes=notes)


@dataclass
class Chat:
    """A conversation over Chat Completions, by plain HTTP."""

    base_url: str
    api_key: str
    messages: list[dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)

    async def ask(self, **changes: Any) -> dict[str, Any]:
        """One request; its reply joins the conversation."""
        answer = await post(
            f"{self.base_url}/chat/completions",
            {"model": "m", "messages": self.messages, **self.extra, **changes},
            key=self.api_key,
        )
        message: dict[str, Any] = answer["choices"][0]["message"]
        self.messages.append(message)
        return message


class Refused(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status} {text}")
        self.status = status
        self.headers = headers


async def post(url: str, body: Any, *, key: str = "", **headers: str) -> dict[str, Any]:
    """The JSON that answers a request. Raises Refused."""
    bearer = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers={**bearer, **headers}) as response,
    ):
        text = await response.text()
        if response.status != 200:
            raise Refused(response.status, text, response.headers)
        answer: dict[str, Any] = await response.json()
        return answer
