"""Work on a process ends with the process, and with whoever waits for it."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from libra_cli.config.errors import LibraError
from libra_cli.core.events import Event, WorkerFailed, WorkerStarted
from libra_cli.runtime.processes.tasks import ProcessTasks

failed = partial(WorkerFailed, "n1/0", 3)
DONE = WorkerStarted("n1/0", 3)


class Waiting:
    """Work that goes on until somebody lets it."""

    def __init__(self) -> None:
        self.going, self.cancelled = asyncio.Event(), False

    async def work(self) -> Event:
        try:
            await self.going.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return DONE


async def broken() -> Event:
    raise LibraError("no memory")


def test_what_comes_of_the_work_is_the_answer() -> None:
    async def scene() -> None:
        lives, waiting = ProcessTasks(), Waiting()
        waiting.going.set()
        assert await lives.during("worker", waiting.work(), failed) == DONE
        assert await lives.during("worker", broken(), failed) == failed("no memory")

    asyncio.run(scene())


def test_work_on_a_process_that_ends_is_dropped_and_other_work_goes_on() -> None:
    async def scene() -> None:
        lives, ends, stays = ProcessTasks(), Waiting(), Waiting()
        tasks = [
            asyncio.create_task(lives.during("ends", ends.work(), failed)),
            asyncio.create_task(lives.during("ends", ends.work(), failed)),
            asyncio.create_task(lives.during("stays", stays.work(), failed)),
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        lives.end("ends")
        assert await asyncio.gather(*tasks[:2]) == [None, None]
        assert not tasks[2].done()
        stays.going.set()
        assert await tasks[2] == DONE

    asyncio.run(scene())


def test_whoever_waits_may_be_cancelled_and_takes_the_work_along() -> None:
    async def scene() -> None:
        lives, waiting = ProcessTasks(), Waiting()
        task = asyncio.create_task(lives.during("worker", waiting.work(), failed))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert waiting.cancelled

    asyncio.run(scene())


def test_the_end_of_a_process_nobody_works_on_is_nothing() -> None:
    ProcessTasks().end("worker")
