"""Environments in worker processes: the controller's side of ``envs.workers``.

An environment's fork server is started with its first episode, on the controller or on each of the
nodes that the recipe names, and anew if it has ended since. It is reached over its stdin and
stdout, by pipes or by SSH, and ends when they do; its workers are its own, and end with it. A new
episode goes where the fewest are, among those that hold one more; where none does it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import index as index_of
from typing import Any, Protocol, TypeAlias

from libra_cli.config.errors import EnvironmentBroken, HostError
from libra_cli.config.frozen_models import arguments_at, endpoint_in
from libra_cli.envs import returns
from libra_cli.envs.agents.command import CommandEnd
from libra_cli.envs.agents.enclosed import EnclosedJob
from libra_cli.envs.protocol import Message, StepResult, Task, ToolCall, ToolSchema
from libra_cli.envs.session import (
    Answered,
    Conversation,
    Opening,
    Preparations,
    Scored,
    ToolAnswer,
)
from libra_cli.envs.workers import wire
from libra_cli.envs.workers.wire import Frames, Kind
from libra_cli.runtime.episodes.calls import CallLine
from libra_cli.runtime.episodes.models_port import MODULE as MODELS_PORT
from libra_cli.runtime.episodes.models_port import ModelsPort
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.hosts.transport import ByteStream
from libra_cli.runtime.processes.outbox import Outbox
from libra_cli.runtime.supervision.answers import finite, understood
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.supervision.failures import words_of

START_S = 120.0
"""How long an environment may take to be imported and made once."""
GRACE_S = 5.0
"""How long a closed environment may take to end; then its process is killed."""
UNREACHABLE_S = 60.0
"""How long no node may be reached before an episode is given up."""
LOOK_AGAIN_S = 5.0
"""How long an episode waits for a place at most, until it looks for hosts that are back."""
_LAST_WORDS = 2_000
"""Characters of what a fork server printed that are told if it ends."""
_MODULE = "libra_cli.envs.workers.fork_server"


class OpenOnNode(Protocol):
    """Runs a module of ours on a node of the recipe for as long as the stream to it is open."""

    async def __call__(self, node: str, process: str, module: str) -> ByteStream:
        """Return the stream.

        Raises:
            HostError: the node cannot be reached.
        """


Open: TypeAlias = Callable[[], Awaitable[ByteStream]]
"""Start a fork server, and return the stream to it."""


async def no_nodes(node: str, process: str, module: str) -> ByteStream:
    """The ``OpenOnNode`` of one who has no nodes."""
    raise HostError(f"{node}: no connection to it here")


async def _open_here() -> ByteStream:
    """Start a fork server of this Python, which finds the same modules as this process."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {_MODULE} import main; main()"
    return await LocalTransport().open_stream([sys.executable, "-P", "-c", code])


@dataclass(frozen=True, slots=True)
class WorkersHello:
    """What a fork server is told first: which environment it serves."""

    name: str
    arguments: Mapping[str, Any]
    """Keyword arguments of the factory, secrets included."""
    run_directory: str | None = None
    """Path of the run's directory, for a factory that takes it; None outside a run."""
    sandbox: Mapping[str, Any] | None = None
    """What the recipe says of the environment's sandboxes; None if it has none."""
    own_tasks: bool = True
    """Whether the environment makes its own tasks, so that it must have ``task``."""

    def pack(self) -> bytes:
        """The body of its frame.

        Raises:
            EnvironmentBroken: an argument cannot be sent.
        """
        told = {
            "name": self.name,
            "arguments": dict(self.arguments),
            "run_directory": self.run_directory,
            "sandbox": self.sandbox,
            "own_tasks": self.own_tasks,
            "grace_s": GRACE_S,
        }
        try:
            return wire.pack(told)
        except (TypeError, ValueError) as error:
            raise EnvironmentBroken(
                f"environment {self.name!r}: its arguments cannot be sent to workers: {error}"
            ) from error


