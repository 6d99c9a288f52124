"""Gives any environment the tools of MCP servers, beside its own.

The recipe names the servers; ``{NAME}`` in a header, or in a
variable of a command, is the secret of that name::

    environment:
      name: my_package.research:Research
      secrets: {SEARCH: "${SEARCH_KEY}"}
      mcp:
        - http://127.0.0.1:8000/mcp
        - {url: https://search.example/mcp, name: web, headers: {Authorization: "Bearer {SEARCH}"}}
        - {command: [uvx, mcp-server-git], name: git, env: {TOKEN: "{SEARCH}"}}

The tools are listed at every reset, in a session of the episode's own, and keep their schemas. With
``name: web`` they are called ``web_...``. A tool that says that it failed is an error that the
model reads; a server that does not answer breaks the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs import registry
from libra_cli.envs.adapters.mcp_client import McpSession, McpTransport
from libra_cli.envs.adapters.mcp_http import HttpTransport
from libra_cli.envs.adapters.mcp_stdio import StdioTransport
from libra_cli.envs.protocol import Message, Task, ToolCall, ToolSchema
from libra_cli.envs.sandbox.sandboxes import Sandboxes

_SECRET = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server of tools. ``name`` begins the names of its tools, if it is given."""

    url: str | None = None
    """Where it is; None: it is started by ``command``."""
    name: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers as the recipe has them; a secret's name in braces stands for the secret."""
    command: Sequence[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the command, with secrets as headers have them."""

    @property
    def place(self) -> str:
        """Return its URL or its command, as errors name it."""
        return self.url if self.url is not None else shlex.join(self.command or ())

    def transport(self) -> McpTransport:
        """Return what carries the messages of one session."""
        if self.url is not None:
            return HttpTransport(self.url, self.headers)
        return StdioTransport(self.command or (), self.env)


class WithMcpTools:
    """The environment ``environment`` of the recipe, made from ``args``, with MCP servers' tools.

    ``servers`` have the keys of the recipe's ``environment.mcp``. The other members are that
    environment's, which gets the ``secrets``, the ``run_directory`` and the ``sandbox`` if it takes
    them.

    Raises:
        EnvironmentBroken: it cannot be made, or a header or a variable names a secret that
            there is not.
    """

    def __init__(
        self,
        environment: str,
        args: Mapping[str, Any],
        servers: Sequence[Mapping[str, Any]],
        secrets: Mapping[str, str] | None = None,
        run_directory: str | None = None,
        sandbox: Sandboxes | None = None,
    ) -> None:
        given = dict(args)
        if secrets and registry.takes(registry.find(environment), "secrets"):
            given["secrets"] = secrets
        told = None if sandbox is None else sandbox.spec.as_json()
        self._inner = registry.maker(environment, given, run_directory, told)()
        self._servers = [_with_secrets(McpServer(**one), secrets or {}) for one in servers]
        self._sessions: list[McpSession] = []
        self._places: dict[str, tuple[McpSession, str]] = {}
        """The session of each tool, and the tool's name there."""
        self._tools: list[ToolSchema] = []

    def __getattr__(self, name: str) -> Any:
        """Whatever else the environment has, such as ``reply``."""
        return getattr(self._inner, name)

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The environment's own tools, then those of the servers."""
        return [*self._inner.tools, *self._tools]

    # Not `async def`, so that a synchronous environment's members still run in a thread of theirs.
    # What is returned is awaited on the event loop.
    def reset(self, task: Task, seed: int) -> Any:
        """Begin the task, and list the tools of the servers."""
        return self._opened(self._inner.reset(task, seed))

    def step(self, call: ToolCall) -> Any:
        """Run a tool of the environment, or call one of a server."""
        if call.name not in self._places:
            return self._inner.step(call)
        session, name = self._places[call.name]
        return session.call(name, call.arguments)

    async def close(self) -> None:
        """Close the MCP sessions first, then the environment, if it has ``close``."""
        await asyncio.gather(*(one.close() for one in self._sessions))
        close = getattr(self._inner, "close", None)
        if inspect.iscoroutinefunction(close):
            await close()
        elif close is not None:
            await _in_a_daemon_thread(close)

    async def _opened(self, reset: Any) -> list[Message]:
        messages: list[Message] = await reset if inspect.isawaitable(reset) else reset
        self._sessions = [McpSession(one.transport()) for one in self._servers]
        await asyncio.gather(*(one.open() for one in self._sessions))
        listed = await asyncio.gather(*(one.tools() for one in self._sessions))
        for server, session, tools in zip(self._servers, self._sessions, listed, strict=True):
            for tool in tools:
                self._add(server, session, tool)
        return messages

    def _add(self, server: McpServer, session: McpSession, tool: ToolSchema) -> None:
        name = tool["function"]["name"]
        shown = f"{server.name}_{name}" if server.name else name
        if any(one["function"]["name"] == shown for one in self.tools):
            raise EnvironmentBroken(
                f"two tools are called {shown!r}; one is the MCP server's {server.place}",
                hint=f"a `name: NAME` beside it in environment.mcp calls it NAME_{name}",
            )
        self._places[shown] = (session, name)
        self._tools.append({**tool, "function": {**tool["function"], "name": shown}})


async def _in_a_daemon_thread(close: Callable[[], object]) -> None:
    # One of asyncio's own pool that never returns would keep the process from ending.
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        with contextlib.suppress(BaseException):
            close()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=work, name="libra-mcp-close", daemon=True).start()
    await closed.wait()


def _with_secrets(server: McpServer, secrets: Mapping[str, str]) -> McpServer:
    def secret(name: re.Match[str]) -> str:
        if name[1] in secrets:
            return secrets[name[1]]
        raise EnvironmentBroken(
            f"environment.mcp: {server.place} names {name[1]}, which is not in environment.secrets",
            hint=f'environment: {{secrets: {{{name[1]}: "${{{name[1]}}}"}}}}, '
            f"and export {name[1]}=...",
        )

    def filled(texts: Mapping[str, str]) -> dict[str, str]:
        return {key: _SECRET.sub(secret, value) for key, value in texts.items()}

    return replace(server, headers=filled(server.headers), env=filled(server.env))
