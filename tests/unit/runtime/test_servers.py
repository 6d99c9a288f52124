"""Servers that are frozen, slow, or gone before the controller has got to know them."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libra_cli.config.errors import ServerError
from libra_cli.core.actions import (
    CheckServer,
    Generate,
    SleepServer,
    StartServer,
    SyncServer,
    WakeServer,
)
from libra_cli.core.events import (
    Event,
    PublishedVersion,
    ServerAsleep,
    ServerChecked,
    ServerFailed,
    ServerSampled,
    ServerStarted,
    ServerSynced,
    SyncFailed,
    TrainerFailed,
    TurnGenerated,
)
from libra_cli.core.launch.process import process_of
from libra_cli.core.progress import watch
from libra_cli.core.types import Bucket, Pool, Slot, TrajectoryId, VersionSpan, WeightVersion
from libra_cli.runtime.hosts.agent_messages import Exited
from libra_cli.runtime.rollout import server_probes, servers
from libra_cli.runtime.rollout.connection import Sampling, ServerFacts
from libra_cli.runtime.rollout.servers import Servers
from libra_cli.runtime.weights.versions import ExpectedProbe, VersionLocation, Weights

DEADLINE_S = 10.0
SPEED = 400.0
"""Seconds of the run's clock in one of the test's."""


class FakeServer:
    """Answers until it is frozen; its turns end when the test lets them."""

    def __init__(self, incarnation: int = 1) -> None:
        self.incarnation = incarnation
        self.frozen = asyncio.Event()
        self.tokens = 0
        self.moves = True
        self.looks = 0
        self.decodes_off_by: float | None = None
        self.closed = asyncio.Event()
        self.loads: list[dict[str, Any]] = []

    async def _answer(self) -> None:
        if self.frozen.is_set():
            await asyncio.Event().wait()

    async def wait_ready(self, *, timeout_s: float) -> None:
        await self._answer()

    async def check(self) -> None:
        await self._answer()

    async def facts(self) -> ServerFacts:
        return ServerFacts("0", 1000, "runs as it likes")

    async def generate(
        self, action: Generate, sampling: Sampling, images: object = ()
    ) -> TurnGenerated | None:
        if self.decodes_off_by is None:
            await self.closed.wait()
            return None
        return generated(action, logprob=-1.0 + self.decodes_off_by)

    async def sample(self) -> ServerSampled:
        await self._answer()
        self.looks += 1
        self.tokens += self.moves
        return ServerSampled("n/0", self.incarnation, 1, 0, 0.5, None, 0, self.tokens)

    async def load(self, directory: str, published: PublishedVersion, **options: Any) -> float:
        self.loads.append(options)
        if self.decodes_off_by is None:
            raise ServerError("holds other tensors than were published")
        return 0.0

    async def probe(self, token_ids: list[int], published: PublishedVersion) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def close(self) -> None:
        self.closed.set()


def generated(action: Generate, *, logprob: float) -> TurnGenerated:
    """A turn of as many tokens as are allowed."""
    tokens = action.max_tokens
    return TurnGenerated(
        request=action.request,
        trajectory=action.trajectory,
        slot=action.slot,
        incarnation=action.incarnation,
        prompt_ids=action.prompt_ids,
        token_ids=array("i", range(tokens)),
        logprobs=array("f", [logprob] * tokens),
        spans=(VersionSpan(action.cache_key.step, 0, tokens),),
        newest=action.cache_key,
        cache_key=action.cache_key,
        finish_reason="length",
        started_at=0.0,
    )


class FakeWeights:
    """Versions that are where they should be; servers refuse them, rightly or not."""

    origin = "n"
    wrong = ""
    renews = True

    async def on(self, node: str, published: PublishedVersion) -> VersionLocation:
        return VersionLocation("/v", 0.0, "local", 0)

    async def probe(self, published: PublishedVersion) -> ExpectedProbe:
        return ExpectedProbe((1, 2, 3), (-1.0, -1.0))

    async def damage(self, node: str, published: PublishedVersion) -> str:
        return self.wrong

    async def renewed(self, published: PublishedVersion) -> bool:
        return self.renews


class FakeHost:
    behind_s = 0.0

    def __init__(self) -> None:
        self.dialed = asyncio.Event()
        self.let = asyncio.Event()
        self.let.set()

    async def dial(self, spec: Any) -> None:
        self.dialed.set()
        await self.let.wait()

    async def tail(self, process: str, lines: int = 20) -> str:
        return f"last words of {process}"


def process(recipe: Any, slot: Slot, *rest: Any, **named: Any) -> Any:
    return SimpleNamespace(node=slot.node, process=process_of(slot.id))


class Scene:
    """Servers on one host, with a clock that runs ``SPEED`` times as fast."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slots: int = 1) -> None:
        for module, name, value in (
            (server_probes, "PROBE_S", 5.0 / SPEED),
            (server_probes, "SAMPLE_EVERY_S", 2.0 / SPEED),
            (servers, "PROBE_S", 5.0 / SPEED),
            (servers, "CHECK_EVERY_S", 0.5 / SPEED),
            (servers, "server_process", process),
            (servers, "connect_with", lambda backend: lambda *place: self.connect(*place)),
        ):
            monkeypatch.setattr(module, name, value)
        self.events: list[Event] = []
        self.host = FakeHost()
        self.gpus = 0
        self.began = time.monotonic()
        self.cluster: Any = SimpleNamespace(
            clock=lambda: (time.monotonic() - self.began) * SPEED,
            lost=set(),
            hosts={"n": self.host},
            facts={"n": None},
            model_dirs={"n": ""},
            token="t",
            start=self._start,
            dial=self.host.dial,
        )
        self.sync = SimpleNamespace(timeout_s=120.0, tolerance=None, clear_cache=True)
        recipe: Any = SimpleNamespace(
            weight_sync=self.sync,
            rollout=SimpleNamespace(backend="vllm"),
            model=SimpleNamespace(dtype="float32"),
            training=SimpleNamespace(lora=None),
            node=lambda name: SimpleNamespace(gpus=self.gpus, share=None),
        )
        self.slots = {f"n/{i}": Slot(f"n/{i}", "n", (), Pool.ROLLOUT) for i in range(slots)}
        known: Any = self.cluster
        self.weights = FakeWeights()
        weights, sampling = cast("Weights", self.weights), Sampling(1.0, 1.0, ())
        self.servers = Servers(
            recipe, known, weights, self.slots, lambda group: sampling, post=self.events.append
        )
        self.fakes: dict[str, FakeServer] = {}
        self.connect: Callable[[str, int, Any, str], FakeServer] = self._connect

    async def _start(self, spec: Any) -> None:
        pass

    def _connect(self, slot: str, incarnation: int, endpoint: Any, token: str) -> FakeServer:
        self.fakes[slot] = FakeServer(incarnation)
        return self.fakes[slot]

    async def start(self, slot: str = "n/0") -> FakeServer:
        await self.servers.start(StartServer(slot, 1, Bucket("b", 1, 4, 100)))
        return self.fakes[slot]

    async def failed(self) -> ServerFailed:
        while True:
            for event in self.events:
                if isinstance(event, ServerFailed):
                    return event
            await asyncio.sleep(0.001)


