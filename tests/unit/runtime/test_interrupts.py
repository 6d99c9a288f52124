"""Ctrl-C ends the task that holds hosts, and a second one does not end what clears them."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from libra_cli.runtime.interrupts import CLEARING, STOPPING, Interrupts

DEADLINE_S = 10.0


async def interrupted(said: list[str], last: str) -> None:
    """Send this process a signal, and wait until it is told of so."""
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(DEADLINE_S):
        while said[-1:] != [last]:  # noqa: ASYNC110  the handler runs in this loop
            await asyncio.sleep(0)


def test_only_the_first_signal_cancels_and_the_others_are_told() -> None:
    said: list[str] = []

    async def scene() -> None:
        interrupts = Interrupts(said.append)
        interrupts.end_task()
        with pytest.raises(asyncio.CancelledError):
            await interrupted(said, "")
        await interrupted(said, STOPPING)
        interrupts.end_nothing(CLEARING)
        await interrupted(said, CLEARING)

    asyncio.run(scene())
    assert said == ["stopping", STOPPING, CLEARING]
