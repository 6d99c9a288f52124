"""What the SDK, as it is published, is told by a service whose workers only do arithmetic."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libra_cli.cli.main import app
from libra_cli.config.errors import TrainerError
from libra_cli.runtime.tinker.adapters import SavedAdapters
from libra_cli.runtime.tinker.address import ServiceAddress
from libra_cli.runtime.tinker.service import ServedModel, TinkerService
from libra_cli.runtime.tinker.sessions import Sessions
from libra_cli.runtime.tinker.turns import Turns
from tests.live import require

require("tinker")
DEADLINE_S = 20.0
BASE = "Qwen/Qwen3-8B"


class FakeWorkers:
    """An adapter is one number: a backward pass adds what it is given to the gradient, a step adds
    that to the number, and samples and losses tell it. ``hold`` has samples wait, ``hold_training``
    the trainer."""

    stop_token_ids: tuple[int, ...] = (2,)

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        self.done: list[tuple[str, str]] = []
        self.on_servers: dict[str, float] = {}
        self.hold: asyncio.Event | None = None
        self.hold_training: asyncio.Event | None = None
        self.sampling: list[str | None] = []

    async def train(self, operation: str, order: Any) -> dict[str, Any]:
        who = order["model"]
        await asyncio.sleep(0)
        if self.hold_training is not None:
            await self.hold_training.wait()
        self.done.append((operation, who))
        if operation != "create" and who not in self.numbers:
            raise TrainerError(f"there is no model {who}")
        return dict(getattr(self, f"_{operation}")(who, order) or {})

    def _create(self, who: str, order: Any) -> None:
        self.numbers[who], self.gradients[who] = float(order["seed"]), 0.0

    def _forward_backward(self, who: str, order: Any) -> dict[str, Any]:
        if order["loss"] == "dro":
            raise RuntimeError("out of memory")
        if order["loss"] == "ppo":
            raise TrainerError("a datum has no advantages")
        lengths = [len(one["tokens"]) // 4 for one in order["data"]]
        self.gradients[who] += sum(lengths)
        rows = [array("f", [self.numbers[who]] * length).tobytes() for length in lengths]
        return {"logprobs": rows, "loss": self.numbers[who] * sum(lengths)}

    def _step(self, who: str, order: Any) -> dict[str, Any]:
        norm = self.gradients[who]
        self.numbers[who] += norm * order["settings"]["learning_rate"]
        self.gradients[who] = 0.0
        return {"norm": norm}

    def _save(self, who: str, order: Any) -> dict[str, Any]:
        return {"file": array("d", [self.numbers[who]]).tobytes()}

    def _load(self, who: str, order: Any) -> None:
        self.numbers[who] = array("d", order["file"])[0]

    def _unload(self, who: str, order: Any) -> None:
        del self.numbers[who], self.gradients[who]

    async def add_adapter(self, name: str, config: str, tensors: bytes) -> None:
        self.on_servers[name] = array("d", tensors)[0]

    async def remove_adapter(self, name: str) -> None:
        assert name not in self.sampling, "a turn that is under way names it"
        del self.on_servers[name]

    async def sample(self, order: Any) -> dict[str, Any]:
        number = 0.0 if order["adapter"] is None else self.on_servers[order["adapter"]]
        self.sampling.append(order["adapter"])
        try:
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.sampling.remove(order["adapter"])
        return {
            "token_ids": array("i", [int(number), order["seed"] or 0]).tobytes(),
            "logprobs": array("f", [-number, 0.0]).tobytes(),
            "prompt_logprobs": b"",
            "finish_reason": "stop",
        }


class Served:
    """A service in a thread of its own, its workers, and a clock that tests move."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.notes: list[str] = []
        self.directory = directory
        self.workers = FakeWorkers()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.clients: list[Any] = []
        model = ServedModel(BASE, frozenset(), "/nowhere", 64, 32)
        self.service = TinkerService(
            model,
            self.workers,
            SavedAdapters(directory),
            sessions=Sessions(lease_s=300.0, clock=lambda: self.now),
            note=self.notes.append,
        )
        self.url = self.run(self.service.start(0))

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_S)

    def client(self) -> Any:
        sdk = importlib.import_module("tinker")
        self.clients.append(sdk.ServiceClient(base_url=self.url, api_key=self.service.key))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close("success").result(DEADLINE_S)
        self.run(self.service.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(DEADLINE_S)
        self.loop.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    it = Served(tmp_path)
    yield it
    it.close()


def types() -> Any:
    return importlib.import_module("tinker").types


def datum(length: int) -> Any:
    sdk = types()
    inputs = {"target_tokens": [1] * length, "weights": [1.0] * length}
    return sdk.Datum(model_input=sdk.ModelInput.from_ints([1] * length), loss_fn_inputs=inputs)


def trained(client: Any, seed: int) -> Any:
    return client.create_lora_training_client(BASE, rank=8, seed=seed).result(DEADLINE_S)


def loss_of(asked: Any) -> float:
    return float(asked.result(DEADLINE_S).metrics["loss:sum"])


def step(training: Any, length: int) -> tuple[Any, Any]:
    """What a loop sends at once: a pass and a step, of which neither is awaited."""
    asked = training.forward_backward([datum(length)], "cross_entropy")
    return asked, training.optim_step(types().AdamParams(learning_rate=0.5))


def loads(training: Any, path: str) -> Any:
    with pytest.warns(FutureWarning, match="load_state"):
        return training.load_state(path)


def test_requests_that_are_sent_at_once_are_carried_out_in_their_order(served: Served) -> None:
    training = trained(served.client(), 1)
    asked = [step(training, length) for length in (2, 4, 6)]
    assert [loss_of(one) for one, _ in asked] == [2 * 1.0, 4 * 2.0, 6 * 4.0]
    norms = [one.result(DEADLINE_S).metrics["grad_norm:mean"] for _, one in asked]
    assert norms == [2.0, 4.0, 6.0]
    assert [name for name, _ in served.workers.done[1:]] == ["forward_backward", "step"] * 3


def test_two_clients_that_take_turns_are_each_told_what_they_are_told_alone(
    served: Served,
) -> None:
    def told(*seeds: int) -> list[list[float]]:
        clients = [trained(served.client(), seed) for seed in seeds]
        asked = [[step(client, length)[0] for client in clients] for length in (2, 3, 5)]
        return [[loss_of(row[place]) for row in asked] for place in range(len(seeds))]

    both = told(1, 7)
    assert both == [*told(1), *told(7)]
    assert both[0] != both[1]


def test_errors_have_the_categories_of_the_sdk(served: Served) -> None:
    sdk = importlib.import_module("tinker")
    training = trained(served.client(), 1)
    for loss, category, words in (
        ("ppo", "User", "a datum has no advantages"),
        ("dro", "Server", "RuntimeError: out of memory"),
    ):
        with pytest.raises(sdk.RequestFailedError, match=words) as told:
            training.forward_backward([datum(2)], loss).result(DEADLINE_S)
        assert told.value.category is sdk.types.RequestErrorCategory[category]
    # One that fails is over: the next has its turn.
    assert loss_of(training.forward_backward([datum(2)], "cross_entropy")) == 2.0


def test_a_model_that_is_asked_for_again_while_it_is_created_is_created_once(
    served: Served,
) -> None:
    session = served.run(served.service._create_session({}))["session_id"]
    told = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": BASE,
        "lora_config": {"rank": 8, "seed": 3},
    }

    async def asked() -> list[Any]:
        served.workers.hold_training = asyncio.Event()
        names = [(await served.service._create_model(told))["request_id"] for _ in range(2)]
        await asyncio.sleep(0)
        served.workers.hold_training.set()
        return [await served.service._futures.outcome(name) for name in names]

    first, again = served.run(asked())
    assert first == again == {"model_id": f"{session}:train:0", "type": "create_model"}
    assert served.workers.done == [("create", f"{session}:train:0")]


