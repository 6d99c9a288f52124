"""The frozen models of a run for environments on other hosts: a port of such a host's loopback.

What connects there is carried over the stream of a process on that host to the controller's
endpoint (``runtime.frozen.endpoint``), which asks for the key as it does here.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

from libra_cli.config.errors import HostError
from libra_cli.envs.agents.messages import MessageReader, Say, message
from libra_cli.runtime.hosts.transport import ByteStream
from libra_cli.runtime.processes.carried import CarriedConnections
from libra_cli.runtime.processes.outbox import Outbox
from libra_cli.runtime.supervision.answers import understood
from libra_cli.runtime.supervision.background import Background

MODULE = "libra_cli.envs.agents.carried"
START_S = 60.0
"""How long a host may take until it listens."""


class ModelsPort:
    """A port of one host, for as long as its stream is open."""

    def __init__(self, node: str, stream: ByteStream, endpoint: str) -> None:
        """``endpoint`` is the URL on the controller's loopback to which it leads."""
        self._node = node
        self._stream = stream
        self._outbox = Outbox(stream)
        self._background = Background()
        port = urlsplit(endpoint).port or 0
        self._carried = CarriedConnections(node, port, self._say, self._background)
        self._ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._listening = self._background.start(f"hearing the port of {node}", self._listen())
        self.ended = False
        """Whether nothing is carried any more."""

    async def url(self) -> str:
        """Return the endpoint's URL on that host, once it listens there.

        Raises:
            HostError: it does not.
        """
        try:
            async with asyncio.timeout(START_S):
                return f"http://127.0.0.1:{await self._ready}"
        except TimeoutError as error:
            raise HostError(
                f"{self._node}: no port for models within {START_S:g} s: {self._stream.errors}"
            ) from error

    async def close(self) -> None:
        """Close the stream, with which the process on the host ends."""
        await self._outbox.close()
        await self._stream.close()
        await self._background.close()

    def _say(self, say: Say, number: int, body: Any) -> None:
        self._outbox.put(message(say, number, body))

    async def _listen(self) -> None:
        why = HostError(f"{self._node}: the process that leads to models has ended")
        reader = MessageReader()
        try:
            with understood(HostError, f"{self._node}: what leads to models"):
                while data := await self._stream.read():
                    for told in reader.feed(data):
                        self._take(*told)
        except HostError as error:
            why = error
        self.ended = True
        self._carried.end()
        if not self._ready.done():
            self._ready.set_exception(why)
            self._ready.exception()  # nobody may wait for it

    def _take(self, say: Say, number: int, body: Any) -> None:
        if say == "ready" and not self._ready.done():
            self._ready.set_result(int(body))
        else:
            self._carried.take(say, number, body)
