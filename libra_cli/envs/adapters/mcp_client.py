"""Speaks to a server of tools by MCP, the Model Context Protocol, over whichever transport it has.

It is written here, and not taken from the package ``mcp``, since an episode of four requests costs
3.7 ms of CPU instead of 34, all of it on the controller (one core, 16 episodes at a time, mcp
2.3.0, over HTTP). What that package makes is what the tests call.

A session begins with ``initialize``, the handshake of protocol versions 2025-03-26 to 2025-11-25,
which servers of version 2026-07-28 answer as well unless they refuse it. A server that keeps state
keeps it per session, so each episode has one. A server may not ask anything back: this client
offers neither sampling nor elicitation.

https://modelcontextprotocol.io/specification/2025-11-25/basic
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.adapters.content import json_of, told
from libra_cli.envs.protocol import ToolFailed, ToolSchema

VERSION = "2025-11-25"
LARGEST_MESSAGE = 16 * 1024 * 1024
"""Bytes of an answer; a longer one breaks the episode."""
_INVALID_PARAMS = -32602


class McpTransport(Protocol):
    """Carries the messages of one session."""

    async def open(self) -> None:
        """Connect.

        Raises:
            EnvironmentBroken: there is no such server.
        """

    async def send(self, message: Mapping[str, Any], wanted: int | None) -> Mapping[str, Any]:
        """Send a message, and return the answer that has the id ``wanted``; None: do not wait.

        Raises:
            EnvironmentBroken: the server did not answer.
        """

    def agreed(self, version: str) -> None:
        """Use this protocol version, which the server has chosen, from now on."""

    def broken(self, why: str) -> EnvironmentBroken:
        """Return the error that names the server and what to do."""

    async def close(self) -> None:
        """End the session at the server, if that can be reached, and the connection."""


class McpSession:
    """One session with the server that the transport reaches."""

    def __init__(self, transport: McpTransport) -> None:
        self._transport = transport
        self._id = 0

    async def open(self) -> None:
        """Begin the session.

        Raises:
            EnvironmentBroken: there is no such server.
        """
        await self._transport.open()
        client = {"name": "libra", "version": "1"}
        begun = await self._ask(
            "initialize",
            {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client},
        )
        self._transport.agreed(str(begun["protocolVersion"]))
        begins = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        await self._transport.send(begins, None)

    async def tools(self) -> list[ToolSchema]:
        """List the tools of all pages, with the JSON Schemas that the server gave them."""
        found: list[ToolSchema] = []
        cursor: dict[str, Any] = {}
        while True:
            page = await self._ask("tools/list", cursor)
            for tool in page["tools"]:
                described = {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool["inputSchema"],
                }
                found.append({"type": "function", "function": described})
            if not page.get("nextCursor"):
                return found
            cursor = {"cursor": page["nextCursor"]}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its text, or its structured content as JSON where it has none.

        Raises:
            ToolFailed: the tool says that it failed, or that the arguments do not fit.
            EnvironmentBroken: the server did not answer.
        """
        result = await self._ask("tools/call", {"name": name, "arguments": dict(arguments)})
        text = told(result.get("content") or [])
        if not text and result.get("structuredContent") is not None:
            text = json_of(result["structuredContent"])
        if result.get("isError"):
            raise ToolFailed(text)
        return text

    async def close(self) -> None:
        """End the session at the server, if that can be reached, and close the connection."""
        await self._transport.close()

    async def _ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        self._id += 1
        request = {"jsonrpc": "2.0", "id": self._id, "method": method, "params": params}
        answer = await self._transport.send(request, self._id)
        error = answer.get("error")
        if error is None:
            return answer["result"]  # type: ignore[no-any-return]
        if method == "tools/call" and error.get("code") == _INVALID_PARAMS:
            raise ToolFailed(str(error.get("message")))
        why = f"{method}: {error.get('message')} ({error.get('code')})"
        raise self._transport.broken(why)
