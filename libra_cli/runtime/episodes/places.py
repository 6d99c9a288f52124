"""Where the environment of an episode lives, and what a recipe says of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs import registry
from libra_cli.envs.agents.command import CommandEnd
from libra_cli.envs.agents.enclosed import EnclosedJob
from libra_cli.envs.protocol import Environment, Task, ToolCall
from libra_cli.envs.session import (
    Answered,
    Conversation,
    Opening,
    Preparations,
    Scored,
    ToolAnswer,
)
from libra_cli.runtime.episodes.calls import CallLine, Calls
from libra_cli.runtime.episodes.in_process import InProcessEnvironment
from libra_cli.runtime.episodes.workers import (
    EnvironmentWorkers,
    OpenOnNode,
    WorkersHello,
    no_nodes,
)
from libra_cli.runtime.hosts.threads import Threads
from libra_cli.runtime.tasks.mixture import Tasks
from libra_cli.runtime.tasks.weighted_turns import Mixture

WITH_MCP_TOOLS = "libra_cli.envs.adapters.mcp:WithMcpTools"
"""What makes an environment that has the tools of MCP servers, too."""
T = TypeVar("T")
TELL_S = 10.0
"""Seconds between two lines about what is made before anything is played."""
MOST_HUNG = 1_000
"""Abandoned calls that may be running. Each keeps a thread; more mean that a tool is broken."""


class EpisodeEnvironment(Protocol):
    """The environment of one episode, wherever it is. What it returns has been checked.

    Each call but ``close`` raises an EnvironmentBroken if the environment failed.
    """

    async def preparations(self) -> Preparations:
        """Make it, and list what it would like made on its host before anything is played."""

    async def prepare(self, task: Task) -> Preparations:
        """Have one of these made, however long that takes."""

    async def reset(self, task: Task | None, index: int, task_seed: int, seed: int) -> Opening:
        """Make it, and begin the task; without one its own of this ``index``."""

    async def step(self, call: ToolCall) -> ToolAnswer:
        """Run a tool call; what the tool refuses is in the answer and raises nothing."""

    async def reply(self, text: str) -> Answered:
        """Return what the user says to a turn without tool calls; only if ``Opening.replies``."""

    async def score(self, answer: str, conversation: Conversation) -> Scored:
        """Score the episode by its last turn, and read its metrics."""

    async def run_agent(self, job: EnclosedJob) -> CommandEnd:
        """Run an agent in its sandbox, for as long as that takes."""

    def close(self, line: CallLine) -> None:
        """Close the environment, once the call that may be under way is over."""


class EnvironmentFactory:
    """Makes an environment of a recipe with its arguments."""

    def __init__(self, spec: EnvironmentSpec, run_directory: Path | None = None) -> None:
        """Find the environment; it may keep files in the run's directory.

        Raises:
            EnvironmentBroken: there is no such environment.
        """
        directory = str(run_directory) if run_directory else None
        self._make = registry.maker(
            factory_of(spec), arguments_of(spec), directory, sandbox_of(spec)
        )

    def make(self) -> Environment:
        """Make a new environment.

        Raises:
            EnvironmentBroken: its arguments do not fit.
        """
        return self._make()


def factory_of(spec: EnvironmentSpec) -> str:
    """What the environment is made by: its own factory, or the one that adds MCP servers' tools."""
    return WITH_MCP_TOOLS if spec.mcp else spec.name


def sandbox_of(spec: EnvironmentSpec) -> dict[str, Any] | None:
    """What the recipe says of the environment's sandboxes; None if it has none."""
    return None if spec.sandbox is None else spec.sandbox.model_dump()


def arguments_of(spec: EnvironmentSpec) -> dict[str, Any]:
    """What the recipe gives the factory, secrets included."""
    arguments: dict[str, Any] = dict(spec.args)
    if spec.mcp:
        servers = [one.model_dump() for one in spec.mcp]
        arguments = {"environment": spec.name, "args": arguments, "servers": servers}
    if spec.secrets:
        told = {name: secret.get_secret_value() for name, secret in spec.secrets.items()}
        arguments["secrets"] = told
    return arguments


class _ThisProcess:
    def __init__(self, spec: EnvironmentSpec, run_directory: Path | None) -> None:
        self._name = spec.name
        self._factory = EnvironmentFactory(spec, run_directory)
        self._threads = Threads("libra-environment")

    async def begin(self) -> InProcessEnvironment:
        return InProcessEnvironment(self._name, self._factory.make, self._threads)

    async def everywhere(self) -> Sequence[tuple[str, InProcessEnvironment]]:
        return [("", await self.begin())]

    async def close(self) -> None:
        self._threads.close()


