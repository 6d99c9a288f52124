"""The order of one model's requests: each has a number, and they are carried out by it.

A client sends several at once, and they may arrive in any order; one that is sent again has the
number that it had.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from libra_cli.config.errors import LibraError

MISSING_S = 600.0
"""How long a request waits for the ones before it, which may never come; chosen."""


class Turns:
    """The requests of one model, by the numbers that its client has given them, from 1."""

    def __init__(self, missing_s: float = MISSING_S) -> None:
        self.known: dict[int, str] = {}
        """The id under which the outcome of a request is asked for, by its number."""
        self._next = 1
        self._missing_s = missing_s
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Wait until it is a request's turn; when it ends, however, it is the next one's.

        Raises:
            LibraError: one before it has not come in time.
        """
        async with self._changed:
            try:
                async with asyncio.timeout(self._missing_s):
                    await self._changed.wait_for(lambda: self._next == number)
            except TimeoutError as error:
                raise LibraError(
                    f"request {number} waited {self._missing_s:.0f} s for request {self._next}",
                    hint="create another training client, from a saved state if there is one",
                ) from error
        try:
            yield
        finally:
            async with self._changed:
                self._next = number + 1
                self._changed.notify_all()
