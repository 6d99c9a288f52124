"""Commands on the hosts of a recipe: the controller's side of ``envs.agents.host``.

Each host runs one process that starts commands, with its first one, and anew if it has ended since.
It is reached over its stdin and stdout, and the requests of its agents come the same way. A command
goes where the fewest are. When a host is lost its agents are, and their trajectories are played
again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra_cli.config.environment import AgentSpec
from libra_cli.config.errors import AgentFailed, HostError
from libra_cli.envs.agents.command import CommandEnd
from libra_cli.envs.agents.messages import MessageReader, Say, message, packed_files
from libra_cli.runtime.episodes.workers import OpenOnNode
from libra_cli.runtime.hosts.transport import ByteStream
from libra_cli.runtime.processes.carried import CarriedConnections
from libra_cli.runtime.processes.outbox import Outbox
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.supervision.failures import words_of

MODULE = "libra_cli.envs.agents.host"
START_S = 60.0
"""How long a host may take until it can start commands."""
UNREACHABLE_S = 60.0
"""How long no host may be reached before a trajectory is given up."""
LEAVE_S = 5.0
_LAST_WORDS = 2000


class AgentNodes:
    """Runs an agent's commands on the hosts that the recipe names for them."""

    def __init__(
        self, spec: AgentSpec, env: dict[str, str], open_on: OpenOnNode, port_of: Callable[[], int]
    ) -> None:
        """``port_of`` tells the endpoint's port on the controller's loopback.

        Raises:
            AgentFailed: a file of the recipe's directory cannot be read.
        """
        files = files_of(spec)
        self._hello = {"command": list(spec.command or ()), "env": env, "files": files}
        self._open_on = open_on
        self._port_of = port_of
        self._nodes = [_AgentNode(name) for name in spec.nodes]

    async def run(self, job: dict[str, Any], begun: asyncio.Event) -> CommandEnd:
        """Run a command to its end, somewhere; it is killed if this is cancelled.

        Raises:
            AgentFailed: it cannot be run, or its host was lost.
        """
        node, connection = await self._somewhere()
        try:
            begun.set()
            return await connection.run(job)
        finally:
            node.playing -= 1

    async def close(self) -> None:
        open_ones = [node.connection for node in self._nodes if node.connection is not None]
        await asyncio.gather(*(one.close() for one in open_ones))

    async def _somewhere(self) -> tuple[_AgentNode, AgentNodeConnection]:
        """A host that can be reached, which plays one more from now on."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + UNREACHABLE_S
        while True:
            why: HostError | None = None
            for node in sorted(self._nodes, key=lambda node: node.playing):
                node.playing += 1
                try:
                    return node, await self._connected(node)
                except HostError as error:
                    node.playing -= 1
                    why = error
                except BaseException:
                    node.playing -= 1
                    raise
            if loop.time() >= give_up:
                raise AgentFailed(f"no node for agents can be reached: {why}") from why
            await asyncio.sleep(1.0)

    async def _connected(self, node: _AgentNode) -> AgentNodeConnection:
        async with node.opening:
            if node.connection is None or node.connection.ended:
                stream = await self._open_on(node.name, "agents", MODULE)
                node.connection = AgentNodeConnection(node.name, stream, self._port_of())
                await node.connection.hello(self._hello)
        return node.connection


@dataclass(slots=True)
class _AgentNode:
    name: str
    connection: AgentNodeConnection | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    playing: int = 0
    """Commands that are there or on their way there."""


class AgentNodeConnection:
    """The stream to one host, with its commands and their requests."""

    def __init__(self, name: str, stream: ByteStream, port: int) -> None:
        self._name = name
        self._stream = stream
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._background = Background()
        self._outbox = Outbox(stream)
        self._carried = CarriedConnections(name, port, self._say, self._background)
        self._listening = self._background.start(f"hearing {name}'s agents", self._listen())
        self.ended = ""
        """How the host's process ended; empty while it runs."""

    async def hello(self, hello: dict[str, Any]) -> None:
        """Say what is to be run there.

        Raises:
            AgentFailed: it cannot be.
        """
        try:
            async with asyncio.timeout(START_S):
                refused = await self._ask("hello", 0, hello)
        except TimeoutError:
            refused = f"no answer within {START_S:g} s"
        if refused:
            await self.close()
            raise AgentFailed(f"{self._name}: {refused}")

    async def run(self, job: dict[str, Any]) -> CommandEnd:
        """Run a command to its end.

        Raises:
            AgentFailed: it cannot be started, or the host was lost.
        """
        number = next(self._numbers)
        try:
            end = await self._ask("start", number, job)
        except asyncio.CancelledError:
            self._say("kill", number)
            raise
        if isinstance(end, str):
            raise AgentFailed(f"{self._name}: the agent cannot be started: {end}")
        code, words, flooded = end
        return CommandEnd(int(code), str(words), bool(flooded))

    async def close(self) -> None:
        """Close the stream, with which the host's process and all of its commands end."""
        await self._outbox.close()
        await asyncio.wait({self._listening}, timeout=LEAVE_S)
        await self._stream.close()
        await self._background.close()

    async def _ask(self, say: Say, number: int, body: Any) -> Any:
        if self.ended:
            raise AgentFailed(f"{self._name}: {self.ended}")
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._say(say, number, body)
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    def _say(self, say: Say, number: int, body: Any = None) -> None:
        self._outbox.put(message(say, number, body))

    async def _listen(self) -> None:
        reader, why = MessageReader(), "the connection to its agents broke"
        try:
            while data := await self._stream.read():
                for say, number, body in reader.feed(data):
                    self._take(say, number, body)
        except HostError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001  whatever it says, those who wait are told
            why = f"its agents' process said what cannot be read: {words_of(error)}"
        self.ended = f"{why}: {self._stream.errors[-_LAST_WORDS:]}".rstrip(": ")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(AgentFailed(f"{self._name}: {self.ended}"))
        self._carried.end()

    def _take(self, say: Say, number: int, body: Any) -> None:
        if say in ("ready", "ended"):
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_result(body)
        else:
            self._carried.take(say, number, body)


def files_of(spec: AgentSpec) -> list[tuple[str, int, bytes]]:
    """Return path, mode and content of the files of ``agent.directory``.

    Raises:
        AgentFailed: one cannot be read.
    """
    try:
        return packed_files(Path(spec.directory)) if spec.directory else []
    except OSError as error:
        raise AgentFailed(f"agent.directory: {error}") from error
