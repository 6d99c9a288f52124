"""Servers of frozen models that die, hang or lose their host, and what whoever asks sees of it.

The hosts and vLLM are stood for by sockets of this process; ``test_frozen_models`` of the
integration tests has real ones.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from libra_cli.config.errors import HostError, HostLost, ProcessError
from libra_cli.config.frozen_models import ModelsAddress
from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.restarts import RestartBudget
from libra_cli.core.frozen.slots import frozen_slots
from libra_cli.core.launch.process import HostFacts, ProcessSpec
from libra_cli.core.records import FrozenModelRecord, Record, SlotRecord
from libra_cli.core.types import LostGpu, Pool, Slot
from libra_cli.runtime.frozen import processes as processes_module
from libra_cli.runtime.frozen import server as module
from libra_cli.runtime.frozen.models import FrozenModels
from libra_cli.runtime.frozen.processes import ModelProcesses
from libra_cli.runtime.hosts.agent_messages import Exited, LeaseExpired
from libra_cli.runtime.hosts.event_bus import HostEventBus
from libra_cli.runtime.hosts.transport import Endpoint

DEADLINE_S = 60.0
RECIPE = Recipe.model_validate(
    {
        "nodes": [{"host": "a", "slots": 4, "pool": ["rollout", "train", "models", "models"]}],
        "model": {"path": "/policy"},
        "environment": {"args": {"judge": {"served": "judge"}}},
        "models": [{"name": "judge", "path": "/judge", "slots": 2}],
    }
)


ONE_SEAT = Recipe.model_validate(
    {
        **RECIPE.model_dump(mode="json", exclude_unset=True),
        "nodes": [{"host": "a", "slots": 4, "pool": ["rollout", "auto", "models", "train"]}],
        "models": [{"name": "judge", "path": "/judge", "vllm_args": ["--max-num-seqs", "1"]}],
    }
)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what nothing tells of; the scene has a deadline."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


class Hosts:
    """Stands for the cluster: a process is a server on a socket of this process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.facts = {"a": HostFacts("a", "python", "/w", "/r", "/v", "a", tmp_dir=str(directory))}
        self.hosts = {"a": SimpleNamespace(expand=lambda path: path)}
        self.lost: set[str] = set()
        self.reached = {"a"}
        self.gpus: dict[str, tuple[Any, ...]] = {}
        self.models: FrozenModels
        self.events = HostEventBus()
        self.files = {"model.safetensors": [7, "00"]}
        """What the directory of the model holds."""
        self.read: asyncio.Event | None = None
        """Reading them waits for it."""
        self.bug: Exception | None = None
        """What reading them raises, which nobody has thought of."""
        self.refuses = ""
        self.dies_at_once = False
        self.started: list[str] = []
        self.running: dict[str, web.AppRunner] = {}
        self.asked: list[str] = []
        self.held: asyncio.Event | None = None
        """Answers wait for it."""
        self.is_well = True
        self.dying = ""
        """The process whose engine is dead, so that it answers 500."""
        self._clock = itertools.count()

    def clock(self) -> float:
        return float(next(self._clock))

    async def until_reached(self, node: str) -> None:
        await until(lambda: node not in self.lost)

    async def start(self, spec: ProcessSpec) -> None:
        if self.refuses:
            raise HostError(self.refuses)
        self.started.append(spec.process)
        if self.dies_at_once:
            self.tell_exit(spec.process)
            return
        app = web.Application()
        app.router.add_get("/health", partial(self._health, spec.process))
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/{path:.*}", partial(self._answer, spec.process))
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.UnixSite(runner, self._path(spec.process)).start()
        self.running[spec.process] = runner

    async def answer_of(self, spec: ProcessSpec, *, timeout_s: float) -> Any:
        if self.read is not None:
            await self.read.wait()
        if self.bug is not None:
            raise self.bug
        return {"files": dict(self.files)}

    async def dial(self, spec: ProcessSpec) -> Endpoint:
        return Endpoint(self._path(spec.process))

    async def stop(self, node: str, process: str) -> None:
        if (runner := self.running.pop(process, None)) is not None:
            await runner.cleanup()

    async def kill(self, process: str) -> None:
        """End a process with its connections, and tell so."""
        runner = self.running[process]
        assert runner.server is not None
        for connection in list(runner.server.connections):
            assert connection.transport is not None
            connection.transport.abort()
        await self.stop("a", process)
        self.tell_exit(process)

    def tell_exit(self, process: str) -> None:
        self.events.publish(Exited("a", process, 7, 1, "ValueError: no room", requested=False))

    async def close(self) -> None:
        for process in list(self.running):
            await self.stop("a", process)

    def _path(self, process: str) -> str:
        return str(self._directory / f"{process}.sock")

    async def _health(self, process: str, http: web.Request) -> web.Response:
        is_well = self.is_well and process != self.dying
        return web.Response(status=200 if is_well else 503)

    async def _metrics(self, http: web.Request) -> web.Response:
        number = 'num_requests_waiting{engine="0",model_name="judge"}'
        by_reason = 'num_requests_waiting_by_reason{reason="capacity"}'
        return web.Response(text=f"# HELP\nvllm:{number} 3.0\nvllm:{by_reason} 3.0\n")

    async def _answer(self, process: str, http: web.Request) -> web.StreamResponse:
        self.asked.append(process)
        body = json.loads(await http.read())
        if self.held is not None:
            await self.held.wait()
        if process == self.dying:
            return web.json_response({"error": {"message": "EngineDeadError"}}, status=500)
        if not body.get("stream"):
            told = {"by": process, "path": http.path_qs, **body}
            return web.json_response(told, status=body.get("status", 200))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for part in (b"data: 1\n\n", b"data: 2\n\n"):
            await response.write(part)
        return response


