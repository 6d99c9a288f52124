"""The stream to a host that runs agents, whatever comes of it."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import msgpack
import pytest
from yarl import URL

from libra_cli.config.errors import AgentFailed
from libra_cli.envs.agents.host import AgentHost
from libra_cli.envs.agents.messages import message
from libra_cli.runtime.agents.nodes import AgentNodeConnection
from libra_cli.runtime.processes import carried

DEADLINE_S = 20
NOBODY = 9
"""A port where nobody listens."""


class Stream:
    """Says what it is given, and then nothing until it is closed."""

    errors = ""

    def __init__(self, *said: bytes) -> None:
        self.said = list(said)
        self.heard = b""
        self.answered = asyncio.Event()
        self.closed = asyncio.Event()

    async def read(self) -> bytes:
        if self.said:
            return self.said.pop(0)
        await self.closed.wait()
        return b""

    async def write(self, data: bytes) -> None:
        self.heard += data
        self.answered.set()

    async def end_input(self) -> None:
        self.closed.set()

    async def close(self) -> None:
        self.closed.set()

    @property
    def messages(self) -> list[list[object]]:
        unpacker = msgpack.Unpacker()
        unpacker.feed(self.heard)
        return list(unpacker)


class Link:
    """The controller's end of a stream whose other end is a host's process."""

    errors = ""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read(self) -> bytes:
        return await self.reader.read(65536)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def end_input(self) -> None:
        self.writer.write_eof()

    async def close(self) -> None:
        self.writer.close()


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The endpoint: a line comes back in capitals."""
    writer.write((await reader.readline()).upper())
    writer.close()


def test_a_connection_that_sends_more_than_is_read_is_closed_and_stays_closed(monkeypatch):
    monkeypatch.setattr(carried, "MOST_WAITING", 1000)

    async def main() -> list[list[object]]:
        flood = b"".join(message("data", 1, b"x" * 400) for _ in range(4))
        stream = Stream(flood, message("data", 1, b"more"))
        connection = AgentNodeConnection("a", stream, NOBODY)  # type: ignore[arg-type]
        await asyncio.wait_for(stream.answered.wait(), DEADLINE_S)
        assert not connection._carried._requests
        await connection.close()
        return stream.messages

    assert asyncio.run(main())[:1] == [["close", 1, None]]


async def answers_in_another_order(root: Path) -> list[bytes]:
    """What two agents of one host are answered when the second to connect speaks first."""
    here, there = socket.socketpair()
    orders, output = await asyncio.open_connection(sock=there)
    host = AgentHost(root, output)
    serving = asyncio.create_task(host.serve(orders))
    serving.add_done_callback(lambda _: output.close())
    endpoint = await asyncio.start_server(shout, "127.0.0.1", 0)
    link = Link(*await asyncio.open_connection(sock=here))
    port = endpoint.sockets[0].getsockname()[1]
    connection = AgentNodeConnection("a", link, port)  # type: ignore[arg-type]
    await connection.hello({"command": [sys.executable], "env": {}, "files": []})
    url = URL(host._url)
    first, second = [await asyncio.open_connection(url.host, url.port) for _ in range(2)]
    answers = []
    for reader, writer in (second, first):
        writer.write(b"turn\n")
        answers.append(await reader.readline())
        writer.close()
    await connection.close()
    endpoint.close()
    return answers


def test_agents_are_answered_in_whatever_order_they_speak_after_connecting(tmp_path):
    scene = asyncio.wait_for(answers_in_another_order(tmp_path), DEADLINE_S)
    assert asyncio.run(scene) == [b"TURN\n", b"TURN\n"]


@pytest.mark.parametrize(
    "said",
    [
        b"\xc1",
        msgpack.packb(3),
        msgpack.packb([1, 2]),
        msgpack.packb(["data", [], b""]),
        msgpack.packb(["data", 1, None]),
        msgpack.packb({"a": {}}),
        b"\x91" * 5000,
    ],
    ids=repr,
)
def test_nonsense_ends_the_host_for_those_who_wait(said):
    async def main() -> None:
        stream = Stream(said)
        connection = AgentNodeConnection("a", stream, NOBODY)  # type: ignore[arg-type]
        with pytest.raises(AgentFailed, match=r"cannot be read"):
            await asyncio.wait_for(connection.run({"id": "1"}), DEADLINE_S)
        await connection.close()

    asyncio.run(main())
