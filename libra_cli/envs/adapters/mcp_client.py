"""Speaks to a server of tools by MCP: streamable HTTP, the Model Context Protocol's way over a URL.

It is written here, and not taken from the package ``mcp``, since an episode of four requests costs
3.7 ms of CPU instead of 34, all of it on the controller (one core, 16 episodes at a time, mcp
2.3.0). What that package makes is what the tests call.

A session begins with ``initialize``, the handshake of protocol versions 2025-03-26 to 2025-11-25,
which servers of version 2026-07-28 answer as well unless they refuse it. A server that keeps state
keeps it per session, so each episode has one. Requests are answered with JSON, or with a stream of
events, of which the one with the request's id is the answer. A server may not ask anything back:
this client offers neither sampling nor elicitation.

https://modelcontextprotocol.io/specification/2025-11-25/basic/transports
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.adapters.content import text_of
from libra_cli.envs.protocol import ToolFailed, ToolSchema

VERSION = "2025-11-25"
LARGEST_EVENT = 16 * 1024 * 1024
"""Bytes of one line of a stream of events; a longer one breaks the episode."""
_INVALID_PARAMS = -32602


class McpSession:
    """One session with the server at ``url``; ``headers`` go with every request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = {"Accept": "application/json, text/event-stream", **headers}
        self._http: aiohttp.ClientSession | None = None
        self._id = 0

    async def open(self) -> None:
        """Begin the session.

        Raises:
            EnvironmentBroken: there is no such server.
        """
        self._http = aiohttp.ClientSession(read_bufsize=LARGEST_EVENT)
        client = {"name": "libra", "version": "1"}
        begun = await self._ask(
            "initialize",
            {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client},
        )
        self._headers["MCP-Protocol-Version"] = str(begun["protocolVersion"])
        await self._post({"jsonrpc": "2.0", "method": "notifications/initialized"}, None)

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
        """Call a tool and return its text.

        Raises:
            ToolFailed: the tool says that it failed, or that the arguments do not fit.
            EnvironmentBroken: the server did not answer.
        """
        result = await self._ask("tools/call", {"name": name, "arguments": dict(arguments)})
        text = text_of(result.get("content") or "")
        if result.get("isError"):
            raise ToolFailed(text)
        return text

    async def close(self) -> None:
        """End the session at the server, if that can be reached, and close the connection."""
        if self._http is None:
            return
        if "Mcp-Session-Id" in self._headers:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with self._http.delete(self._url, headers=self._headers):
                    pass
        await self._http.close()

    async def _ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        self._id += 1
        request = {"jsonrpc": "2.0", "id": self._id, "method": method, "params": params}
        answer = await self._post(request, self._id)
        error = answer.get("error")
        if error is None:
            return answer["result"]  # type: ignore[no-any-return]
        if method == "tools/call" and error.get("code") == _INVALID_PARAMS:
            raise ToolFailed(str(error.get("message")))
        raise self._broken(f"{method}: {error.get('message')} ({error.get('code')})")

    async def _post(self, message: Mapping[str, Any], wanted: int | None) -> Mapping[str, Any]:
        """Send a message, and return the answer that has the id ``wanted``."""
        assert self._http is not None
        try:
            async with self._http.post(self._url, json=message, headers=self._headers) as response:
                if response.status >= 400:
                    raise self._broken(f"HTTP {response.status}: {(await response.text())[:300]}")
                if "Mcp-Session-Id" in response.headers:
                    self._headers["Mcp-Session-Id"] = response.headers["Mcp-Session-Id"]
                if wanted is None:
                    return {}
                if response.content_type == "text/event-stream":
                    return await self._event(response, wanted)
                return await response.json()  # type: ignore[no-any-return]
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._broken(f"{type(error).__name__}: {error}") from error

    async def _event(self, response: aiohttp.ClientResponse, wanted: int) -> Mapping[str, Any]:
        data = ""
        async for line in response.content:
            text = line.decode().rstrip("\r\n")
            if text.startswith("data:"):
                data += text[5:].removeprefix(" ")
            elif not text and data:
                message = json.loads(data)
                if message.get("id") == wanted and "method" not in message:
                    return message  # type: ignore[no-any-return]
                data = ""
        raise self._broken("the stream ended without an answer")

    def _broken(self, why: str) -> EnvironmentBroken:
        return EnvironmentBroken(
            f"the MCP server {self._url}: {why}",
            hint="environment.mcp takes the URL of an MCP server's streamable HTTP, which often "
            "ends in /mcp; a key goes to its headers",
        )