class Scene:
    """A run's frozen models, as whoever asks them sees them."""

    def __init__(self, hosts: Hosts, address: ModelsAddress, rows: list[SlotRecord]) -> None:
        self.hosts = hosts
        self.url = address.url
        self.token = address.token.get_secret_value()
        self.rows = rows
        self._looked: dict[str, int] = {}

    async def ask(self, path: str = "judge/v1/chat/completions", **body: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {body.pop('token', self.token)}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/{path}", json=body, headers=headers) as answer,
        ):
            text = await answer.text()
            return answer.status, json.loads(text) if text[:1] == "{" else text

    async def until(self, slot: str, state: str) -> SlotRecord:
        """The slot's next row in that state, after those that were looked at before."""
        while True:
            for number in range(self._looked.get(slot, 0), len(self.rows)):
                row = self.rows[number]
                if (row.slot, row.state) == (slot, state):
                    self._looked[slot] = number + 1
                    return row
            await asyncio.sleep(0.01)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a scene of a run's frozen models, which ``adopts`` or begins them."""
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.01)
    monkeypatch.setattr(module, "CHECK_EVERY_S", 0.01)

    def run(
        scene: Any,
        hosts: Hosts | None = None,
        *,
        adopts: bool = False,
        recipe: Recipe = RECIPE,
        recorded: Sequence[FrozenModelRecord] = (),
    ) -> tuple[Any, list[SlotRecord]]:
        rows: list[SlotRecord] = []

        def save(record: Record) -> None:
            if isinstance(record, SlotRecord):
                rows.append(record)

        async def main() -> Any:
            there: Any = hosts or Hosts(tmp_path)
            slots = frozen_slots(recipe.models, recipe.nodes)
            models = there.models = FrozenModels(slots, there, save)
            async with AsyncExitStack() as stack:
                stack.push_async_callback(there.close)
                opened = models.opened(attaching=lambda: adopts, recorded=recorded)
                async with there.events.all_needed():
                    address = await stack.enter_async_context(opened)
                found: Coroutine[Any, Any, Any] = scene(Scene(there, address, rows))
                return await found

        return asyncio.run(asyncio.wait_for(main(), DEADLINE_S)), rows

    return run


def test_requests_go_to_whoever_has_the_least_to_do(play: Any) -> None:
    async def scene(run: Scene) -> None:
        run.hosts.held = asyncio.Event()
        asked = [asyncio.create_task(run.ask(n=number)) for number in range(4)]
        await until(lambda: len(run.hosts.asked) == 4)
        assert sorted(run.hosts.asked) == ["model-2", "model-2", "model-3", "model-3"]
        row = await run.until("a/2", "serving")
        assert (row.role, row.pool, row.bucket) == ("model", "models", "judge")
        while row.waiting == 0:
            row = await run.until("a/2", "serving")
        assert row.waiting == 3
        run.hosts.held.set()
        for number, (status, told) in enumerate(await asyncio.gather(*asked)):
            assert (status, told["n"]) == (200, number)
            assert told["path"] == "/v1/chat/completions"

    _, rows = play(scene)
    assert [row.state for row in rows[-2:]] == ["idle", "idle"]
    assert all(row.restarts == 0 for row in rows)
    assert 0 < rows[-1].busy_s < rows[-1].serving_s


