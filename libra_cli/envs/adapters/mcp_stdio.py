"""MCP over stdio: a server that is started for one episode, and ends with it.

A message is a line of JSON. What the server prints that is none is left out; what it says on stderr
is kept for the error that tells how it ended. It runs where the environment runs, in a process
group of its own, and sees HOME, its own variables, and what an agent's command sees of the
environment's (``inherited`` of ``envs.agents.workplace``). When the episode is over its stdin is
closed, upon which it ends, as the protocol says; what is left of its group then is killed. If the
process of the environment is killed, nobody does that: the end of its stdin is all it is told.

https://modelcontextprotocol.io/specification/2025-11-25/basic/transports
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.adapters.mcp_client import LARGEST_MESSAGE
from libra_cli.envs.agents.workplace import inherited

GRACE_S = 2.0
"""Seconds that a server may take to end after its stdin is closed."""
LAST_WORDS = 2000
"""Bytes of stderr that are kept."""
_NO_SUCH_METHOD = -32601


@dataclass(frozen=True, slots=True)
class _Server:
    process: Process
    transport: asyncio.SubprocessTransport
    orders: StreamWriter
    answers: StreamReader
    listening: asyncio.Task[None]
    """Keeps the last of what it says on stderr."""


class StdioTransport:
    """The server that ``command`` starts, with ``env`` beside what every server sees."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command = tuple(command)
        self._env = env
        self._server: _Server | None = None
        self._words = bytearray()

    async def open(self) -> None:
        """Start the server.

        Raises:
            EnvironmentBroken: there is no such program.
        """
        home = {name: os.environ[name] for name in ("HOME",) if name in os.environ}
        try:
            # As create_subprocess_exec does, which keeps to itself what closes the pipes.
            loop = asyncio.get_running_loop()
            transport, protocol = await loop.subprocess_exec(
                lambda: SubprocessStreamProtocol(LARGEST_MESSAGE, loop),
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env={**inherited(), **home, **self._env},
                start_new_session=True,
            )
        except OSError as error:
            raise self.broken(f"it cannot be started: {error.strerror}") from error
        process = Process(transport, protocol, loop)
        orders, answers, words = process.stdin, process.stdout, process.stderr
        assert orders is not None
        assert answers is not None
        assert words is not None
        listening = asyncio.create_task(self._listen(words))
        self._server = _Server(process, transport, orders, answers, listening)

    def agreed(self, version: str) -> None:
        """Do nothing: messages over stdio do not name the version."""

    async def send(self, message: Mapping[str, Any], wanted: int | None) -> Mapping[str, Any]:
        """Send a message, and return the answer that has the id ``wanted``.

        Raises:
            EnvironmentBroken: the server has ended.
        """
        server = self._server
        assert server is not None
        try:
            await _write(server, message)
            while wanted is not None:
                said = await _read(server)
                if "method" in said:
                    await _refuse(server, said)
                elif said.get("id") == wanted:
                    return said
        except (OSError, ValueError) as error:  # a line that is too long is a ValueError
            await asyncio.wait([server.listening], timeout=GRACE_S)
            words = self._words.decode(errors="replace").strip()
            raise self.broken(f"{error}; it said last: {words}" if words else str(error)) from error
        return {}

    async def close(self) -> None:
        """Close its stdin, wait a little for its end, and kill what is left of its group."""
        if (server := self._server) is None:
            return
        lived = server.process.returncode is None
        server.orders.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(server.process.wait()), GRACE_S)
        if lived:  # so its number is still its group's: numbers are given out in turn
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(server.process.wait()), GRACE_S)
        server.transport.close()  # who has left the group may hold its pipes on
        server.listening.cancel()

    async def _listen(self, words: StreamReader) -> None:
        while said := await words.read(4096):
            self._words += said
            del self._words[:-LAST_WORDS]

    def broken(self, why: str) -> EnvironmentBroken:
        """Return the error that names the command and how to try it."""
        command = shlex.join(self._command)
        return EnvironmentBroken(
            f"the MCP server {command!r}: {why}",
            hint="environment.mcp: {command: [PROGRAM, ARGUMENT]} is started for each episode, on "
            "the host where the environment runs; type the command there to see what it says",
        )


async def _write(server: _Server, message: Mapping[str, Any]) -> None:
    server.orders.write(json.dumps(message).encode() + b"\n")
    await server.orders.drain()


async def _read(server: _Server) -> Mapping[str, Any]:
    """Return the next line that is a message; others are what a library has printed."""
    while line := await server.answers.readline():
        with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
            if isinstance(message := json.loads(line), dict):
                return message
    raise ConnectionResetError("it ended")


async def _refuse(server: _Server, asked: Mapping[str, Any]) -> None:
    """Answer what the server asks: a ping is answered, and everything else is not offered."""
    if "id" not in asked:
        return
    answer: dict[str, Any] = {"result": {}}
    if asked["method"] != "ping":
        answer = {"error": {"code": _NO_SUCH_METHOD, "message": f"no {asked['method']} here"}}
    await _write(server, {"jsonrpc": "2.0", "id": asked["id"], **answer})