def play(
    monkeypatch: pytest.MonkeyPatch, story: Callable[[Scene], Awaitable[None]], *, slots: int = 1
) -> None:
    async def whole() -> None:
        scene = Scene(monkeypatch, slots)
        looking = asyncio.create_task(scene.servers.sample())
        try:
            await asyncio.wait_for(story(scene), DEADLINE_S)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await scene.servers.processes.close()

    asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  nothing tells of it
        await asyncio.sleep(0.002)


def silence_in(reason: str) -> float:
    found = re.search(r"no progress for (\d+) s", reason)
    assert found, reason
    return float(found[1])


def a_turn() -> Generate:
    return Generate(
        1, TrajectoryId(0, 0), "n/0", 1, array("i", [1]), 4, WeightVersion(0, 0), priority=0
    )


def test_a_turn_begins_by_the_clock_of_the_run(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        fake = await scene.start()
        fake.decodes_off_by = 0.0
        before = scene.cluster.clock()
        turn = await scene.servers.generate(a_turn())
        assert isinstance(turn, TurnGenerated)
        assert before <= turn.started_at <= scene.cluster.clock()

    play(monkeypatch, story)


def test_a_server_that_answers_nothing_any_more_is_told_within_a_minute(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        fake = await scene.start()
        fake.frozen.set()
        failed = await scene.failed()
        assert failed.incarnation == 1
        assert silence_in(failed.reason) < watch.LEAST_S + watch.LONGEST_LOOK_S
        for part in ("server-0 on n", "last words of server-0"):
            assert part in failed.reason
        assert failed.reason.endswith("next: libra logs n server-0")

    play(monkeypatch, story)


def test_a_server_that_answers_while_its_turns_stand_still_is_told_too(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        fake = await scene.start()
        turn = asyncio.create_task(scene.servers.generate(a_turn()))
        fake.moves = False
        failed = await scene.failed()
        assert "with 1 turns inside" in failed.reason
        fake.closed.set()
        await turn

    play(monkeypatch, story)


def test_a_server_with_nothing_to_do_stands_still_for_ever(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        fake = await scene.start()
        fake.moves = False
        await until(lambda: scene.cluster.clock() > 3 * watch.FOUND_S and fake.looks > 3)
        assert not [one for one in scene.events if isinstance(one, ServerFailed)]

    play(monkeypatch, story)


def test_a_frozen_server_keeps_no_other_from_being_read(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        monkeypatch.setattr(server_probes, "PROBE_S", DEADLINE_S)
        frozen, other = await scene.start("n/0"), await scene.start("n/1")
        frozen.frozen.set()
        await until(lambda: other.looks > 5)

    play(monkeypatch, story, slots=2)


def test_a_server_on_a_host_that_cannot_be_reached_is_not_taken_for_frozen(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        fake = await scene.start()
        scene.cluster.lost.add("n")
        fake.frozen.set()
        await until(lambda: scene.cluster.clock() > 2 * watch.FOUND_S)
        assert not [one for one in scene.events if isinstance(one, ServerFailed)]
        scene.cluster.lost.clear()
        await scene.failed()

    play(monkeypatch, story)


def test_a_server_that_compiles_at_its_first_turn_is_not_taken_for_frozen(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        scene.gpus = 1
        fake = await scene.start()
        fake.frozen.set()
        await until(lambda: scene.cluster.clock() > 5 * watch.FOUND_S)
        assert not [one for one in scene.events if isinstance(one, ServerFailed)]
        fake.frozen.clear()
        fake.moves = True
        await until(lambda: fake.looks > 3)
        began = scene.cluster.clock()
        fake.frozen.set()
        await scene.failed()
        # Twice the silence that ended, as for any other.
        assert scene.cluster.clock() - began < server_probes.FIRST_USE_S

    play(monkeypatch, story)


def test_a_server_behind_a_busy_link_is_not_taken_for_frozen(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        fake = await scene.start()
        scene.host.behind_s = 6.0
        fake.frozen.set()
        await until(lambda: scene.cluster.clock() > 2 * watch.FOUND_S)
        assert not [one for one in scene.events if isinstance(one, ServerFailed)]
        scene.host.behind_s = 0.0
        await scene.failed()

    play(monkeypatch, story)


def test_a_server_that_answers_nonsense_is_told_and_ends_nothing(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        fake = await scene.start()

        async def nonsense() -> ServerSampled:
            raise TypeError("'NoneType' object is not subscriptable")

        fake.sample = nonsense  # type: ignore[method-assign]
        await scene.failed()

    play(monkeypatch, story)


def test_checks_count_real_time_so_a_frozen_server_is_out_within_a_minute(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        fake = await scene.start()
        fake.frozen.set()
        event = await scene.servers.check(CheckServer("n/0", 1))
        assert isinstance(event, ServerFailed)
        assert silence_in(event.reason) < watch.LEAST_S + watch.LONGEST_LOOK_S

    play(monkeypatch, story)


def test_a_check_of_a_server_that_answers_again_is_good_and_of_one_replaced_is_nobodys(
    monkeypatch,
) -> None:
    async def story(scene: Scene) -> None:
        fake = await scene.start()
        fake.frozen.set()
        asyncio.get_running_loop().call_later(10.0 / SPEED, fake.frozen.clear)
        assert await scene.servers.check(CheckServer("n/0", 1)) == ServerChecked("n/0", 1)
        assert await scene.servers.check(CheckServer("n/0", 0)) is None

    play(monkeypatch, story)


def test_an_exit_before_the_server_was_ever_reached_ends_its_start(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        scene.host.let.clear()  # the process runs, and nothing is connected yet
        starting = asyncio.create_task(scene.start())
        await scene.host.dialed.wait()
        scene.servers.processes.exited(Exited("n", process_of("n/0"), 7, 1, "CUDA error", False))
        with pytest.raises(KeyError):
            await starting
        failed = await scene.failed()
        assert "server-0 on n ended with exit code 1: CUDA error" in failed.reason

    play(monkeypatch, story)


def test_an_exit_that_was_asked_for_is_no_failure_of_the_next_process(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        await scene.start()
        scene.servers.processes.exited(Exited("n", process_of("n/0"), 7, 0, "", True))
        assert not [one for one in scene.events if isinstance(one, ServerFailed)]

    play(monkeypatch, story)


def test_a_server_that_loads_a_version_is_given_the_time_that_its_size_takes(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        fake = await scene.start()
        with scene.servers._probes.loading(fake, 3 * watch.FOUND_S):  # type: ignore[arg-type]
            fake.frozen.set()
            await until(lambda: scene.cluster.clock() > 2 * watch.FOUND_S)
            assert not [one for one in scene.events if isinstance(one, ServerFailed)]
        await scene.failed()

    play(monkeypatch, story)


def test_a_server_that_refuses_checks_is_asked_until_its_time_is_up(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        fake = await scene.start()

        async def refuse() -> None:
            raise ServerError("nobody listens")

        fake.check = refuse  # type: ignore[method-assign]
        event = await scene.servers.check(CheckServer("n/0", 1))
        assert isinstance(event, ServerFailed)

    play(monkeypatch, story)


@pytest.mark.parametrize("clear", [True, False])
def test_a_load_clears_the_cache_as_the_recipe_says(monkeypatch, clear: bool) -> None:
    async def story(scene: Scene) -> None:
        server = await scene.start()
        scene.sync.clear_cache = clear
        published = PublishedVersion(WeightVersion(2, 7), 100, 0.0)
        await scene.servers.sync(SyncServer("n/0", 1, published))
        assert [one["clear_cache"] for one in server.loads] == [clear]

    play(monkeypatch, story)


@pytest.mark.parametrize(
    ("wrong", "origin", "renews", "answered", "trainer_fails"),
    [
        ("", "n", True, True, False),
        ("model.bin is damaged", "n", True, False, False),
        ("model.bin is damaged", "n", False, False, True),
        ("model.bin is damaged", "other", True, False, False),
    ],
    ids=["right", "written again where it was made", "not written again", "damaged copy"],
)
def test_a_server_is_not_blamed_for_a_version_that_is_damaged_on_its_host(
    monkeypatch, wrong: str, origin: str, renews: bool, answered: bool, trainer_fails: bool
) -> None:
    async def story(scene: Scene) -> None:
        await scene.start()
        scene.weights.wrong, scene.weights.origin = wrong, origin
        scene.weights.renews = renews
        published = PublishedVersion(WeightVersion(2, 7), 100, 0.0)
        event = await scene.servers.sync(SyncServer("n/0", 1, published))
        assert isinstance(event, SyncFailed)
        assert event.answered is answered
        assert "holds other tensors" in event.reason
        told = [one for one in scene.events if isinstance(one, TrainerFailed)]
        assert [one.incarnation for one in told] == ([2] if trainer_fails else [])

    play(monkeypatch, story)


def test_a_server_that_decodes_with_other_weights_than_it_proved_is_not_synced(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        server = await scene.start()
        server.decodes_off_by = 0.5
        action = SyncServer("n/0", 1, PublishedVersion(WeightVersion(2, 7), 100, 0.0))
        event = await scene.servers.sync(action)
        assert isinstance(event, SyncFailed)
        assert event.answered, "it is tried once more, then in a new process"
        assert "decoding differs from scoring the same tokens by 0.5" in event.reason
        server.decodes_off_by = 0.0
        assert isinstance(await scene.servers.sync(action), ServerSynced)

    play(monkeypatch, story)


class Sleeper(FakeServer):
    """One that can sleep, if it has a process that can."""

    can = True

    async def sleep(self) -> None:
        if not self.can:
            raise ServerError("no sleep mode")

    async def wake(self) -> None:
        await self.sleep()


def sleepers(scene: Scene) -> None:
    def connect(slot: str, incarnation: int, endpoint: Any, token: str) -> Sleeper:
        scene.fakes[slot] = Sleeper(incarnation)
        return cast("Sleeper", scene.fakes[slot])

    scene.connect = connect


def test_a_server_sleeps_and_wakes_under_the_number_that_it_is_given(monkeypatch) -> None:
    async def story(scene: Scene) -> None:
        sleepers(scene)
        before = await scene.start()
        told = await scene.servers.perform(SleepServer("n/0", 2))
        assert told == ServerAsleep("n/0", 2)
        assert before.closed.is_set(), "what was asked of it before is over"
        sleeping = scene.fakes["n/0"]
        assert scene.servers.processes.connection("n/0").incarnation == 2
        assert await scene.servers.perform(WakeServer("n/0", 2)) == ServerStarted("n/0", 2)
        assert scene.fakes["n/0"] is sleeping, "one connection from its sleep on"
        scene.servers.processes.exited(Exited("n", process_of("n/0"), 7, -9, "", False))
        assert (await scene.failed()).incarnation == 2

    play(monkeypatch, story)


@pytest.mark.parametrize("can_sleep", [False, True])
def test_a_server_that_cannot_sleep_says_so(monkeypatch, can_sleep: bool) -> None:
    async def story(scene: Scene) -> None:
        if can_sleep:
            sleepers(scene)
            monkeypatch.setattr(Sleeper, "can", False)
        await scene.start()
        told = await scene.servers.perform(SleepServer("n/0", 2))
        assert isinstance(told, ServerFailed)
        assert told.incarnation == 2
        assert ("no sleep mode" if can_sleep else "cannot sleep") in told.reason

    play(monkeypatch, story)
