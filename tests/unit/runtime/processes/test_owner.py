"""Groups of processes that start, are adopted, fail and are stopped together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from libra_cli.config.errors import HostError
from libra_cli.core.events import Event, WorkerFailed, WorkerStarted
from libra_cli.core.launch.process import ProcessSpec
from libra_cli.core.preflight.lost_gpus import RunGpu
from libra_cli.core.types import LostGpu
from libra_cli.runtime.hosts.agent_messages import Exited
from libra_cli.runtime.processes.owner import NotConnected, ProcessOwner

TIMEOUT_S = 5.0
RANKS = tuple(
    ProcessSpec(node, f"trainer-{rank}", (), {"CUDA_VISIBLE_DEVICES": f"GPU-{rank}"}, {})
    for rank, node in enumerate("ab")
)


class FakeConnection:
    def __init__(self, name: str, incarnation: int, endpoint: object, token: str) -> None:
        self.said = name, incarnation, endpoint, token
        self.leaves: list[str] = []
        self.closed = False

    async def leave(self) -> None:
        self.leaves.append("asked")
        raise HostError("it is gone already")

    async def close(self) -> None:
        self.closed = True


class Scene:
    """One owner on two hosts that note what they are asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.posted: list[Event] = []
        self.faults: list[Exception] = []
        self.token = "t"
        self.stalls: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.watched: list[int] = []
        self.gpus = {"b": (RunGpu("GPU-1", ""), RunGpu("GPU-2", ""))}
        self.reached = {"a": self, "b": self}
        self.hosts = self.reached
        self.present: tuple[str, ...] = ("GPU-1", "GPU-2")
        cluster: Any = self
        self.owner: ProcessOwner[FakeConnection] = ProcessOwner(
            cluster,
            connect=FakeConnection,
            failed=WorkerFailed,
            stalled=self._stalled,
            post=self.posted.append,
        )

    async def start(self, spec: ProcessSpec) -> None:
        self.asked.append(("start", spec.node, spec.process))

    async def dial(self, spec: ProcessSpec) -> str:
        return f"{spec.process} on {spec.node}"

    async def stop(self, node: str, process: str) -> None:
        self.asked.append(("stop", node, process))
        if self.faults:
            raise self.faults.pop()

    async def facts(self) -> Any:
        """What the host says of its GPUs."""
        self.asked.append(("facts",))
        return SimpleNamespace(gpus_present=self.present, gpus_error="")

    async def _stalled(self, processes: Sequence[ProcessSpec], incarnation: int) -> str:
        self.watched.append(incarnation)
        return await self.stalls


def play(story: Callable[[Scene], Awaitable[None]]) -> None:
    async def whole() -> None:
        scene = Scene()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await story(scene)
        finally:
            await scene.owner.close()

    asyncio.run(whole())


