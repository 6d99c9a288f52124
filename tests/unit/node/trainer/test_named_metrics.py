"""A loss, a monitor and a server's metric that libra knows nothing of are shown by their names.

The losses and the monitors are those of a package that is installed, and found by entry points.
"""

from __future__ import annotations

import asyncio
import heapq
import importlib
import io
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import pytest
from rich.console import Console

from libra_cli.config.errors import PluginError, TrainerError
from libra_cli.config.training import TrainingSpec
from libra_cli.core import events as e
from libra_cli.core.records import Record, SampleRecord, StepRecord
from libra_cli.report.html.run_report import write_report
from libra_cli.report.status.summary import summary, to_json
from libra_cli.report.terminal.console import status_view
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.monitors import dispatch
from libra_cli.runtime.monitors.dispatch import Monitors
from libra_cli.runtime.monitors.jsonl import FILE
from libra_cli.runtime.monitors.protocol import MonitoredRun
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.store.controller_process import process_started
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.vllm.client import ServerClient
from libra_cli.runtime.vllm.metrics import Page
from tests.sample_run import run_record, step_record
from tests.sockets import socket_path
from tests.world import World

MODULE = "of_my_own"
SOURCE = """
import threading

told = []
released = threading.Event()


class Remembering:
    def start(self, run):
        told.append(("start", run.id, run.recipe["run"]["steps"]))

    def log(self, step, metrics):
        told.append(("log", step, metrics))

    def finish(self, state):
        told.append(("finish", state))


class Raising(Remembering):
    def log(self, step, metrics):
        raise OSError("no route to the server")


class Hanging(Remembering):
    def log(self, step, metrics):
        released.wait()


def halved(inputs, training, *, scale):
    from libra_cli.node.losses.protocol import LossOutputs

    loss = -scale * inputs.advantages * inputs.logprobs
    return LossOutputs(loss.sum(), {"halved_mean": inputs.advantages.abs().sum() / 2})


def greedy(inputs, training):
    from libra_cli.node.losses.protocol import LossOutputs

    return LossOutputs(inputs.logprobs.sum(), {"entropy": inputs.logprobs.sum()})
"""
ENTRY_POINTS = f"""
[libra.losses]
halved = {MODULE}:halved
greedy = {MODULE}:greedy
[libra.monitors]
remembering = {MODULE}:Remembering
raising = {MODULE}:Raising
hanging = {MODULE}:Hanging
"""
RECIPE = "nodes:\n  - {host: local, slots: 2}\nmodel: {build: {}}\n"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, as pip would leave it."""
    about = tmp_path / "site" / f"{MODULE}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (about.parent / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(about.parent)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)


def recipe(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE + text)
    return load_recipe(path, {})


@dataclass(frozen=True)
class Shown:
    """What libra makes of the records of a run."""

    status: Any
    terminal: str
    report: str


def shown(run_dir: Path, records: list[Record], *, now: float) -> Shown:
    with Journal(run_dir) as journal:
        for record in records:
            journal.save(record)
    with Reader(run_dir) as reader:
        told = summary(reader, now=now)
    out = io.StringIO()
    Console(file=out, width=80).print(status_view(told, now=now))
    report = write_report(run_dir, now=now).read_text()
    return Shown(json.loads(to_json(told)), out.getvalue(), report)


@dataclass
class TrainedWith(World):
    """A world whose trainer names metrics of its own."""

    metrics: dict[str, float | None] = field(default_factory=dict)

    def later(self, event: e.Event, least: float = 0.01, most: float = 1.0) -> None:
        if isinstance(event, e.StepDone):
            event = replace(event, metrics=self.metrics)
        super().later(event, least, most)


# -- a loss ----------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_a_metric_of_a_loss_of_ones_own_is_shown_everywhere(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the [cpu] extra")
    from libra_cli.node.losses.protocol import LossInputs, loss_of

    training = recipe(tmp_path, "training: {loss: halved, loss_args: {scale: 3}}\n").training
    assert MODULE not in sys.modules, "the controller needs no torch to check a recipe"
    tokens, whole = torch.tensor([1.0, -2.0, 3.0]), torch.zeros(3, dtype=torch.int64)
    outputs = loss_of(training)(
        LossInputs(tokens, tokens, tokens, tokens, whole, whole, whole, whole.bool(), max_len=64)
    )
    assert float(outputs.loss) == -3 * (1 + 4 + 9)
    metrics = {name: float(total) / 3 for name, total in outputs.metrics.items()}
    world = TrainedWith(Random(1), metrics={**metrics, "trainer_s": 2.0}).run()

    seen = shown(tmp_path / "run", world.records, now=world.now)
    assert seen.status["metrics"]["halved_mean"] == {"first": 1.0, "last": 1.0}
    assert "halved_mean 1" in seen.terminal
    assert "<b>halved_mean</b>" in seen.report
    assert '<th class="n">halved_mean</th>' in seen.report
    assert world.steps[-1].trainer_s == 2.0


@pytest.mark.vllm
def test_a_loss_that_does_not_take_its_arguments_is_refused_before_the_model_is_loaded() -> None:
    pytest.importorskip("torch", reason="needs the [cpu] extra")
    from libra_cli.node.losses.protocol import loss_of

    with pytest.raises(TrainerError, match="missing a required argument: 'scale'") as caught:
        loss_of(TrainingSpec(loss="halved", loss_args={"scael": 1}))
    assert "scale" in caught.value.hint
    with pytest.raises(PluginError, match="importing not_here failed"):
        loss_of(TrainingSpec(loss="not_here:loss"))


@pytest.mark.vllm
def test_a_loss_cannot_take_the_name_of_a_metric_of_libras() -> None:
    torch = pytest.importorskip("torch", reason="needs the [cpu] extra")
    from libra_cli.node.losses.protocol import LossInputs, loss_of

    token, whole = torch.tensor([1.0]), torch.tensor([0])
    inputs = LossInputs(token, token, token, token, whole, whole, whole, whole.bool(), max_len=64)
    with pytest.raises(TrainerError, match="'greedy' names a metric 'entropy', which is libra's"):
        loss_of(TrainingSpec(loss="greedy"))(inputs)


# -- a metric of the servers' ----------------------------------------------------------------------


async def readings(pages: list[Page], slot: str, incarnation: int) -> list[e.ServerSampled]:
    """What a client makes of a server whose counters are one after the other of these."""
    left, gone = iter(pages), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unpacker = msgpack.Unpacker()
        while data := await reader.read(1 << 16):
            unpacker.feed(data)
            for message in unpacker:
                if isinstance(message, list):  # and not the token
                    writer.write(msgpack.packb([message[0], "done", next(left)]))
        writer.close()
        await writer.wait_closed()
        gone.set()

    path = socket_path()
    async with await asyncio.start_unix_server(serve, path):
        client = ServerClient(slot, incarnation, Endpoint(path), "token")
        try:
            return [await client.sample() for _ in pages]
        finally:
            await client.close()
            await gone.wait()


def counters(seconds: float, turns: int) -> Page:
    waited = {"queue_time_s_sum": seconds, "queue_time_s_count": turns}
    return {"running": 3, "waiting": 0, "kv_use": 0.5, **waited}


def test_a_metric_of_a_servers_counters_is_shown_everywhere(tmp_path: Path) -> None:
    world = World(Random(2))
    world.later(e.RunStarted())
    while not world.steps:
        world.now, _, event = heapq.heappop(world._heap)
        world.give(event)
    status = next(s for s in world.machine.servers.replicas.values() if s.routable)
    pages = [counters(0.0, 0), counters(6.0, 4), counters(7.0, 6)]
    taken = asyncio.run(readings(pages, status.slot.id, status.incarnation))
    named = [reading.metrics for reading in taken]
    assert named == [{"request_queue_time_s": value} for value in (None, 1.5, 0.5)]
    for reading in taken:
        world.give(reading)
        world.now += 0.1
    assert [sample.metrics for sample in world.rows(SampleRecord)] == named

    alive = run_record(
        controller_pid=os.getpid(), controller_started=process_started(os.getpid()), id="run"
    )
    # The step ended just before; the report gives every reading to the step it was taken in.
    later = replace(world.steps[-1], ended_at=world.now + 1)
    seen = shown(tmp_path / "run", [*world.records, later, alive], now=world.now)
    servers = {server["slot"]: server["metrics"] for server in seen.status["servers"]}
    assert servers[status.slot.id] == {"request_queue_time_s": 0.5}
    assert "request_queue_time_s 0.5" in seen.terminal
    assert "<b>request_queue_time_s</b>" in seen.report


# -- a monitor -------------------------------------------------------------------------------------


def monitored(tmp_path: Path, *names: str, notes: list[str]) -> Monitors:
    checked = recipe(tmp_path, f"run: {{steps: 7, monitors: [{', '.join(names)}]}}\n")
    run = MonitoredRun("quickstart-1", tmp_path, checked.model_dump(mode="json"), notes.append)
    return Monitors(checked.run.monitors, run)


def steps() -> list[StepRecord]:
    return [step_record(n, 10.0 * n, reward=n / 4, logprob_gap=None) for n in (1, 2)]


def test_a_monitor_is_told_of_the_start_every_step_once_and_the_end(tmp_path: Path) -> None:
    notes: list[str] = []
    with monitored(tmp_path, "remembering", notes=notes) as monitors:
        monitors.on(run_record("running"))
        for step in steps():
            monitors.on(step)
            monitors.on(replace(step, checkpoint="/checkpoints/1"))
        monitors.on(run_record("finished"))
    start, first, second, finish = importlib.import_module(MODULE).told
    assert start == ("start", "quickstart-1", 7)
    assert finish == ("finish", "finished")
    assert (first[:2], second[:2]) == (("log", 1), ("log", 2))
    wanted = {"reward/mean": 0.5, "response_length/mean": 20.3, "train/grad_norm": 0.8}
    assert {name: second[2][name] for name in wanted} == wanted
    assert "train/logprob_gap" not in second[2], "what is unknown is left out"
    assert notes == []


def test_a_monitor_that_raises_is_told_of_once_and_the_others_go_on(tmp_path: Path) -> None:
    notes: list[str] = []
    with monitored(tmp_path, "raising", notes=notes) as monitors:
        for step in steps():
            monitors.on(step)
    assert notes == ["monitor raising is dropped: OSError: no route to the server"]
    assert [row[0] for row in importlib.import_module(MODULE).told] == ["start"]
    rows: list[Mapping[str, Any]] = [
        json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()
    ]
    assert [(row["step"], row["reward/mean"], row["train/loss"]) for row in rows] == [
        (1, 0.25, 0.01),
        (2, 0.5, 0.01),
    ]


def test_a_monitor_that_hangs_holds_up_the_end_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "FINISH_S", 0.05)
    notes: list[str] = []
    with monitored(tmp_path, "hanging", notes=notes) as monitors:
        monitors.on(steps()[0])
    assert notes == ["monitor hanging did not finish within 0 s"]
    importlib.import_module(MODULE).released.set()


def test_a_monitor_that_cannot_be_imported_is_an_error_of_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="importing not_here failed"):
        monitored(tmp_path, "'not_here:Monitor'", notes=[])
