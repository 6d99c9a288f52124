"""Who plays: a Python function, a command in a process of its own, or an agent elsewhere.

A runner is given a job (the task, and where and with which key turns are asked for) and returns the
agent's reward, or None if the agent leaves that to the environment. Whatever an agent does wrong
is an AgentFailed, with the last it said.

*   A **function** is called with ``task``, ``base_url``, ``api_key`` and ``model``. If it is async
    it runs on an event loop in a thread of its own, which all agents share, so that one that
    blocks delays other agents and not the run; otherwise it has a thread to itself.
*   A **command** has a process group, a working directory that is removed afterwards, and an
    environment of its own (``envs.agents.workplace``); it runs here or on hosts of the recipe.
*   An agent **elsewhere** fetches its job over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from libra_cli.config.environment import AgentSpec
from libra_cli.config.errors import AgentFailed, EnvironmentBroken, PluginError
from libra_cli.config.plugins import PluginGroup
from libra_cli.envs.agents.command import MOST_OUTPUT, CommandEnd
from libra_cli.envs.agents.enclosed import EnclosedJob
from libra_cli.envs.agents.workplace import CommandJob, StoppableJob, Workplace
from libra_cli.plugins.finding import find
from libra_cli.runtime.agents.nodes import AgentNodes, files_of
from libra_cli.runtime.episodes.workers import OpenOnNode
from libra_cli.runtime.hosts.threads import Threads

LEAVE_S = 5.0
"""How long agents that were cancelled may take to close what they have opened."""
T = TypeVar("T")
_FUNCTIONS = PluginGroup("libra.agents", "agent", {})


@dataclass(frozen=True, slots=True)
class AgentJob:
    """What an agent is told: its task, and the endpoint, key and name of the model."""

    id: str
    """The name of the trajectory, ``group.member.attempt``."""
    task: Mapping[str, Any]
    """``data``: the row of the tasks; ``messages``: the prompt; ``tools``: the environment's."""
    root_url: str
    """``http://host:port/t/KEY``, to which Anthropic's clients add ``/v1/messages``."""
    api_key: str
    model: str
    models: tuple[str, ...] = ()
    """Names of the run's frozen models that it may ask, below ``root_url``/models."""

    @property
    def base_url(self) -> str:
        """The URL to which OpenAI's clients add ``/chat/completions`` or ``/responses``."""
        return f"{self.root_url}/v1"


class AgentRunner(Protocol):
    """Runs agents, one a job, any number at once."""

    async def run(self, job: AgentJob, taken: asyncio.Event) -> float | None:
        """Run one to its end; set ``taken`` when it begins.

        Raises:
            AgentFailed: it failed.
        """

    async def close(self) -> None:
        """End what is shared by all of them."""


class RunEnclosed(Protocol):
    """Runs an agent in the sandbox of a trajectory's environment."""

    async def __call__(self, trajectory: str, job: EnclosedJob) -> CommandEnd:
        """Return how it ended.

        Raises:
            EnvironmentBroken: it cannot be started there.
        """


def runner_of(
    spec: AgentSpec, directory: Path, open_on: OpenOnNode, port_of: Callable[[], int]
) -> AgentRunner:
    """The runner that a recipe names, of agents that are in no sandbox.

    ``directory`` is where working directories are made, ``port_of`` tells the endpoint's port.

    Raises:
        PluginError: there is no such function or command.
    """
    if spec.function is not None:
        return FunctionRunner(spec)
    if spec.nodes:
        return NodesRunner(spec, open_on, port_of)
    if spec.command is not None:
        return CommandRunner(spec, directory)
    return ExternalRunner()


def find_function(spec: AgentSpec) -> Callable[..., Any]:
    """Import the function that a recipe names as its agent.

    Raises:
        PluginError: there is none of this name, or it cannot be called with what an agent gets.
    """
    if spec.directory is not None and spec.directory not in sys.path:
        sys.path.insert(0, spec.directory)
    name = str(spec.function)
    function: Callable[..., Any] = find(_FUNCTIONS, name)
    _check_signature(name, function)
    return function