@pytest.mark.parametrize(
    ("path", "token", "status", "said"),
    [
        ("judge/v1/completions", "another", 401, "another key"),
        ("nobody/v1/completions", None, 404, "the run serves no model 'nobody', but judge"),
    ],
)
def test_nobody_is_answered_without_the_key_or_by_another_model(
    play: Any, path: str, token: str | None, status: int, said: str
) -> None:
    async def scene(run: Scene) -> None:
        told = await run.ask(path, **({"token": token} if token else {}))
        assert told == (status, {"error": {"message": said}})
        assert run.hosts.asked == []

    play(scene)


@pytest.mark.parametrize("refusal", [422, 500])
def test_what_a_server_refuses_that_is_well_is_handed_back_as_it_is(
    play: Any, refusal: int
) -> None:
    async def scene(run: Scene) -> None:
        status, told = await run.ask(status=refusal)
        assert (status, told["status"]) == (refusal, refusal)
        assert len(run.hosts.asked) == 1

    play(scene)


def test_what_a_server_fails_on_whose_engine_is_dead_is_asked_of_another(play: Any) -> None:
    async def scene(run: Scene) -> None:
        run.hosts.dying = "model-2"
        status, told = await run.ask()
        assert (status, told["by"]) == (200, "model-3")
        assert run.hosts.asked == ["model-2", "model-3"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SILENT_S", DEADLINE_S)  # else it is replaced meanwhile
        play(scene)


def test_what_stands_behind_the_question_mark_is_handed_on(play: Any) -> None:
    async def scene(run: Scene) -> None:
        _, told = await run.ask("judge/v1/responses?after=a%20b&limit=2")
        assert told["path"] == "/v1/responses?after=a+b&limit=2"

    play(scene)


def test_an_answer_in_parts_comes_in_parts(play: Any) -> None:
    async def scene(run: Scene) -> None:
        assert await run.ask(stream=True) == (200, "data: 1\n\ndata: 2\n\n")

    play(scene)


def test_what_a_dead_server_had_not_answered_is_asked_again(play: Any) -> None:
    async def scene(run: Scene) -> None:
        run.hosts.held = asyncio.Event()
        asked = asyncio.create_task(run.ask())
        await until(lambda: bool(run.hosts.asked))
        (first,) = run.hosts.asked
        await run.hosts.kill(first)
        slot = f"a/{first[-1]}"
        assert (await run.until(slot, "failed")).detail.startswith(
            "ended with exit code 1: ValueError: no room; started again in 0 s"
        )
        run.hosts.held.set()
        assert (await asked)[0] == 200
        assert len(run.hosts.asked) == 2
        assert [use.answered for use in run.hosts.models.uses] == [1]
        assert (await run.until(slot, "serving")).restarts == 1

    play(scene)


def test_requests_wait_while_no_server_is_there(play: Any) -> None:
    async def scene(run: Scene) -> None:
        run.hosts.refuses = "the disk is full"
        for process in ("model-2", "model-3"):
            await run.hosts.kill(process)
        row = await run.until("a/2", "failed")
        asked = asyncio.create_task(run.ask())
        await asyncio.sleep(0.1)
        assert not asked.done()
        assert "started again in" in row.detail
        run.hosts.refuses = ""
        assert (await asked)[0] == 200

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RestartBudget, "wait_s", lambda budget: 0.05)
        play(scene)


def test_a_server_that_never_served_ends_the_run_with_its_own_words(
    play: Any, tmp_path: Path
) -> None:
    async def scene(run: Scene) -> None:
        pytest.fail("the run began")

    hosts = Hosts(tmp_path)
    hosts.dies_at_once = True
    with pytest.raises(
        ProcessError, match=r"model judge: its server on a/[23] ended .* no room"
    ) as caught:
        play(scene, hosts)
    assert caught.value.hint in ("libra logs a model-2", "libra logs a model-3")


class GivenUp(Hosts):
    """Hosts of which one is given up before a server was started there; nobody makes it ready."""

    async def until_reached(self, node: str) -> None:
        self.events.publish(LeaseExpired(node, "no answer for 120 s"))
        await asyncio.get_running_loop().create_future()