def test_a_request_that_is_refused_has_had_its_turn(served: Served) -> None:
    sdk = types()
    client = served.client()
    training = trained(client, 1)
    # Requests that come before their turn wait so long for those that are missing.
    served.service._models[training.model_id].turns = Turns(missing_s=2.0)
    matrix = sdk.TensorData(data=[1, 1], dtype="int64", shape=[1, 2])
    wrong = sdk.Datum(
        model_input=sdk.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": matrix}
    )
    refused = (
        (training.forward_backward([wrong], "cross_entropy"), "a matrix"),
        (loads(training, "tinker://nobody/weights/none"), "nothing is saved"),
    )
    for asked, words in refused:
        with pytest.raises(Exception, match=words):
            asked.result(DEADLINE_S)
    assert loss_of(training.forward_backward([datum(2)], "cross_entropy")) == 2.0


def test_a_state_is_loaded_as_the_requests_before_it_have_left_it(served: Served) -> None:
    training = trained(served.client(), 3)
    path = training.save_state("latest").result(DEADLINE_S).path
    served.workers.hold_training = asyncio.Event()
    step(training, 4)
    training.save_state("latest")
    loaded = loads(training, path)
    wait_until(lambda: 5 in served.service._models[training.model_id].turns.known)
    served.loop.call_soon_threadsafe(served.workers.hold_training.set)
    loaded.result(DEADLINE_S)
    assert loss_of(training.forward_backward([datum(1)], "cross_entropy")) == 5.0
    adapter = served.service.status()["clients"][0]["adapters"][0]
    assert (adapter["steps"], adapter["unsaved"]) == (0, False)