class FunctionRunner:
    """Calls a Python function for each job, up to ``agent.concurrency`` at the same time."""

    def __init__(self, spec: AgentSpec) -> None:
        self._function = find_function(spec)
        self._permits = asyncio.Semaphore(spec.concurrency)
        self._threads = Threads("libra-agent")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="libra-agents", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def run(self, job: AgentJob, taken: asyncio.Event) -> float | None:
        """Call the function in a thread or on the shared loop, and return its reward.

        Raises:
            AgentFailed: it raised, cancelled itself, or returned something that is no reward.
        """
        async with self._permits:
            taken.set()
            future = self._started(job)
            try:
                reward = await asyncio.wrap_future(future)
            except Exception as error:
                raise AgentFailed(f"the agent raised {type(error).__name__}: {error}") from error
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) and task.cancelling():
                    raise
                raise AgentFailed("the agent cancelled itself") from None
        return _checked_reward(reward)

    def _started(self, job: AgentJob) -> Future[Any]:
        told = {
            "task": job.task,
            "base_url": job.base_url,
            "api_key": job.api_key,
            "model": job.model,
        }
        if inspect.iscoroutinefunction(self._function):
            agent = _without_exits(self._function(**told))
            return asyncio.run_coroutine_threadsafe(agent, self._loop)
        future: Future[Any] = Future()
        self._threads.run(lambda: _settle(future, lambda: self._function(**told)))
        return future

    async def close(self) -> None:
        """End the shared loop, with the agents on it, and the idle threads."""
        self._threads.close()
        asyncio.run_coroutine_threadsafe(_stop_loop(), self._loop)
        await asyncio.to_thread(self._thread.join, LEAVE_S)


async def _without_exits(agent: Coroutine[Any, Any, Any]) -> Any:
    """Turn an agent's SystemExit, which would end the loop of all agents, into an error."""
    try:
        return await agent
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _stop_loop() -> None:
    """Agents that were cancelled may have something to close; what they left behind is too."""
    for left_s in (LEAVE_S / 4, LEAVE_S / 2):
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            _, left = await asyncio.wait(others, timeout=left_s)
            for task in left:
                task.cancel()
    asyncio.get_running_loop().stop()


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except Exception as error:  # noqa: BLE001  whatever an agent raises
        future.set_exception(error)
    except BaseException as error:  # noqa: BLE001  a SystemExit would end nothing but this thread
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
    else:
        future.set_result(result)


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind(task=None, base_url="", api_key="", model="")
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"agent {name!r} cannot be called with task, base_url, api_key and model: {error}",
            hint="async def agent(task, base_url, api_key, model): ...",
        ) from error


def _checked_reward(reward: object) -> float | None:
    if reward is None:
        return None
    if isinstance(reward, bool | int | float):
        return float(reward)
    raise AgentFailed(
        f"the agent returned {type(reward).__name__}, not a reward",
        hint="return a number, or nothing to let the environment score",
    )