def test_a_host_that_is_given_up_before_its_server_was_started_ends_the_start(
    play: Any, tmp_path: Path
) -> None:
    async def scene(run: Scene) -> None:
        pytest.fail("the run began")

    with pytest.raises(HostLost, match=r"^a: given up after no answer for 120 s$"):
        play(scene, GivenUp(tmp_path))


def test_a_run_that_is_taken_over_waits_for_none_before_it_goes_on(
    play: Any, tmp_path: Path
) -> None:
    hosts = Hosts(tmp_path)
    hosts.lost = {"a"}

    async def scene(run: Scene) -> None:
        asked = asyncio.create_task(run.ask())
        await asyncio.sleep(0.05)
        assert not run.hosts.started
        run.hosts.lost.clear()
        assert (await asked)[0] == 200

    _, rows = play(scene, hosts, adopts=True)
    assert "idle" not in {row.state for row in rows}, "it has never taken them over"


def test_one_that_goes_with_its_host_is_started_once_that_is_back(play: Any) -> None:
    async def scene(run: Scene) -> None:
        run.hosts.lost.add("a")
        run.hosts.events.publish(LeaseExpired("a", "its lease was over"))
        row = await run.until("a/2", "failed")
        assert "went with its host: its lease was over" in row.detail
        run.hosts.lost.clear()
        assert (await run.until("a/2", "serving")).restarts == 1

    play(scene)


def test_one_that_answers_nothing_is_replaced_but_not_while_its_host_is_away(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.05)

    async def scene(run: Scene) -> None:
        run.hosts.lost.add("a")
        run.hosts.is_well = False
        await asyncio.sleep(0.2)
        assert run.rows[-1].state == "serving"
        run.hosts.lost.clear()
        row = await run.until("a/3", "failed")
        assert row.detail.startswith("has not answered for 0 s")
        run.hosts.is_well = True
        await run.until("a/3", "serving")

    play(scene)


def test_no_server_is_asked_before_its_files_are_known(play: Any, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    hosts.read = asyncio.Event()

    async def scene(run: Scene) -> None:
        asked = asyncio.create_task(run.ask())
        await until(lambda: set(run.hosts.running) == {"model-2", "model-3"})
        await asyncio.sleep(0.05)
        assert not run.hosts.asked
        assert hosts.read is not None
        hosts.read.set()
        assert (await asked)[0] == 200
        assert (await run.until("a/2", "serving")).detail.startswith("files ")

    play(scene, hosts, adopts=True)


def test_a_server_with_other_files_than_before_is_never_asked(play: Any) -> None:
    async def scene(run: Scene) -> None:
        run.hosts.files = {"model.safetensors": [7, "01"]}
        await run.hosts.kill("model-2")
        row = await run.until("a/2", "failed")  # it was killed
        row = await run.until("a/2", "failed")
        assert row.detail.startswith(
            "did not serve: /judge on a is not what it was when the run served it before: "
            "model.safetensors has other bytes; started again in"
        )
        for _ in range(4):
            assert (await run.ask())[1]["by"] == "model-3"
        run.hosts.files = {"model.safetensors": [7, "00"]}
        await run.until("a/2", "serving")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RestartBudget, "wait_s", lambda budget: 0.01)
        play(scene)


def test_a_server_whose_files_could_not_be_compared_is_never_asked(play: Any) -> None:
    async def scene(run: Scene) -> None:
        run.hosts.bug = TypeError("of ours")
        await run.hosts.kill("model-2")
        row = await run.until("a/2", "failed")  # it was killed
        row = await run.until("a/2", "failed")
        told = "did not serve: its files were not compared: TypeError: of ours; started again in"
        assert row.detail.startswith(told)
        assert (await run.ask())[1]["by"] == "model-3"
        run.hosts.bug = None
        await run.until("a/2", "serving")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RestartBudget, "wait_s", lambda budget: 0.01)
        play(scene)


def test_a_run_that_goes_on_serves_what_it_served_before(play: Any) -> None:
    async def scene(run: Scene) -> None:
        pytest.fail("the run began")

    before = FrozenModelRecord("judge", "a", "/judge", "", 7, 0.0, 0.0, '{"old.json": [7, "00"]}')
    with pytest.raises(ProcessError, match=r"/judge on a is not what it was .*: model\.saf.*only"):
        play(scene, recorded=[before])


def test_a_run_that_goes_on_with_another_path_serves_that(play: Any) -> None:
    async def scene(run: Scene) -> None:
        assert (await run.ask())[0] == 200

    play(scene, recorded=[FrozenModelRecord("judge", "a", "/old", "", 7, 0.0, 0.0, "{}")])