def test_what_is_saved_anew_under_its_name_is_what_is_sampled_from_then_on(served: Served) -> None:
    client = served.client()
    training = trained(client, 3)
    asked = types().ModelInput.from_ints([1]), 2, types().SamplingParams(seed=5)

    def tokens() -> list[list[int]]:
        path = training.save_weights_for_sampler("best").result(DEADLINE_S).path
        sampler = client.create_sampling_client(model_path=path).result(DEADLINE_S)
        found = sampler.sample(*asked).result(DEADLINE_S)
        return [one.tokens for one in found.sequences]

    assert tokens() == [[3, 5], [3, 6]]
    step(training, 4)[1].result(DEADLINE_S)
    assert tokens() == [[5, 5], [5, 6]]
    assert list(served.workers.on_servers.values()) == [5.0]


def test_a_client_that_ends_leaves_nothing_in_memory_and_others_as_they_are(
    served: Served,
) -> None:
    client, other = served.client(), served.client()
    training, others = trained(client, 3), trained(other, 4)
    for one in (training, others):
        one.save_weights_and_get_sampling_client().result(DEADLINE_S)
        one.save_state("kept").result(DEADLINE_S)
    assert sorted(served.workers.on_servers.values()) == [3.0, 4.0]
    client.close("success").result(DEADLINE_S)
    assert list(served.workers.numbers.values()) == [4.0]
    assert list(served.workers.on_servers.values()) == [4.0]
    kept = sorted(str(one.relative_to(served.directory)) for one in served.directory.glob("*/*/*"))
    assert [one.partition("/")[2] for one in kept if "sampler" not in one] == ["weights/kept"] * 2
    assert len([one for one in kept if "sampler" in one]) == 1
    assert loss_of(others.forward_backward([datum(1)], "cross_entropy")) == 4.0