class CommandRunner:
    """Runs a command, as a process group of its own."""

    def __init__(self, spec: AgentSpec, directory: Path) -> None:
        self._workplace = Workplace(
            spec.command or (),
            _variables(spec),
            Path(spec.directory) if spec.directory else None,
            directory,
        )
        self._permits = asyncio.Semaphore(spec.concurrency)
        self._threads = Threads("libra-agent")
        if missing := self._workplace.missing():
            raise PluginError(
                f"there is no program {missing!r}", hint="name it by its path in agent.command"
            )
        self._workplace.clear_all()  # of a controller that was killed

    async def run(self, job: AgentJob, taken: asyncio.Event) -> float | None:
        """Run the command to its end, on this machine; its reward is posted, if there is one.

        Raises:
            AgentFailed: it cannot be started, did not exit with 0, or printed too much.
        """
        told = CommandJob(root_url=job.root_url, **_told(job))
        async with self._permits:
            taken.set()
            try:
                _check(await self._ended(StoppableJob(self._workplace, told)))
            except OSError as error:
                raise AgentFailed(f"the agent cannot be started: {error}") from error
        return None

    async def _ended(self, job: StoppableJob) -> CommandEnd:
        running = asyncio.ensure_future(self._in_thread(job.run))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            job.kill()
            with contextlib.suppress(OSError):
                await running  # its directory is in use until then
            raise

    async def _in_thread(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._threads.run(lambda: _settle(future, function))
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Remove what is left of the working directories, and end the idle threads."""
        await self._in_thread(self._workplace.clear_all)
        self._threads.close()


class NodesRunner:
    """Runs a command on hosts of the recipe."""

    def __init__(self, spec: AgentSpec, open_on: OpenOnNode, port_of: Callable[[], int]) -> None:
        self._nodes = AgentNodes(spec, _variables(spec), open_on, port_of)
        self._permits = asyncio.Semaphore(spec.concurrency * len(spec.nodes))

    async def run(self, job: AgentJob, taken: asyncio.Event) -> float | None:
        async with self._permits:
            _check(await self._nodes.run(_told(job), taken))
        return None

    async def close(self) -> None:
        await self._nodes.close()


class EnclosedRunner:
    """Runs a command in the sandbox of each trajectory's environment."""

    def __init__(
        self,
        spec: AgentSpec,
        run_enclosed: RunEnclosed,
        port_of: Callable[[], int],
        *,
        timeout_s: float,
    ) -> None:
        """``timeout_s`` is for all of a trajectory.

        Raises:
            AgentFailed: a file of the recipe's directory cannot be read.
        """
        self._spec = spec
        self._files = files_of(spec)
        self._run_enclosed = run_enclosed
        self._port_of = port_of
        self._timeout_s = timeout_s
        self._permits = asyncio.Semaphore(spec.concurrency)

    async def run(self, job: AgentJob, taken: asyncio.Event) -> float | None:
        """Run the command to its end; a reward that it posts can only lower the environment's.

        Raises:
            AgentFailed: it cannot be started, did not exit with 0, or printed too much.
        """
        told = _told(job)
        name = told.pop("id")
        async with self._permits:
            taken.set()
            _check(await self._ended(name, self._spec.command or (), **told))
        return None

    async def check(self, trajectory: str) -> None:
        """Look for the program in the sandbox of a trajectory.

        Raises:
            AgentFailed: it is not there.
        """
        program = (self._spec.command or ("",))[0]
        look = ("/bin/sh", "-c", 'command -v -- "$1" >/dev/null', "sh", program)
        end = await self._ended(trajectory, look, task="", api_key="", model="")
        if end.code:
            raise AgentFailed(
                f"there is no program {program!r} in the sandbox that the agent is to run in",
                hint="environment.sandbox: {readable: [DIRECTORY]} shows one of this host there; "
                "of agent.directory there is a copy at $HOME: command: [sh, -c, 'exec $HOME/...']",
            )

    async def _ended(self, trajectory: str, command: Sequence[str], **told: Any) -> CommandEnd:
        job = EnclosedJob(
            command=command,
            env=_variables(self._spec),
            files=self._files,
            port=self._port_of(),
            timeout_s=self._timeout_s,
            **told,
        )
        try:
            return await self._run_enclosed(trajectory, job)
        except EnvironmentBroken as error:
            raise AgentFailed(str(error), hint=error.hint) from error

    async def close(self) -> None:
        """Do nothing, since agents end with the sandboxes."""


def _variables(spec: AgentSpec) -> dict[str, str]:
    secrets = {name: secret.get_secret_value() for name, secret in spec.secrets.items()}
    return {**spec.env, **secrets}


def _told(job: AgentJob) -> dict[str, Any]:
    return {
        "id": job.id,
        "task": to_json(job.task),
        "api_key": job.api_key,
        "model": job.model,
        "models": list(job.models),
    }


def _check(end: CommandEnd) -> None:
    """Raise AgentFailed if a command did not end well."""
    if end.flooded:
        raise AgentFailed(f"the agent printed more than {MOST_OUTPUT // 1024**2} MiB")
    if end.code:
        ended = f"exit status {end.code}" if end.code > 0 else f"signal {-end.code}"
        raise AgentFailed(f"the agent ended with {ended}: {end.words or 'it printed nothing'}")


def to_json(value: object) -> str:
    """JSON of what a task may hold: other mappings than dicts, and numbers of other libraries."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") else str(value)


class ExternalRunner:
    """Gives jobs to whoever fetches them, in order; see ``AgentServer``."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[AgentJob, asyncio.Event]] = asyncio.Queue()

    async def run(self, job: AgentJob, taken: asyncio.Event) -> float | None:
        """Offer it, and wait for ever: such an agent ends by its reward."""
        self._waiting.put_nowait((job, taken))
        await asyncio.get_running_loop().create_future()
        return None

    async def next_job(
        self, wait_s: float, wanted: Callable[[AgentJob], bool], is_there: Callable[[], bool]
    ) -> AgentJob | None:
        """The next job that is still ``wanted``, or None if there is none for so long.

        It is left to the next who asks if whoever asks for it now is not there any more.
        """
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    job, taken = await self._waiting.get()
                    if not is_there():
                        self._waiting.put_nowait((job, taken))
                        return None
                    if wanted(job):
                        taken.set()
                        return job
        except TimeoutError:
            return None

    async def close(self) -> None:
        """Do nothing, since agents that live elsewhere share nothing here."""