FREE = Slot("a/0", "a", (), Pool.HYBRID)
START = a.StartModel("a/0", 0, "judge")


def processes(hosts: Any, posted: list[e.Event], recipe: Recipe = RECIPE) -> ModelProcesses:
    """Who starts and stops servers on slots of the planner."""
    return ModelProcesses(
        recipe.models, recipe.nodes, hosts, hosts.models, {"a/0": FREE}, post=posted.append
    )


def test_a_server_on_a_slot_of_the_planner_shares_the_requests_until_it_goes(play: Any) -> None:
    async def scene(run: Scene) -> None:
        posted: list[e.Event] = []
        owner = processes(run.hosts, posted)
        assert await owner.perform(START) == e.ModelStarted("a/0", 0)
        assert run.hosts.started[-1] == "model-0"
        run.hosts.held = asyncio.Event()
        asked = [asyncio.create_task(run.ask(n=number)) for number in range(3)]
        await until(lambda: len(run.hosts.asked) == 3)
        assert sorted(run.hosts.asked) == ["model-0", "model-2", "model-3"]
        leaving = asyncio.create_task(owner.perform(a.StopModel("a/0", 1)))
        await asyncio.sleep(0)
        late = asyncio.create_task(run.ask(n=3))
        await until(lambda: len(run.hosts.asked) == 4)
        assert run.hosts.asked[-1] != "model-0", "it is to go and takes another request"
        assert not leaving.done(), "it has not answered what it was asked"
        run.hosts.held.set()
        assert await leaving == e.ModelStopped("a/0", 1)
        assert [status for status, _ in await asyncio.gather(*asked, late)] == [200] * 4
        assert "model-0" not in run.hosts.running
        assert posted == []
        assert await owner.perform(a.StartModel("a/0", 1, "judge")) == e.ModelStarted("a/0", 1)
        await owner.close()
        assert "model-0" in run.hosts.running

    play(scene)


def test_what_waits_for_a_seat_is_taken_over_by_a_server_that_comes(play: Any) -> None:
    async def scene(run: Scene) -> None:
        owner = processes(run.hosts, [], ONE_SEAT)
        run.hosts.held = asyncio.Event()
        asked = [asyncio.create_task(run.ask(n=number)) for number in range(6)]
        while (await run.until("a/2", "serving")).running < 6:
            pass
        assert run.hosts.asked == ["model-2"]
        assert (await run.until("a/2", "serving")).waiting == 5 + 3  # and those that vLLM tells
        assert await owner.perform(START) == e.ModelStarted("a/0", 0)
        await until(lambda: len(run.hosts.asked) == 2)
        assert run.hosts.asked == ["model-2", "model-0"]
        row = await run.until("a/2", "serving")
        while row.running == 6:
            row = await run.until("a/2", "serving")
        assert row.running == 3
        leaving = asyncio.create_task(owner.perform(a.StopModel("a/0", 1)))
        while (await run.until("a/2", "serving")).running < 5:
            pass
        run.hosts.held.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 6
        assert await leaving == e.ModelStopped("a/0", 1)
        assert run.hosts.asked == ["model-2", "model-0", *["model-2"] * 4]
        await owner.close()

    play(scene, recipe=ONE_SEAT)


@pytest.mark.parametrize("path", ["metrics", "v1/../metrics", "v1/./models", "v1x/models"])
def test_nothing_but_the_api_of_a_model_is_reached(play: Any, path: str) -> None:
    async def scene(run: Scene) -> None:
        headers = {"Authorization": f"Bearer {run.token}"}
        url = URL(f"{run.url}/judge/{path}", encoded=True)
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as told:
            assert told.status == 404
            assert "is not there, but what is below /judge/v1" in await told.text()
        assert run.hosts.asked == []

    play(scene)


def test_at_the_end_of_a_run_nobody_waits_for_answers(play: Any) -> None:
    async def scene(run: Scene) -> None:
        owner = processes(run.hosts, [])
        await owner.perform(START)
        run.hosts.held = asyncio.Event()
        asked = [asyncio.create_task(run.ask(n=number)) for number in range(3)]
        await until(lambda: "model-0" in run.hosts.asked)
        stop = a.StopModel("a/0", 1, at_once=True)
        assert await owner.perform(stop) == e.ModelStopped("a/0", 1)
        assert not any(one.done() for one in asked)
        run.hosts.held.set()
        await asyncio.gather(*asked)

    play(scene)


