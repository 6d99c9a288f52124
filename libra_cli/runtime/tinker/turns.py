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
"""How long a request waits for one before it that may never come, while none is carried out;
chosen."""


class Turns:
    """The requests of one model, by the numbers that its client has given them, from 1."""

    def __init__(self, missing_s: float = MISSING_S) -> None:
        self.known: dict[int, str] = {}
        """The id under which the outcome of a request is asked for, by its number."""
        self._next = 1
        self._under_way = False
        self._missing_s = missing_s
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Wait until it is a request's turn; when it ends, however, it is the next one's.

        Raises:
            LibraError: one before it has not come in time.
        """
        await self._wait_for(number)
        try:
            yield
        finally:
            async with self._changed:
                self._next, self._under_way = number + 1, False
                self._changed.notify_all()

    async def _wait_for(self, number: int) -> None:
        """Wait until it is a request's turn, and begin that. Raises LibraError."""
        async with self._changed:
            while self._next != number:
                try:
                    # Those before it may be many and long: only one that has not come is missing.
                    async with asyncio.timeout(None if self._under_way else self._missing_s):
                        await self._changed.wait()
                except TimeoutError as error:
                    raise LibraError(
                        f"request {number} waited {self._missing_s:.0f} s for request {self._next}",
                        hint="create another training client, from a saved state if there is one",
                    ) from error
            self._under_way = True
            self._changed.notify_all()