class EnvironmentWorkers:
    """The workers of one environment, on one machine or several."""

    def __init__(
        self,
        hello: WorkersHello,
        nodes: Sequence[str],
        open_on: OpenOnNode,
        most: Mapping[str, int | None],
    ) -> None:
        """Play on these nodes, which ``open_on`` reaches, or without any on this machine; ``most``
        are the episodes that each of them holds, or with "" this one.
        """
        self._name = hello.name
        self._hello = hello
        hello.pack()  # what cannot be sent is told before anything is started
        self._endpoint = endpoint_in(hello.arguments)
        self._open_on = open_on
        process = f"environment-{hello.name}"
        places = [
            _Place(partial(open_on, node, process, _MODULE), node, most[node]) for node in nodes
        ]
        self._places = places or [_Place(_open_here, most=most[""])]
        self._left = asyncio.Event()
        """Set when an episode has left its place."""

    async def begin(self) -> WorkerEnvironment:
        """Return the environment of a new episode, once there is a place for it.

        Raises:
            EnvironmentBroken: it cannot be imported or made, or nowhere is reached.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + UNREACHABLE_S
        while True:
            try:
                server = await self._with_room()
            except HostError as error:
                if loop.time() >= give_up:
                    raise EnvironmentBroken(
                        f"environment {self._name!r}: no node for its workers can be reached: "
                        f"{error}"
                    ) from error
                await asyncio.sleep(1.0)
                continue
            if server is not None:
                return self._begin_at(server)
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._left.wait()
            give_up = loop.time() + UNREACHABLE_S

    async def _with_room(self) -> ForkServerConnection | None:
        """Return the fork server with the fewest episodes, of those that hold one more; None if no
        one does. Raises HostError: none is reached.
        """
        unreachable: HostError | None = None
        for place in sorted(self._places, key=lambda place: place.playing):
            try:
                server = await self._server(place)
            except HostError as error:
                unreachable = unreachable or error
                continue
            if place.has_room:
                return server
        full = any(not place.has_room for place in self._places)
        if unreachable is not None and not full:
            raise unreachable
        return None

    def _begin_at(self, server: ForkServerConnection) -> WorkerEnvironment:
        return WorkerEnvironment(server, server.begin(), self._left.set)

    async def everywhere(self) -> Sequence[tuple[str, WorkerEnvironment]]:
        """Return an environment on each node that is reached, with the node's name.

        Raises:
            EnvironmentBroken: it cannot be imported or made.
        """
        found = []
        for place in self._places:
            with contextlib.suppress(HostError):  # one that is lost has an error of its own
                server = await self._server(place)
                found.append((place.node, self._begin_at(server)))
        return found

    async def close(self) -> None:
        await asyncio.gather(*(place.close() for place in self._places))

    async def _server(self, place: _Place) -> ForkServerConnection:
        async with place.starting:
            if (server := place.working) is None:
                await place.close()
                hello = await self._hello_at(place)
                server = place.server = ForkServerConnection(self._name, await place.open())
                await self._greet(server, hello)
        return server

    async def _hello_at(self, place: _Place) -> WorkersHello:
        """What is told there; models of the run have another URL than here. Raises HostError."""
        if not place.node or self._endpoint is None:
            return self._hello
        stream = await self._open_on(place.node, f"models-of-{self._name}", MODELS_PORT)
        place.models = ModelsPort(place.node, stream, self._endpoint)
        arguments = arguments_at(self._hello.arguments, await place.models.url())
        return replace(self._hello, arguments=arguments)

    async def _greet(self, server: ForkServerConnection, hello: WorkersHello) -> None:
        try:
            async with asyncio.timeout(START_S):
                await server.hello(hello.pack())
        except TimeoutError as error:
            await server.close()
            raise EnvironmentBroken(
                f"environment {self._name!r} could not be imported within {START_S:g} s"
            ) from error
        except BaseException:
            await server.close()
            raise


@dataclass(slots=True)
class _Place:
    open: Open
    node: str = ""
    """The name of the node; empty on the controller."""
    most: int | None = None
    """Number of episodes that it holds; None: as many as are wanted."""
    server: ForkServerConnection | None = None
    models: ModelsPort | None = None
    """What leads from there to the models of the run, if its environment asks them."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def working(self) -> ForkServerConnection | None:
        """The fork server that works there; None if it has ended, or nothing leads from there to
        the models any more."""
        no_models = self.models is not None and self.models.ended
        return None if self.server is None or self.server.ended or no_models else self.server

    async def close(self) -> None:
        """End what is there."""
        if self.server is not None:
            await self.server.close()
        if self.models is not None:
            await self.models.close()
        self.server = self.models = None

    @property
    def playing(self) -> int:
        """Number of episodes that are played there."""
        return 0 if self.server is None else self.server.playing

    @property
    def has_room(self) -> bool:
        return self.most is None or self.playing < self.most


