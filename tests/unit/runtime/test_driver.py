"""The loop between machine and world."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.runtime.driver import Driver, describe
from tests.world import World

DEADLINE_S = 20


class Stage:
    """Performs the machine's actions with what a ``World`` would answer, at once."""

    def __init__(self, *, break_at: type | None = None) -> None:
        self.world = World(Random(1))
        self.break_at = break_at
        self.told: list[str] = []
        self.now = 0.0
        self.driver = Driver(
            self.world.machine,
            clock=self.clock,
            save=self.world.records.append,
            tell=lambda now, event: self.told.append(type(event).__name__),
        )

    def clock(self) -> float:
        self.now += 0.1
        return self.now

    async def perform(self, action: Any) -> None:
        if type(action) is self.break_at:
            raise RuntimeError("a bug")
        self.world._perform(action)
        while self.world._heap:
            _, _, event = self.world._heap.pop(0)
            if isinstance(event, e.TimerFired):
                continue
            self.driver.post(event)

    def play(self) -> a.End:
        async def main() -> a.End:
            self.driver.post(e.RunStarted())
            return await asyncio.wait_for(self.driver.run(self.perform), DEADLINE_S)

        return asyncio.run(main())


def test_a_run_goes_from_the_first_event_to_the_end():
    stage = Stage()
    assert stage.play() == a.End("finished", "")
    assert stage.told[0] == "RunStarted"
    assert [step.step for step in stage.world.steps][-1] == 5


def test_an_action_that_raises_stops_the_run_and_is_raised():
    stage = Stage(break_at=a.AdvanceEpisode)
    with pytest.raises(RuntimeError, match="a bug"):
        stage.play()
    assert "StopRequested" in stage.told
    assert "TrainerStopped" in stage.told


def test_an_event_is_described_without_its_tokens():
    world = World(Random(1))
    world.later(e.RunStarted())
    seen: list[e.Event] = []
    while not any(isinstance(event, e.TurnGenerated) for event in seen):
        world.now, _, event = world._heap.pop(0)
        seen.append(event)
        world.give(event)
        world._heap.sort()
    told = describe(seen[-1])
    assert told["trajectory"] == "0.0.0"
    assert isinstance(told["token_ids"], int)