class EnvironmentSource:
    """One environment of the recipe: its tasks, its calls, and where its episodes live."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        label: str,
        run_directory: Path | None = None,
        open_on: OpenOnNode = no_nodes,
    ) -> None:
        """Find the environment and read the tasks; ``open_on`` reaches the nodes of workers.

        Raises:
            EnvironmentBroken: there is no such environment, or the tasks cannot be read.
        """
        self.name, self.label = spec.name, label
        workers = spec.workers
        at_once = workers.processes * max(1, len(workers.nodes)) if workers else spec.concurrency
        self.calls = Calls(at_once, spec.tool_timeout_s)
        self._tasks = Tasks(spec.tasks) if spec.tasks else None
        self._home: _ThisProcess | EnvironmentWorkers
        if workers is None:
            self._home = _ThisProcess(spec, run_directory)
        else:
            hello = WorkersHello(
                factory_of(spec),
                arguments_of(spec),
                str(run_directory) if run_directory and not workers.nodes else None,
                sandbox_of(spec),
                own_tasks=self._tasks is None,
            )
            most = {node: workers.most_on(node) for node in workers.nodes or ("",)}
            self._home = EnvironmentWorkers(hello, workers.nodes, open_on, most)

    async def prepare(self, note: Callable[[str], None]) -> None:
        """Have made on every host what its episodes would else make first, and tell how far it is.

        Raises:
            EnvironmentBroken: it cannot be made.
        """
        making = [
            asyncio.create_task(self._prepare(environment, node, note))
            for node, environment in await self._home.everywhere()
        ]
        try:
            await asyncio.gather(*making)
        finally:
            for one in making:
                one.cancel()

    async def _prepare(
        self, environment: EpisodeEnvironment, node: str, note: Callable[[str], None]
    ) -> None:
        line, where = CallLine(), f"environment {self.name}{node and f' on {node}'}"
        try:
            listed = await self.run(line, "preparations", environment.preparations)
            tasks = self._among_mine(listed.tasks)
            began, told = time.monotonic(), -TELL_S
            for number, task in enumerate(tasks, 1):
                if (now := time.monotonic()) >= told + TELL_S:
                    told = now
                    name = ", ".join(map(str, task.values()))
                    note(f"{where}: preparing {number} of {len(tasks)} tasks: {name}")
                await self.calls.run_on(line, partial(environment.prepare, task))
            if tasks:
                note(f"{where}: {len(tasks)} tasks prepared in {time.monotonic() - began:.1f} s")
        finally:
            environment.close(line)

    def _among_mine(self, listed: Sequence[Task]) -> Sequence[Task]:
        """Leave out tasks that no row of the recipe's files names."""
        if self._tasks is None or not listed:
            return listed
        keys = list(listed[0])
        named = {json.dumps([row.get(key) for key in keys]) for row in self._tasks.every()}
        return [one for one in listed if json.dumps([one.get(key) for key in keys]) in named]

    async def begin(self, line: CallLine) -> EpisodeEnvironment:
        """Return the environment of a new episode, which its ``reset`` makes, once it has a place.

        Raises:
            EnvironmentBroken: too many calls hang, or workers cannot import it.
        """
        if self.calls.hung >= MOST_HUNG:
            raise EnvironmentBroken(
                f"environment {self.name!r}: {self.calls.hung} calls hang and do not come back",
                hint="find out which tool hangs; raise environment.tool_timeout_s if it is slow",
            )
        asked = time.monotonic()
        try:
            return await self._home.begin()
        finally:
            line.waited_s += time.monotonic() - asked

    async def run(
        self, line: CallLine, where: str, call: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Make a call that the episode cannot go on without, after one that may hang.

        Raises:
            EnvironmentBroken: it failed or took too long.
        """
        try:
            await self.calls.wait(line)
            return await self.calls.run(line, call)
        except TimeoutError as error:
            raise EnvironmentBroken(
                f"environment {self.name!r} broke in {where}: it did not end within "
                f"{self.calls.limit_s:g} s (environment.tool_timeout_s)"
            ) from error

    @property
    def num_tasks(self) -> int | None:
        """How many tasks the recipe's files have; None: the environment makes its own."""
        return None if self._tasks is None else len(self._tasks)

    def task(self, index: int, seed: int) -> Task | None:
        """Return task ``index`` of the recipe's files; None: the environment makes its own."""
        return None if self._tasks is None else self._tasks.at(index, seed)

    async def close(self) -> None:
        """End the threads, except those that hang, or the processes."""
        await self._home.close()


class EnvironmentSources:
    """The environments that take turns in giving tasks."""

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        labels: Sequence[str],
        run_directory: Path | None,
        open_on: OpenOnNode,
    ) -> None:
        """Find the environments and read their tasks.

        Raises:
            EnvironmentBroken: there is no such environment, or the tasks cannot be read.
        """
        self._sources = [
            EnvironmentSource(spec, label, run_directory, open_on)
            for spec, label in zip(specs, labels, strict=True)
        ]
        self._mixture = Mixture([spec.weight for spec in specs])

    def __iter__(self) -> Iterator[EnvironmentSource]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def num_tasks(self) -> int | None:
        """How many tasks their files have, of several the fewest; None without files."""
        return min((one.num_tasks for one in self._sources if one.num_tasks), default=None)

    def of(self, group: int) -> tuple[EnvironmentSource, int]:
        """Return the environment of a group, counted from 0, and the index of its task there."""
        number, index = self._mixture.of(group)
        return self._sources[number], index