class ForkServerConnection:
    """One fork server, and the answers that are waited for."""

    def __init__(self, name: str, stream: ByteStream) -> None:
        self._name = name
        self._stream = stream
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._fates: dict[int, str] = {}
        """How the processes of episodes ended that were not closed."""
        self._outbox = Outbox(stream)
        self._listening = Background().start(f"hearing the fork server of {name}", self._listen())
        self.playing = 0
        """Number of episodes that were begun and not closed."""
        self.ended = ""
        """How the fork server ended; empty while it runs."""

    def begin(self) -> int:
        """Count a new episode, and return its number."""
        self.playing += 1
        return next(self._numbers)

    async def hello(self, body: bytes) -> None:
        """Say which environment it serves, and wait until it is imported.

        Raises:
            EnvironmentBroken: it cannot be.
        """
        raw = await self._ask(Kind.HELLO, 0, body)
        with understood(EnvironmentBroken, "the fork server's first word"):
            broke = wire.unpack(raw)
            if broke:
                raise EnvironmentBroken(str(broke[0]), hint=str(broke[1]))

    async def call(self, episode: int, member: str, *arguments: Any) -> dict[str, Any]:
        """Make a call of an episode; returns the fields of what it returned.

        Raises:
            EnvironmentBroken: the environment failed, or its process did.
        """
        if (fate := self._fates.get(episode)) is not None:
            raise self._broke(fate)
        try:
            body = wire.pack([member, *arguments])
            wire.frame(Kind.CALL, episode, body)
        except (TypeError, ValueError) as error:
            raise self._broke(f"{member} cannot be sent to its process: {error}") from error
        raw = await self._ask(Kind.CALL, episode, body)
        with understood(EnvironmentBroken, f"what {member} was answered with"):
            how, *answer = wire.unpack(raw)
            if how == "broke":
                raise EnvironmentBroken(str(answer[0]), hint=str(answer[1]))
            return dict(answer[0])

    def close_episode(self, episode: int) -> None:
        """Have its process close the environment and end; it is killed if it does not."""
        self.playing -= 1
        if self._fates.pop(episode, None) is None:
            self._outbox.put(wire.frame(Kind.CLOSE, episode))

    async def close(self) -> None:
        """End it, and wait until it is gone; by force if it does not go."""
        await self._outbox.close()
        # Its workers have their grace first.
        await asyncio.wait({self._listening}, timeout=2 * GRACE_S)
        await self._stream.close()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _ask(self, kind: Kind, episode: int, body: bytes) -> bytes:
        if self.ended:
            raise self._broke(self.ended)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[episode] = future
        self._outbox.put(wire.frame(kind, episode, body))
        return await future

    async def _listen(self) -> None:
        why = await self._why_it_ended()
        said = self._stream.errors[-_LAST_WORDS:]
        self.ended = f"{why}; it last printed: {said}" if said else why
        for episode in list(self._waiting):
            self._fail(episode, self.ended)

    async def _why_it_ended(self) -> str:
        frames = Frames()
        try:
            while data := await self._stream.read():
                for kind, episode, body in frames.feed(data):
                    self._take(kind, episode, body)
            return f"its fork server ended with code {await self._stream.exit_code()}"
        except HostError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  whatever it says, those who wait are told
            with contextlib.suppress(HostError):
                await self._stream.close()
            return f"its fork server sent what cannot be read: {words_of(error)}"

    def _take(self, kind: Kind, episode: int, body: bytes) -> None:
        if kind is not Kind.ENDED:
            future = self._waiting.pop(episode, None)
            if future is not None and not future.done():
                future.set_result(body)
            return
        fate = wire.unpack(body)
        if fate:
            self._fates[episode] = fate
        self._fail(episode, fate or "its process was closed")

    def _fail(self, episode: int, why: str) -> None:
        future = self._waiting.pop(episode, None)
        if future is not None and not future.done():
            future.set_exception(self._broke(why))

    def _broke(self, why: str) -> EnvironmentBroken:
        return EnvironmentBroken(f"environment {self._name!r} broke: {why}")


