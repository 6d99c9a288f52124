"""What the trainer writes is told after the step that it is of."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from libra_cli.core import events as e
from libra_cli.core.actions import Checkpoint, StartTrainer, StopTrainer, Train
from libra_cli.core.launch.process import ProcessSpec
from libra_cli.core.types import Pool, Slot, WeightVersion
from libra_cli.runtime.trainer import processes as module
from libra_cli.runtime.trainer.connection import NotSaved
from libra_cli.runtime.trainer.processes import TrainerProcesses

TIMEOUT_S = 5.0
SPEC = ProcessSpec("n", "trainer-0", (), {})


def version(step: int) -> e.PublishedVersion:
    return e.PublishedVersion(WeightVersion(1, step), 10, 0.0)


class FakeTrainer:
    """Has written everything before anybody asks."""

    def __init__(self, incarnation: int, endpoint: object, token: str) -> None:
        self.left = False

    async def wait_ready(self, *, timeout_s: float) -> e.PublishedVersion:
        return version(0)

    async def train(
        self, action: Train, shares: object, *, patience_s: float, images: object
    ) -> e.StepDone:
        return e.StepDone(action.incarnation, action.step)

    async def wait_published(self, step: int, *, patience_s: float) -> e.PublishedVersion:
        return version(step)

    async def wait_checkpoint(self, step: int, *, patience_s: float) -> str:
        return f"/checkpoints/{step}"

    async def checkpoint(self, ledger: object, *, patience_s: float) -> str:
        raise NotSaved("No space left on device")

    async def stop(self) -> None:
        self.left = True

    async def close(self) -> None:
        pass


class SlowFirst(FakeTrainer):
    """A connection that broke: what is asked of the first step is asked again, after the rest."""

    async def wait_published(self, step: int, *, patience_s: float) -> e.PublishedVersion:
        if step == 1:
            await asyncio.sleep(0.05)
        return version(step)


class Scene:
    """A trainer on one host, and what is told of it, in order."""

    def __init__(self) -> None:
        self.told: list[e.Event | None] = []
        self.all_told = asyncio.Event()
        self.stopped: list[tuple[str, str]] = []
        recipe: Any = SimpleNamespace(
            run=SimpleNamespace(lease_s=20.0), training=SimpleNamespace(backend="accelerate")
        )
        cluster: Any = SimpleNamespace(
            facts={"n": SimpleNamespace(gpu_gib=0.0)}, ports={"n": {"rendezvous": 1}},
            model_dirs={"n": "/m"}, token="t",
            run_id="r", hosts={}, start=self._nothing, dial=self._nothing, stop=self._stop,
        )  # fmt: skip
        slots = {"n/0": Slot("n/0", "n", (), Pool.TRAIN)}
        self.trainer = TrainerProcesses(recipe, cluster, slots, head="n", post=self.tell)

    async def _nothing(self, spec: ProcessSpec) -> None:
        pass

    async def _stop(self, node: str, process: str) -> None:
        self.stopped.append((node, process))

    def tell(self, event: e.Event | None) -> None:
        self.told.append(event)
        if len(self.told) == 4:
            self.all_told.set()

    async def perform(self, action: Any) -> None:
        """As the driver does: what comes of an action is told as soon as it is there."""
        self.tell(await self.trainer.perform(action))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*watched: object) -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(module, "connect_trainer_with", lambda backend: FakeTrainer)
    monkeypatch.setattr(module, "trainer_processes", lambda recipe, launch: (SPEC,))
    monkeypatch.setattr(module, "stalled_rank", never)


@pytest.mark.usefixtures("fakes")
def test_a_step_is_told_before_its_version_and_its_checkpoint() -> None:
    async def story() -> None:
        scene = Scene()
        await scene.perform(StartTrainer(1, ("n/0",), ""))
        await asyncio.create_task(scene.perform(Train(1, 1, (), {"step": 1}, WeightVersion(1, 0))))
        async with asyncio.timeout(TIMEOUT_S):
            await scene.all_told.wait()
        assert scene.told == [
            e.TrainerStarted(1, version(0)),
            e.StepDone(1, 1),
            e.VersionPublished(1, version(1)),
            e.CheckpointSaved(1, 1, "/checkpoints/1"),
        ]
        await scene.trainer.close()

    asyncio.run(story())


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("adopted", [False, True])
def test_versions_are_told_in_order_whichever_answer_comes_first(
    monkeypatch: pytest.MonkeyPatch, adopted: bool
) -> None:
    """The machine would take the older one for one that it knows, and write no row of it."""
    monkeypatch.setattr(module, "connect_trainer_with", lambda backend: SlowFirst)

    async def story() -> None:
        scene = Scene()
        if adopted:
            await scene.trainer.adopt(StartTrainer(1, ("n/0",), ""), versions=(1,), checkpoint=None)
            scene.tell(None)
        else:
            await scene.perform(StartTrainer(1, ("n/0",), ""))
            await scene.trainer.perform(Train(1, 1, (), None, WeightVersion(1, 0)))
        await scene.perform(Train(1, 2, (), None, WeightVersion(1, 1)))
        async with asyncio.timeout(TIMEOUT_S):
            await scene.all_told.wait()
        assert scene.told[1:] == [
            e.StepDone(1, 2),
            e.VersionPublished(1, version(1)),
            e.VersionPublished(1, version(2)),
        ]
        await scene.trainer.close()

    asyncio.run(story())


@pytest.mark.usefixtures("fakes")
def test_a_checkpoint_that_cannot_be_written_is_no_death_and_a_stop_is_verified() -> None:
    async def story() -> None:
        scene = Scene()
        await scene.perform(StartTrainer(1, ("n/0",), ""))
        trainer: Any = scene.trainer.processes.connection(module.TRAINER)
        await scene.perform(Checkpoint(1, 3, {}))
        await scene.perform(StopTrainer(1, ("n/0",)))
        await scene.perform(Train(1, 4, (), None, WeightVersion(1, 3)))
        assert scene.told[1:] == [
            e.CheckpointFailed(1, 3, "No space left on device"),
            e.TrainerStopped(1),
            e.TrainerFailed(1, "trainer is not connected"),
        ]
        assert trainer.left
        assert scene.stopped == [("n", "trainer-0")]
        await scene.trainer.close()

    asyncio.run(story())
