"""One environment through its episode: optional members, awaited ones, and checked returns.

A session calls the members of ``envs.protocol`` by a function of its owner's, ``RunMember``, which
decides where they run: in threads of the controller, or in a worker process. Whatever goes wrong in
a member is an ``EnvironmentBroken`` that names the member.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Protocol, TypeAlias, TypeVar

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs import returns
from libra_cli.envs.agents.command import CommandEnd
from libra_cli.envs.agents.enclosed import AgentPlace, EnclosedJob
from libra_cli.envs.protocol import (
    Environment,
    Finished,
    Message,
    NextTurn,
    Reply,
    StepResult,
    Task,
    ToolCall,
    ToolFailed,
    ToolSchema,
)

_LONGEST_REASON = 2_000
"""Characters of an error that are kept: it is saved with every attempt that it ended."""
T = TypeVar("T")
Conversation: TypeAlias = Sequence[Message] | Mapping[str, Sequence[Message]]
"""All messages of an episode; with roles those of each, by its name."""


class Raised(Exception):
    """Carries what a member raised, which may be a SystemExit or a StopIteration."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {_words(error)}")
        self.error = error


class RunMember(Protocol):
    """Calls a member of an environment, and awaits what it returns if that can be awaited."""

    async def __call__(self, member: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the member returns.

        Raises:
            Raised: the member raised.
        """


@dataclass(frozen=True, slots=True)
class Opening:
    """What ``EnvironmentSession.reset`` returns: the first messages and the tools of an episode."""

    messages: list[Message]
    tools: list[ToolSchema]
    replies: bool
    """Whether the environment has ``reply``, so that a turn without a tool call may go on."""
    task: Task
    """The task of the episode: the given one, or the one that the environment made."""
    roles: Sequence[str] = ()
    """The names of its roles; empty of an environment with one conversation."""
    role: str = ""
    """The role that speaks first, and to which messages and tools belong; empty without roles."""


@dataclass(frozen=True, slots=True)
class Preparations:
    """What ``EnvironmentSession.preparations`` and ``prepare`` return."""

    tasks: list[Task] = field(default_factory=list)
    """Keys and values of the tasks for which something is to be made on this host."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What ``EnvironmentSession.step`` returns: the text for the model, reward and end."""

    text: str
    """What the model reads, cut to ``returns.LONGEST_OBSERVATION`` characters."""
    size: int
    """Characters of the text before it was cut."""
    failed: bool = False
    """Whether the tool refused the call with ToolFailed."""
    reward: float = 0.0
    done: bool = False
    seconds: float = 0.0
    """How long it took, by a monotonic clock."""
    tools: list[ToolSchema] | None = None
    """The new list of tools; None if it has not changed."""
    images: Sequence[bytes] = ()
    """PNG files that the model sees before the text."""
    role: str = ""
    """The role that speaks next, if the turn was passed on; empty: the one that called."""
    messages: list[Message] = field(default_factory=list)
    """What that role reads."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What roles have earned, by name, besides ``reward`` of the one that called."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What the user said to an answer; without messages if the episode is over."""

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = True
    tools: list[ToolSchema] | None = None
    """The list of tools of whoever speaks next; None if it has not changed."""
    role: str = ""
    """The role that reads the messages and speaks next; empty: the one that has spoken."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What roles have earned, by name, besides ``reward`` of the one that has spoken."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The score, without the rewards on the way, and the named numbers."""

    reward: float
    """The reward of the episode; with roles the mean of theirs."""
    metrics: Mapping[str, float]
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards of all roles, by name; empty without roles."""


class EnvironmentSession:
    """An environment that is made by its ``reset``. Its calls come one at a time."""

    def __init__(self, name: str, make: Callable[[], Environment], run: RunMember) -> None:
        self._name = name
        self._make = make
        self._run = run
        self._environment: Any = None
        self._roles: tuple[str, ...] = ()
        self._role = ""
        self._tools: dict[str, list[ToolSchema]] = {}
        """The tools of each role that has spoken, as it knows them."""
        self._seconds = 0.0
        self._place: AgentPlace | None = None

    async def preparations(self) -> Preparations:
        """Make the environment, and list what it would like made before anything is played.

        Raises:
            EnvironmentBroken: it does not fit its arguments, or breaks.
        """
        environment = self._environment = await self._checked("its factory", self._make)
        if not hasattr(environment, "preparations"):
            return Preparations()
        listed = await self._checked("preparations", environment.preparations)
        return Preparations(self._checks("preparations", returns.tasks, listed))

    async def prepare(self, task: Task) -> Preparations:
        """Have one of the ``preparations`` made, however long that takes; returns nothing more.

        Raises:
            EnvironmentBroken: it cannot be made.
        """
        await self._checked("prepare", self._environment.prepare, task)
        return Preparations()

    async def reset(self, task: Task | None, index: int, task_seed: int, seed: int) -> Opening:
        """Make the environment and begin the task, or its own one of this ``index``.

        Raises:
            EnvironmentBroken: it cannot be begun.
        """
        environment = self._environment = await self._checked("its factory", self._make)
        if task is None:
            task = await self._checked("task", environment.task, index, task_seed)
        raw = await self._checked("reset", environment.reset, task, seed)
        self._roles = self._checks("roles", returns.roles, getattr(environment, "roles", ()))
        messages = self._checks("reset", self._first, raw)
        tools = await self._new_tools() or []
        replies = hasattr(environment, "reply")
        return Opening(messages, tools, replies, task, self._roles, self._role)

    def _first(self, raw: object) -> list[Message]:
        """Return the messages that the episode begins with; the role that reads them speaks."""
        if not self._roles:
            return returns.messages(raw)
        turn = returns.turn(raw, self._roles)
        if turn.done:
            raise ValueError("it ended the episode before it began")
        self._role = turn.role
        return list(turn.messages)

    async def step(self, call: ToolCall) -> ToolAnswer:
        """Run one tool call.

        Raises:
            EnvironmentBroken: it did what a tool may not do.
        """
        where, failed = f"step({call.name})", False
        try:
            raw = await self._timed(self._environment.step, call)
        except Raised as raised:
            if isinstance(raised.error, Finished):
                raw = StepResult(raised.error.observation, raised.error.reward, done=True)
            elif isinstance(raised.error, ToolFailed):
                raw, failed = _words(raised.error), True
            else:
                raise self._broke(where, raised) from raised.error
        if isinstance(raw, NextTurn):
            return await self._passed_on(where, raw)
        result = self._checks(where, returns.step_result, raw)
        if self._roles and result.images:
            raise self._broke(where, "it shows images, and an environment with roles shows none")
        return ToolAnswer(
            returns.shortened(result.text),
            len(result.text),
            failed,
            result.reward,
            result.done,
            self._seconds,
            None if result.done else await self._new_tools(),
            result.images,
        )

    async def _passed_on(self, where: str, raw: NextTurn) -> ToolAnswer:
        """What a tool says that passes the turn on."""
        seconds, turn = self._seconds, self._checks(where, self._next, raw)
        return ToolAnswer(
            returns.shortened(turn.text),
            len(turn.text),
            done=turn.done,
            seconds=seconds,
            tools=None if turn.done else await self._new_tools(),
            role=turn.role,
            messages=list(turn.messages),
            rewards=turn.rewards,
        )

    def _next(self, raw: object) -> NextTurn:
        """Let the role speak that a NextTurn names."""
        turn = returns.turn(raw, self._roles, begun=self._tools)
        if not turn.done:
            self._role = turn.role
        return turn

    async def reply(self, text: str) -> Answered:
        """Let the user answer.

        Raises:
            EnvironmentBroken: it did what ``reply`` may not do.
        """
        try:
            raw = await self._timed(self._environment.reply, text)
        except Raised as raised:
            if not isinstance(raised.error, Finished):
                raise self._broke("reply", raised) from raised.error
            raw = _last_words(raised.error)
        if isinstance(raw, NextTurn):
            turn = self._checks("reply", self._next, raw)
            tools = None if turn.done else await self._new_tools()
            return Answered(list(turn.messages), 0.0, turn.done, tools, turn.role, turn.rewards)
        said = self._checks("reply", returns.reply, raw)
        if said is None:
            return Answered()
        tools = None if said.done else await self._new_tools()
        return Answered(list(said.messages), said.reward, said.done, tools)

    async def run_agent(self, told: Mapping[str, Any]) -> CommandEnd:
        """Run an ``EnclosedJob``, given by its fields, in the sandbox of the environment.

        Raises:
            EnvironmentBroken: it has none, or the agent cannot be started there.
        """
        find = getattr(self._environment, "agent_place", None)
        if not callable(find):
            raise EnvironmentBroken(
                f"environment {self._name!r} has no sandbox for an agent: it has no agent_place",
                hint="leave out agent.in_sandbox, or see libra help sandboxes",
            )
        self._place = await self._checked("agent_place", find)
        job = EnclosedJob(**told)
        end: CommandEnd = await self._checked("the agent's sandbox", job.play, self._place)
        return end

    def stop_agent(self) -> None:
        """End every process in the sandbox in which an agent was started, if one was."""
        if self._place is not None:
            self._place.sandbox.end_processes()

    async def score(self, answer: str, conversation: Conversation) -> Scored:
        """Score the episode, and read its metrics.

        Raises:
            EnvironmentBroken: there is no finite score.
        """
        score = self._environment.score
        arguments = (answer, conversation) if _takes_conversation(score) else (answer,)
        raw = await self._checked("score", score, *arguments)
        rewards: dict[str, float] = {}
        if self._roles:
            rewards = self._checks("score", partial(returns.rewards, roles=self._roles), raw)
            reward = fmean(rewards.values())
        else:
            reward = self._checks("score", returns.reward, raw)
        metrics = getattr(self._environment, "metrics", None)
        if not callable(metrics):
            return Scored(reward, {}, rewards)
        named = await self._checked("metrics", metrics)
        return Scored(reward, self._checks("metrics", returns.metrics, named), rewards)

    @property
    def close_member(self) -> Callable[[], Any] | None:
        """The environment's ``close``, if it was made and has one."""
        close = getattr(self._environment, "close", None)
        return close if callable(close) else None

    async def _timed(self, member: Callable[..., Any], *arguments: Any) -> Any:
        started = time.monotonic()
        try:
            return await self._run(member, *arguments)
        finally:
            self._seconds = time.monotonic() - started

    async def _checked(self, where: str, member: Callable[..., Any], *arguments: Any) -> Any:
        """Call a member for which any exception means that the environment broke.

        Raises:
            EnvironmentBroken: the member raised; its own EnvironmentBroken is passed on as it is.
        """
        try:
            return await self._timed(member, *arguments)
        except Raised as raised:
            if isinstance(raised.error, EnvironmentBroken):
                raise raised.error from raised.error.__cause__
            raise self._broke(where, raised) from raised.error

    def _checks(self, where: str, check: Callable[[Any], T], raw: Any) -> T:
        try:
            return check(raw)
        except Exception as error:  # a returned object can raise whatever it likes when looked at
            raise self._broke(where, _words(error)) from error

    async def _new_tools(self) -> list[ToolSchema] | None:
        """The tools of whoever speaks next, if it does not know them."""
        before, now = self._tools.get(self._role), await self._read_tools()
        self._tools[self._role] = now
        return None if now == before else now

    async def _read_tools(self) -> list[ToolSchema]:
        # A property runs code of the environment; anything else is only looked at.
        if isinstance(inspect.getattr_static(self._environment, "tools", None), property):
            raw = await self._checked("tools", lambda: self._environment.tools)
        else:
            raw = self._environment.tools
        if self._roles and isinstance(raw, Mapping):
            raw = raw.get(self._role, ())
        return self._checks("tools", returns.tools, raw)

    def _broke(self, where: str, why: object) -> EnvironmentBroken:
        return EnvironmentBroken(f"environment {self._name!r} broke in {where}: {why}")


def _words(error: BaseException) -> str:
    """What an error of other people's code says, in at most ``_LONGEST_REASON`` characters."""
    try:
        text = str(error)
    except Exception as worse:  # noqa: BLE001  its __str__ is other people's code as well
        return f"its text cannot be read ({type(worse).__name__})"
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def _last_words(finished: Finished) -> Reply:
    text = finished.observation
    messages: list[Message] = [{"role": "user", "content": text}] if text else []
    return Reply(messages, finished.reward, done=True)


def _takes_conversation(score: Callable[..., Any]) -> bool:
    """Say whether ``score`` has a parameter ``conversation``, or a second one without a default."""
    try:
        parameters = list(inspect.signature(score).parameters.values())
    except (TypeError, ValueError):
        return False
    required = [
        one
        for one in parameters
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
    ]
    return len(required) > 1 or any(one.name == "conversation" for one in parameters[1:])
