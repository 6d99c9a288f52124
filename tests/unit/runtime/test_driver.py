"""The loop between machine and world."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest

from libra_cli.config.errors import LibraError
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.timer_key import TimerOwner
from libra_cli.core.types import WeightVersion
from libra_cli.runtime import driver as driver_module
from libra_cli.runtime.adoption.run_log import RunLog
from libra_cli.runtime.driver import Driver, describe
from tests.world import World

DEADLINE_S = 20


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "FAILED_PAUSE_S", 0.0)
    monkeypatch.setattr(driver_module, "AGAIN_S", 0.0)


class Recorded:
    """A log that writes down what it is told, and when the machine handles an event."""

    def __init__(self, world: World) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.number = 0
        handle = world.machine.handle

        def handled(event: e.Event, *, now: float) -> list[a.Action]:
            self.lines.append(("handled", event))
            return handle(event, now=now)

        world.machine.handle = handled  # type: ignore[method-assign]

    def happened(self, event: e.Event | None, number: int, *, now: float) -> None:
        self.lines.append(("happened", event, number))

    def asked(self, action: a.RuntimeAction, *, now: float) -> int:
        self.number += 1
        self.lines.append(("asked", action, self.number))
        return self.number

    def settled(self) -> None:
        self.lines.append(("settled",))


class Stage:
    """Performs the machine's actions with what a ``World`` would answer, at once."""

    error: BaseException = RuntimeError("a bug")

    def __init__(self, *, break_at: type | None = None, times: int = 1) -> None:
        self.world = World(Random(1))
        self.break_at = break_at
        self.left = times
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
        if type(action) is self.break_at and self.left:
            self.left -= 1
            raise self.error
        self.world._perform(action)
        while self.world._heap:
            _, _, event = self.world._heap.pop(0)
            if isinstance(event, e.TimerFired) and event.name != TimerOwner.TRAINER:
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


FAILS_INTO = {
    a.StartServer: "ServerFailed",
    a.SyncServer: "SyncFailed",
    a.Generate: "TurnFailed",
    a.Train: "TrainerFailed",
    a.StartEpisode: "EpisodeFailed",
    a.AdvanceEpisode: "EpisodeFailed",
}


@pytest.mark.parametrize("action", FAILS_INTO, ids=lambda one: one.__name__)
@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError()], ids=repr)
def test_an_action_that_raises_is_a_failure_of_what_it_was_about(action, error, caplog):
    stage = Stage(break_at=action)
    stage.error = error
    assert stage.play() == a.End("finished", "")
    assert FAILS_INTO[action] in stage.told
    assert f"{action.__name__} failed" in caplog.text


def test_a_trainer_that_never_started_ends_the_run_by_name():
    end = Stage(break_at=a.StartTrainer).play()
    assert end.state == "failed"
    assert "RuntimeError: a bug" in end.error


def test_a_stop_that_raises_is_carried_out_again(caplog):
    stage = Stage(break_at=a.StopServer, times=driver_module.TRIES - 1)
    assert stage.play() == a.End("finished", "")
    assert "ServerStopped" in stage.told


def test_a_stop_that_always_raises_ends_the_run_by_name():
    stage = Stage(break_at=a.StopServer, times=10**6)
    with pytest.raises(LibraError, match="StopServer failed 6 times"):
        stage.play()


def test_who_looks_on_cannot_end_a_run(caplog):
    def told(*_: object) -> None:
        raise OSError("the terminal is on a full disk")

    stage = Stage()
    stage.driver = Driver(stage.world.machine, clock=stage.clock, save=told, tell=told)
    assert stage.play() == a.End("finished", "")
    assert "full disk" in caplog.text


def test_a_bug_of_the_machine_ends_the_run(monkeypatch):
    stage = Stage()

    def handle(event: e.Event, *, now: float) -> None:
        raise KeyError(event)

    monkeypatch.setattr(stage.world.machine, "handle", handle)
    with pytest.raises(KeyError):
        stage.play()


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


def test_every_event_is_logged_before_it_is_handled_and_every_action_when_it_ends():
    world = World(Random(1))
    log = Recorded(world)
    driver = Driver(
        world.machine,
        clock=lambda: 1.0,
        save=world.records.append,
        tell=lambda now, event: None,
        log=cast("RunLog", log),
    )
    started = e.TrainerStarted(1, e.PublishedVersion(WeightVersion(1, 0), 100, 1.0))

    async def perform(action: Any) -> e.Event | None:
        return started if isinstance(action, a.StartTrainer) else None

    async def main() -> None:
        running = asyncio.create_task(driver.run(perform, first=[e.RunStarted()]))
        await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    kinds = [line[0] for line in log.lines]
    assert kinds[:2] == ["happened", "handled"]
    assert log.lines[0] == ("happened", e.RunStarted(), 0)
    asked = {line[1]: line[2] for line in log.lines if line[0] == "asked"}
    ended = [line for line in log.lines if line[0] == "happened" and line[2]]
    start = next(action for action in asked if isinstance(action, a.StartTrainer))
    assert ("happened", started, asked[start]) in ended
    starts = [number for action, number in asked.items() if isinstance(action, a.StartServer)]
    assert starts
    assert all(("happened", None, number) in ended for number in starts)


def test_what_another_controller_was_asked_for_is_carried_out_after_the_first_events():
    stage, done = Stage(), []

    async def perform(action: Any) -> None:
        done.append(action)

    async def main() -> None:
        check = a.Wake("again", 5.0)
        running = asyncio.create_task(
            stage.driver.run(perform, first=[e.RunStarted()], again=lambda: [(7, check)])
        )
        await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    assert isinstance(done[0], a.StartTrainer | a.StartServer)
    assert done[-1] == a.Wake("again", 5.0)
