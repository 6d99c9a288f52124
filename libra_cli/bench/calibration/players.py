"""The players of a load: trajectories that keep a server in a steady state while it is watched."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from random import Random

from libra_cli.bench.calibration.harness import MeasurementHarness
from libra_cli.config.errors import LibraError
from libra_cli.core.costs.loads import ServerLoad
from libra_cli.core.types import Seconds, SlotId, Tokens

LONGEST = 20
"""Windows that a load may take until enough turns have ended; this and what follows chosen."""
TURNS_A_PLAYER = 2
"""Turns of each player that must have ended before a mean is taken."""
LEAST_TURNS = 12
"""Turns of all players that must have ended before a mean is taken."""


class Players:
    """The players of one load at one server."""

    def __init__(
        self,
        harness: MeasurementHarness,
        slot: SlotId,
        load: ServerLoad,
        random: Random,
        vocabulary: int,
    ) -> None:
        self.load = load
        self._harness = harness
        self._slot = slot
        self._random = random
        self._vocabulary = vocabulary
        self._stopping = False
        self._turns = 0
        self._tokens = 0
        self._ended_at: Seconds = 0.0
        self._all_begun = asyncio.Event()
        self._begun = 0
        #: Seconds and generated tokens of a turn, known after ``watch``.
        self.turn_s: Seconds = 0.0
        self.generated = 0.0

    def stop(self) -> None:
        """Begin no more turns."""
        self._stopping = True

    async def play(self) -> None:
        """Play turns at the end of the same cached context as one player, until told to stop."""
        prefix = random_tokens(self._random, self._vocabulary, self.load.cached)
        await self._turn(prefix)
        self._begun += 1
        if self._begun == self.load.players:
            self._all_begun.set()
        while not self._stopping:
            tokens = await self._turn(prefix)
            await self._harness.tool()
            self._turns += 1
            self._tokens += tokens
            self._ended_at = time.monotonic()

    async def _turn(self, prefix: array[int]) -> Tokens:
        prompt = prefix + random_tokens(self._random, self._vocabulary, self.load.fresh)
        tokens = self._random.randint(1, max(1, int(2 * self.load.generate) - 1))
        await self._harness.turn(self._slot, prompt, tokens)
        return tokens

    async def warm(self) -> None:
        """Wait until every player has had a turn, and has its context in the cache."""
        await self._all_begun.wait()

    async def watch(self, window_s: Seconds, enough: Callable[[], bool]) -> None:
        """Measure turns for ``window_s`` seconds, and until enough have ended to speak of a mean.

        Raises:
            LibraError: no turn ended in ``LONGEST`` times that long.
        """
        least = max(LEAST_TURNS, TURNS_A_PLAYER * self.load.players)
        began, turns, tokens = time.monotonic(), self._turns, self._tokens
        give_up = began + LONGEST * window_s
        while time.monotonic() < give_up:
            await asyncio.sleep(window_s / 8)
            ended = self._turns - turns >= least and time.monotonic() - began >= window_s
            if ended and enough():
                break
        number = self._turns - turns
        if not number:
            raise LibraError(f"{self._slot}: no turn ended in {LONGEST * window_s:.0f} s")
        self.turn_s = self.load.players * (self._ended_at - began) / number
        self.generated = (self._tokens - tokens) / number


@asynccontextmanager
async def playing(groups: Iterable[Players]) -> AsyncIterator[None]:
    """Let players play; a failure of one ends the measurement, and none is left behind."""
    chosen = list(groups)
    try:
        async with asyncio.TaskGroup() as group:
            for players in chosen:
                for _ in range(players.load.players):
                    group.create_task(players.play())
            try:
                yield
            finally:
                for players in chosen:
                    players.stop()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


def random_tokens(random: Random, vocabulary: int, number: int) -> array[int]:
    return array("i", random.choices(range(vocabulary), k=number))