def test_a_server_that_takes_too_long_to_answer_goes_and_another_is_asked(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra_cli.runtime.frozen.processes.ANSWERS_S", 5)

    async def scene(run: Scene) -> None:
        owner = processes(run.hosts, [])
        await owner.perform(START)
        run.hosts.held = asyncio.Event()
        asked = [asyncio.create_task(run.ask(n=number)) for number in range(3)]
        await until(lambda: "model-0" in run.hosts.asked)
        assert await owner.perform(a.StopModel("a/0", 1)) == e.ModelStopped("a/0", 1)
        run.hosts.held.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3

    play(scene)


def test_of_one_that_does_not_start_or_dies_the_machine_hears_and_starts_no_other(
    play: Any,
) -> None:
    async def scene(run: Scene) -> None:
        posted: list[e.Event] = []
        owner = processes(run.hosts, posted)
        run.hosts.refuses = "a has no room"
        assert await owner.perform(START) is None
        assert posted == [e.ModelFailed("a/0", 0, "a has no room")]
        await owner.perform(a.StopModel("a/0", 1))
        run.hosts.refuses = ""
        assert await owner.perform(a.StartModel("a/0", 1, "judge")) == e.ModelStarted("a/0", 1)
        await run.hosts.kill("model-0")
        await until(lambda: len(posted) == 2)
        assert isinstance(posted[1], e.ModelFailed)
        assert "ValueError: no room" in posted[1].reason
        status, told = await run.ask(n=1)
        assert (status, told["by"] in ("model-2", "model-3")) == (200, True)
        assert run.hosts.started.count("model-0") == 1
        await owner.close()

    play(scene)


def test_one_that_died_tells_which_gpus_its_host_has_lost(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = LostGpu("a", 0, "GPU-7")

    async def lost(cluster: object, failed: Sequence[ProcessSpec]) -> tuple[LostGpu, ...]:
        assert [one.process for one in failed] == ["model-0"]
        return (gone,)

    monkeypatch.setattr(processes_module, "lost_gpus", lost)

    async def scene(run: Scene) -> None:
        posted: list[e.Event] = []
        owner = processes(run.hosts, posted)
        await owner.perform(START)
        await run.hosts.kill("model-0")
        await until(lambda: bool(posted))
        assert await owner.perform(a.StopModel("a/0", 1)) == e.ModelStopped("a/0", 1, (gone,))
        await owner.perform(a.StartModel("a/0", 1, "judge"))
        assert await owner.perform(a.StopModel("a/0", 2)) == e.ModelStopped("a/0", 2)

    play(scene)


def test_one_that_hangs_is_replaced_after_its_limit_and_not_after_that_of_a_question(
    play: Any,
) -> None:
    async def silent(session: object, answer_s: float = module.ANSWER_S) -> bool:
        await asyncio.sleep(answer_s)
        return False

    async def scene(run: Scene) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SILENT_S", 0.05)
            patch.setattr(module, "_is_well", silent)
            row = await run.until("a/3", "failed")
        assert row.detail.startswith("has not answered for 0 s")

    play(scene)


def test_what_is_asked_is_counted_on_every_slot_and_stays_when_a_server_goes(play: Any) -> None:
    async def scene(run: Scene) -> None:
        posted: list[e.Event] = []
        owner = processes(run.hosts, posted)
        await owner.perform(START)
        run.hosts.held = asyncio.Event()
        asked = [asyncio.create_task(run.ask(n=number)) for number in range(4)]
        await until(lambda: len(run.hosts.asked) == 4)
        (use,) = run.hosts.models.uses
        assert (use.model, use.servers, use.open, use.answered) == ("judge", 3, 4, 0)
        run.hosts.held.set()
        await asyncio.gather(*asked)
        (busy,) = run.hosts.models.uses
        assert busy.asked_s > busy.busy_s > 0.0, "two of them were open beside each other"
        await owner.perform(a.StopModel("a/0", 1))
        (left,) = run.hosts.models.uses
        assert (left.servers, left.open, left.answered) == (2, 0, 4)
        assert (left.busy_s, left.asked_s) >= (busy.busy_s, busy.asked_s)
        counting = asyncio.create_task(owner.count())
        await until(lambda: bool(posted))
        counting.cancel()
        assert isinstance(posted[0], e.ModelsUsed)
        assert posted[0].uses[0].model == "judge"

    play(scene)