def test_a_client_that_is_not_heard_of_for_a_lease_is_saved_and_let_go_of(served: Served) -> None:
    gone, there = trained(served.client(), 3), trained(served.client(), 4)
    sampler = gone.save_weights_and_get_sampling_client().result(DEADLINE_S)
    served.workers.hold = asyncio.Event()
    sampled = sampler.sample(types().ModelInput.from_ints([1]), 1, types().SamplingParams())
    for training in (gone, there):
        step(training, 2)[1].result(DEADLINE_S)
    wait_until(lambda: served.workers.sampling)
    served.now = 200.0
    session = there.model_id.partition(":")[0]
    served.run(served.service._heartbeat({"session_id": session}))
    served.run(served.service.end_silent_sessions())
    assert len(served.workers.numbers) == 2, "the lease of neither is over"
    served.now = 301.0
    served.run(served.service.end_silent_sessions())
    assert list(served.workers.numbers) == [there.model_id]
    assert served.workers.on_servers == {}
    assert served.workers.sampling == []
    path = f"tinker://{gone.model_id}/weights/left"
    (note,) = served.notes
    assert note.endswith(f"for 300 s: its adapters have left memory; saved {path}")
    again = served.client().create_training_client_from_state(path).result(DEADLINE_S)
    assert loss_of(again.forward_backward([datum(1)], "cross_entropy")) == 4.0
    sdk = importlib.import_module("tinker")
    with pytest.raises(sdk.TinkerError, match="cancelled"):
        sampled.result(DEADLINE_S)
    with pytest.raises(sdk.TinkerError, match=f"there is no model .*go on from {path}"):
        gone.forward_backward([datum(1)], "cross_entropy").result(DEADLINE_S)


def test_what_cannot_be_saved_of_a_client_that_is_gone_is_told_and_let_go_of(
    served: Served,
) -> None:
    gone = trained(served.client(), 3)
    step(gone, 2)[1].result(DEADLINE_S)
    (served.directory / gone.model_id).write_text("a file stands where its directory should be")
    served.now = 301.0
    served.run(served.service.end_silent_sessions())
    assert served.workers.numbers == {}
    (note,) = served.notes
    assert f"; {gone.model_id} is lost: " in note
    assert "cannot be written" in note


def test_a_client_that_is_heard_of_while_another_is_saved_stays(served: Served) -> None:
    gone, there = trained(served.client(), 3), trained(served.client(), 4)
    step(gone, 2)[1].result(DEADLINE_S)
    ended, session = (one.model_id.partition(":")[0] for one in (gone, there))
    served.now = 301.0
    served.workers.hold_training = asyncio.Event()
    ending = asyncio.run_coroutine_threadsafe(served.service.end_silent_sessions(), served.loop)
    wait_until(lambda: ended not in served.service._sessions.names())
    served.run(served.service._heartbeat({"session_id": session}))
    served.loop.call_soon_threadsafe(served.workers.hold_training.set)
    ending.result(DEADLINE_S)
    assert list(served.workers.numbers) == [there.model_id]


def test_status_tells_of_clients_and_adapters_and_that_a_service_has_ended(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ServiceAddress(served.url, served.service.key).write(served.directory)
    assert (served.directory / "service.json").stat().st_mode & 0o077 == 0
    client, idle = served.client(), served.client()
    training = trained(client, 3)
    step(training, 2)[1].result(DEADLINE_S)
    training.save_weights_and_get_sampling_client().result(DEADLINE_S)
    idle.create_sampling_client(base_model=BASE).result(DEADLINE_S)
    served.now = 42.0
    told = CliRunner().invoke(app, ["status", str(served.directory)])
    assert told.exit_code == 0, told.output
    lines = [line.split() for line in told.output.splitlines()]
    assert max(map(len, told.output.splitlines())) <= 80
    assert lines[0] == ["libra", "tinker", BASE]
    assert " ".join(lines[1]) == "2 clients, 0 requests under way, 1 of 32 adapters on servers"
    session = training.model_id.partition(":")[0]
    assert [session, "0", "8", "1", "not", "saved", "1", "42", "s", "ago"] in lines
    found = json.loads(CliRunner().invoke(app, ["status", "--json", str(served.directory)]).output)
    adapter = {"model": training.model_id, "rank": 8, "steps": 1, "unsaved": True}
    assert [one["adapters"] for one in found["clients"]] == [[adapter], []]
    ServiceAddress("http://127.0.0.1:9", "tml-old").write(served.directory)
    ended = CliRunner().invoke(app, ["status", str(served.directory)])
    assert ended.exit_code == 1
    assert f"no libra tinker serves {served.directory}" in " ".join(ended.output.split())


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
