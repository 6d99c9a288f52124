"""The controller's side of a control stream: a client of one process (``libra_cli.node.control``).

One connection carries every call. It is made by the first, and made again by the next one after it
was lost.
"""

from __future__ import annotations

import asyncio

from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.processes.stream import Answer, Stream, StreamErrors

RETRY_S = 0.25


class ControlClient:
    """Calls the operations of one process over a control stream, opened when it is needed."""

    def __init__(
        self, who: str, endpoint: Endpoint, token: str, errors: StreamErrors, *, silence_s: float
    ) -> None:
        """Take what ``Stream`` takes; nothing is opened before the first call."""
        self._who = who
        self._endpoint = endpoint
        self._token = token
        self._errors = errors
        self._silence_s = silence_s
        self._stream: Stream | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def close(self) -> None:
        """Drop the connection; the process itself is not touched."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    async def _connected(self) -> Stream:
        async with self._connecting:
            if self._closed:
                raise self._errors.unreachable(f"{self._who} is being stopped")
            if self._stream is None or self._stream.closed:
                stream = Stream(self._who, self._token, self._errors, silence_s=self._silence_s)
                await stream.connect(self._endpoint)
                self._stream = stream
            return self._stream

    async def _call(
        self, operation: str, order: Answer, *, timeout_s: float | None = None
    ) -> Answer:
        """The answer to an order, however long the process takes, or ``timeout_s`` at most.

        Raises:
            LibraError: of the kinds that this client was made with.
        """
        stream = await self._connected()
        call, answer = stream.begin(operation, order)
        return await self._answer(stream, call, answer, operation, timeout_s)

    async def _answer(
        self,
        stream: Stream,
        call: int,
        answer: asyncio.Future[Answer],
        operation: str,
        timeout_s: float | None,
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise self._errors.unreachable(
                f"{self._who}: no answer to {operation} in {timeout_s:.0f} s"
            ) from error
        finally:
            stream.forget(call)

    async def _persist(self, operation: str, order: Answer, *, patience_s: float) -> Answer:
        """The answer to an order that may be repeated, which is done while no answer comes.

        The process may be out of reach for ``patience_s``.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + patience_s
        while True:
            try:
                return await self._call(operation, order)
            except self._errors.unreachable:
                heard_at = self._stream.heard_at if self._stream is not None else 0.0
                give_up = max(give_up, heard_at + patience_s)
                if self._closed or loop.time() > give_up:
                    raise
            await asyncio.sleep(RETRY_S)