async def under_way(scene: Scene) -> asyncio.Task[Event | None]:
    """Work on the group that only its end ends."""

    async def work() -> Event:
        await asyncio.Event().wait()
        return WorkerStarted("g", 3)

    task = asyncio.create_task(scene.owner.during("g", 3, work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


def test_a_group_starts_whole_and_its_first_process_is_spoken_to() -> None:
    async def story(scene: Scene) -> None:
        connection = await scene.owner.start("g", 3, RANKS)
        assert scene.asked == [("start", "a", "trainer-0"), ("start", "b", "trainer-1")]
        assert connection.said == ("g", 3, "trainer-0 on a", "t")
        assert scene.owner.connection("g") is scene.owner.get("g", 3) is connection
        assert scene.owner.get("g", 2) is None

    play(story)


def test_an_adopted_group_is_connected_to_and_watched_and_not_started() -> None:
    async def story(scene: Scene) -> None:
        await scene.owner.adopt("g", 3, RANKS)
        await asyncio.sleep(0)
        assert scene.asked == []
        assert scene.watched == [3]
        scene.owner.exited(Exited("b", "trainer-1", 7, 1, "CUDA error", False))
        why = "trainer-1 on b ended with exit code 1: CUDA error"
        assert scene.posted == [WorkerFailed("g", 3, why)]

    play(story)


def test_a_process_that_ends_fails_its_group_and_ends_the_work_on_it() -> None:
    async def story(scene: Scene) -> None:
        await scene.owner.start("g", 3, RANKS)
        work = await under_way(scene)
        scene.owner.exited(Exited("a", "trainer-1", 7, 1, "of somebody else", False))
        scene.owner.exited(Exited("b", "trainer-1", 7, 0, "", True))
        assert scene.posted == []
        scene.owner.returned("b", frozenset({"trainer-1"}))
        assert scene.posted == []
        scene.owner.returned("b", frozenset())
        assert scene.posted == [WorkerFailed("g", 3, "trainer-1 on b died while unreachable")]
        assert await work is None

    play(story)


def test_a_process_that_does_not_go_on_fails_its_group() -> None:
    async def story(scene: Scene) -> None:
        await scene.owner.start("g", 3, RANKS)
        work = await under_way(scene)
        scene.stalls.set_result("rank 1 is stopped")
        assert await work is None
        assert scene.posted == [WorkerFailed("g", 3, "rank 1 is stopped")]

    play(story)


def test_a_group_is_asked_to_leave_and_then_stopped_wherever_it_may_be() -> None:
    async def story(scene: Scene) -> None:
        connection = await scene.owner.start("g", 3, RANKS)
        work = await under_way(scene)
        scene.asked.clear()
        await scene.owner.stop("g", ("c", "left"), leave=FakeConnection.leave)
        assert connection.leaves == ["asked"]
        assert connection.closed
        assert scene.asked == [
            ("stop", "a", "trainer-0"),
            ("stop", "b", "trainer-1"),
            ("stop", "c", "left"),
        ]
        assert await work is None
        with pytest.raises(NotConnected):
            scene.owner.connection("g")

    play(story)


def test_what_could_not_be_stopped_is_stopped_again_and_its_end_is_no_failure() -> None:
    async def story(scene: Scene) -> None:
        await scene.owner.start("g", 3, RANKS)
        scene.faults = [HostError("cut")]
        with pytest.raises(HostError):
            await scene.owner.stop("g")
        scene.owner.exited(Exited("a", "trainer-0", 7, 0, "", False))
        scene.owner.returned("b", frozenset())
        assert scene.posted == []
        scene.asked.clear()
        await scene.owner.stop("g")
        assert scene.asked == [("stop", "a", "trainer-0"), ("stop", "b", "trainer-1")]

    play(story)


def test_a_group_that_begins_again_drops_the_connection_to_the_one_before() -> None:
    async def story(scene: Scene) -> None:
        before = await scene.owner.start("g", 3, RANKS)
        await scene.owner.start("g", 4, RANKS[:1])
        assert before.closed
        scene.owner.exited(Exited("b", "trainer-1", 7, 1, "", False))
        assert scene.posted == []

    play(story)


async def ended(scene: Scene) -> None:
    scene.owner.exited(Exited("b", "trainer-1", 7, 1, "CUDA error", False))


async def could_not(scene: Scene) -> None:
    async def work() -> Event:
        raise HostError("it is not ready in time")

    await scene.owner.during("g", 3, work())


async def did_not_go_on(scene: Scene) -> None:
    scene.stalls.set_result("rank 1 is stopped")
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("fails", [ended, could_not, did_not_go_on])
def test_when_a_group_that_failed_is_stopped_its_gpus_are_looked_for(
    fails: Callable[[Scene], Awaitable[None]],
) -> None:
    async def story(scene: Scene) -> None:
        scene.present = ("GPU-2",)
        await scene.owner.start("g", 3, RANKS)
        await fails(scene)
        assert await scene.owner.stop("g") == (LostGpu("b", 0, "GPU-1"),)
        assert await scene.owner.stop("g") == (), "it is forgotten with the group"

    play(story)


def test_gpus_that_are_there_or_of_a_group_that_did_its_work_are_not_lost() -> None:
    async def story(scene: Scene) -> None:
        await scene.owner.start("g", 3, RANKS)
        await ended(scene)
        assert await scene.owner.stop("g") == ()
        assert ("facts",) in scene.asked
        scene.asked.clear()
        scene.present = ()
        await scene.owner.start("g", 4, RANKS)
        assert await scene.owner.stop("g") == ()
        assert ("facts",) not in scene.asked, "a planned stop is not held up"

    play(story)
