"""MCP over streamable HTTP: a server that runs somewhere, behind a URL.

Requests are answered with JSON, or with a stream of events, of which the one with the request's id
is the answer.

https://modelcontextprotocol.io/specification/2025-11-25/basic/transports
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.adapters.mcp_client import LARGEST_MESSAGE


class HttpTransport:
    """The server at ``url``; ``headers`` go with every request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = {"Accept": "application/json, text/event-stream", **headers}
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make a session of HTTP, which connects with its first request."""
        self._http = aiohttp.ClientSession(read_bufsize=LARGEST_MESSAGE)

    def agreed(self, version: str) -> None:
        """Name this protocol version in every later request."""
        self._headers["MCP-Protocol-Version"] = version

    async def close(self) -> None:
        """End the session at the server, if that can be reached, and close the connection."""
        if self._http is None:
            return
        if "Mcp-Session-Id" in self._headers:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with self._http.delete(self._url, headers=self._headers):
                    pass
        await self._http.close()

    async def send(self, message: Mapping[str, Any], wanted: int | None) -> Mapping[str, Any]:
        """Send a message, and return the answer that has the id ``wanted``.

        Raises:
            EnvironmentBroken: the server did not answer.
        """
        assert self._http is not None
        try:
            async with self._http.post(self._url, json=message, headers=self._headers) as response:
                if response.status >= 400:
                    words = (await response.content.read(300)).decode(errors="replace")
                    raise self.broken(f"HTTP {response.status}: {words}")
                if "Mcp-Session-Id" in response.headers:
                    self._headers["Mcp-Session-Id"] = response.headers["Mcp-Session-Id"]
                if wanted is None:
                    return {}
                if response.content_type == "text/event-stream":
                    return await self._event(response, wanted)
                return await _json(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self.broken(f"{type(error).__name__}: {error}") from error

    async def _event(self, response: aiohttp.ClientResponse, wanted: int) -> Mapping[str, Any]:
        data = ""
        async for line in response.content:
            text = line.decode().rstrip("\r\n")
            if text.startswith("data:"):
                data += text[5:].removeprefix(" ")
                _check_size(len(data))
            elif not text and data:
                message = json.loads(data)
                if message.get("id") == wanted and "method" not in message:
                    return message  # type: ignore[no-any-return]
                data = ""
        raise self.broken("the stream ended without an answer")

    def broken(self, why: str) -> EnvironmentBroken:
        """Return the error that names the server and what a URL has to be."""
        return EnvironmentBroken(
            f"the MCP server {self._url}: {why}",
            hint="environment.mcp takes the URL of an MCP server's streamable HTTP, which often "
            "ends in /mcp; a key goes to its headers",
        )


async def _json(response: aiohttp.ClientResponse) -> Mapping[str, Any]:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        _check_size(len(body))
    return json.loads(body)  # type: ignore[no-any-return]


def _check_size(size: int) -> None:
    """Raise ValueError for an answer that is too long: the model may ask for as much as it likes,
    and the process that reads it is the controller's, or holds other episodes too."""
    if size > LARGEST_MESSAGE:
        raise ValueError(f"an answer has more than {LARGEST_MESSAGE:,} bytes")