def _tools(found: list[ToolSchema] | None) -> list[ToolSchema] | None:
    return None if found is None else returns.tools(found)


def _messages(found: Sequence[Message]) -> list[Message]:
    return returns.messages(found) if found else []


def _rewards(found: Mapping[str, float]) -> dict[str, float]:
    return returns.rewards(found, [*found])


class WorkerEnvironment:
    """The environment of one episode, in a process of its own."""

    def __init__(
        self, server: ForkServerConnection, episode: int, left: Callable[[], None]
    ) -> None:
        """``left`` is called once it needs its place no more."""
        self._server = server
        self._episode = episode
        self._has_left = left

    async def preparations(self) -> Preparations:
        found = await self._call("preparations")
        with understood(EnvironmentBroken, "what preparations returned"):
            return Preparations(returns.tasks(Preparations(**found).tasks))

    async def prepare(self, task: Task) -> Preparations:
        await self._call("prepare", task)
        return Preparations()

    async def reset(self, task: Task | None, index: int, task_seed: int, seed: int) -> Opening:
        found = await self._call("reset", task, index, task_seed, seed)
        with understood(EnvironmentBroken, "what reset returned"):
            opening = Opening(**found)
            messages, tools = returns.messages(opening.messages), returns.tools(opening.tools)
            roles, role = returns.roles(opening.roles), returns.whole_text(opening.role)
            return replace(opening, messages=messages, tools=tools, roles=roles, role=role)

    async def step(self, call: ToolCall) -> ToolAnswer:
        """Run a tool call in the worker, and check what it sends back; raises EnvironmentBroken."""
        found = await self._call("step", call)
        with understood(EnvironmentBroken, "what step returned"):
            answer = ToolAnswer(**found)
            result = returns.step_result(StepResult(answer.text, images=answer.images))
            seconds, size = finite(answer.seconds), index_of(answer.size)
            reward, tools = returns.reward(answer.reward), _tools(answer.tools)
            return replace(
                answer,
                text=result.text,
                images=result.images,
                size=size,
                reward=reward,
                seconds=seconds,
                tools=tools,
                role=returns.whole_text(answer.role),
                messages=_messages(answer.messages),
                rewards=_rewards(answer.rewards),
            )

    async def reply(self, text: str) -> Answered:
        found = await self._call("reply", text)
        with understood(EnvironmentBroken, "what reply returned"):
            said = Answered(**found)
            return replace(
                said,
                messages=_messages(said.messages),
                reward=returns.reward(said.reward),
                tools=_tools(said.tools),
                role=returns.whole_text(said.role),
                rewards=_rewards(said.rewards),
            )

    async def score(self, answer: str, conversation: Conversation) -> Scored:
        found = await self._call("score", answer, conversation)
        with understood(EnvironmentBroken, "what score returned"):
            scored = Scored(**found)
            reward, named = returns.reward(scored.reward), returns.metrics(scored.metrics)
            return Scored(reward, named, _rewards(scored.rewards))

    async def run_agent(self, job: EnclosedJob) -> CommandEnd:
        """Run an agent in the sandbox of the worker's environment; raises EnvironmentBroken."""
        found = await self._call("run_agent", job.as_dict())
        with understood(EnvironmentBroken, "what became of the agent"):
            end = CommandEnd(**found)
            code, words = int(end.code), returns.whole_text(end.words)
            return CommandEnd(code, words, bool(end.flooded))

    def close(self, line: CallLine) -> None:
        """Close it and end its process, whatever it is doing."""
        self._server.close_episode(self._episode)
        self._has_left()

    async def _call(self, member: str, *arguments: Any) -> dict[str, Any]:
        return await self._server.call(self._episode, member, *arguments)
