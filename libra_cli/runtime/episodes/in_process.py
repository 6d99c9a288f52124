"""An environment in the controller's process: sync members in threads, async ones on its loop.

Environments are code of others, which may block for ever and would fill a fixed pool of threads. So
each call has a daemon thread, and one that does not return keeps it. Python runs one thread at a
time: an environment that computes for long belongs in a worker process (``environment.workers``).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from libra_cli.envs.agents.command import CommandEnd
from libra_cli.envs.agents.enclosed import EnclosedJob
from libra_cli.envs.protocol import Environment, Task, ToolCall
from libra_cli.envs.session import (
    Answered,
    Conversation,
    EnvironmentSession,
    Opening,
    Preparations,
    Raised,
    Scored,
    ToolAnswer,
)
from libra_cli.runtime.episodes.calls import CallLine
from libra_cli.runtime.hosts.threads import Threads
from libra_cli.runtime.supervision.background import Background

_closing = Background()


class InProcessEnvironment:
    """The environment of one episode in this process, as an ``EpisodeEnvironment``."""

    def __init__(self, name: str, make: Callable[[], Environment], threads: Threads) -> None:
        """``make`` is called by the first call, where sync members run."""
        self._threads = threads
        self._session = EnvironmentSession(name, make, self._run)
        self._awaiting = False

    async def preparations(self) -> Preparations:
        return await self._session.preparations()

    async def prepare(self, task: Task) -> Preparations:
        return await self._session.prepare(task)

    async def reset(self, task: Task | None, index: int, task_seed: int, seed: int) -> Opening:
        return await self._session.reset(task, index, task_seed, seed)

    async def step(self, call: ToolCall) -> ToolAnswer:
        return await self._session.step(call)

    async def reply(self, text: str) -> Answered:
        return await self._session.reply(text)

    async def score(self, answer: str, conversation: Conversation) -> Scored:
        return await self._session.score(answer, conversation)

    async def run_agent(self, job: EnclosedJob) -> CommandEnd:
        return await self._session.run_agent(job.as_dict())

    def close(self, line: CallLine) -> None:
        """Close the environment as soon as nothing runs in it.

        A member that is awaited is cancelled, an agent is ended with its sandbox's processes; else
        one in a thread can only be waited for.
        """
        if line.last is None or not line.hung:
            self._close()
            return
        if self._awaiting:
            line.last.cancel()
        self._threads.run(lambda: _quietly(self._session.stop_agent))
        line.last.add_done_callback(lambda _: self._close())

    def _close(self) -> None:
        close = self._session.close_member
        if close is None:
            return
        if inspect.iscoroutinefunction(close):
            _closing.start("closing an environment", _quietly_awaited(close))
        else:
            self._threads.run(lambda: _quietly(close))

    async def _run(self, member: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(member):
            return await self._awaited(member(*arguments))
        returned = await self._in_thread(lambda: member(*arguments))
        return await self._awaited(returned) if inspect.isawaitable(returned) else returned

    async def _awaited(self, returned: Awaitable[Any]) -> Any:
        self._awaiting = True
        try:
            return await returned
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # As a task's own exception, SystemExit would end the event loop.
            raise Raised(error) from error
        finally:
            self._awaiting = False

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, failure: Raised | None) -> None:
            if future.done():
                return  # the loop is ending and has cancelled everything
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

        def work() -> None:
            result, failure = None, None
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  an environment may raise SystemExit
                failure = Raised(error)
            # RuntimeError: the loop is closed, the run has ended, and nobody waits for this.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, failure)

        self._threads.run(work)
        return await future


def _quietly(close: Callable[[], object]) -> None:
    # The episode is over and its reward counted, so an error here changes nothing.
    with contextlib.suppress(BaseException):
        close()


async def _quietly_awaited(close: Callable[[], Awaitable[object]]) -> None:
    with contextlib.suppress(Exception):
        await close()
