"""Every monitor that ships, with the real package and what it reads back from it.

No network: W&B offline, Trackio's own SQLite file, MLflow's file store, TensorBoard's event files,
a scrape of ``/metrics``, and a collector that decodes what OTLP/HTTP brings it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from libra_cli.core import records as r
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.monitors import dispatch
from libra_cli.runtime.monitors.dispatch import Monitors
from libra_cli.runtime.monitors.protocol import MonitoredRun
from tests.sample_run import branch, run_record, step_record

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

RUN = "quickstart-1"
TEXT = "user\nfind <b>\n"
RECIPE = {"run": {"name": "quickstart"}, "training": {"learning_rate": 1e-4}}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing some of them takes half a minute on a busy machine."""
    monkeypatch.setattr(dispatch, "FINISH_S", 120.0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with the model's tokenizer."""
    directory = tmp_path / RUN
    (directory / "model").mkdir(parents=True)
    save_tokenizer(build_tokenizer(), directory / "model", max_len=512)
    return directory


def trajectory(step: int, *, reward: float, ended: bool = True) -> r.TrajectoryRecord:
    ids = build_tokenizer().encode(TEXT, add_special_tokens=False).ids
    return r.TrajectoryRecord(
        group_id=step,
        member=1,
        attempt=0,
        state="finished" if ended else "running",
        started_at=100.0 * step,
        ended_at=100.0 * step + 9 if ended else None,
        reward=reward if ended else None,
        turns=1,
        generated_tokens=7,
        context_tokens=len(ids),
        min_version=0,
        max_version=0,
        spans_json="[]",
        detail="",
        tokens=(branch(ids),) if ended else (),
    )


def turn(step: int) -> r.TurnRecord:
    at = 100.0 * step
    return r.TurnRecord(
        group_id=step,
        member=1,
        attempt=0,
        turn=0,
        slot="local/0",
        incarnation=1,
        queued_at=at + 1,
        started_at=at + 2,
        ended_at=at + 4,
        prompt_tokens=12,
        generated_tokens=7,
        finish_reason="length",
        moved_from="",
        tools_json=json.dumps([["get", "ok", 0.5, 30], ["put", "timeout", 2.0, 14]]),
    )


def reading(slot: str) -> r.SampleRecord:
    return r.SampleRecord(slot, 1.0, 3, 1, 0.25, 0.75, 2, 0.5, 1000, 80.0)


def records(*steps: int) -> Iterator[r.Record]:
    yield run_record("running")
    for step in steps:
        yield trajectory(step, reward=0, ended=False)
        yield turn(step)
        yield reading("local/0")
        yield trajectory(step, reward=step / 4)
        yield step_record(step, 100.0 * step + 10, reward=step / 4)


class Told:
    """Runs that were told of, and what they noted."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.notes: list[str] = []

    def of(self, monitor: str, *steps: int, **arguments: Any) -> Monitors:
        run = MonitoredRun(RUN, self.run_dir, RECIPE, self.notes.append)
        monitors = Monitors({monitor: arguments}, run, samples=2)
        with monitors:
            for record in records(*steps):
                monitors.on(record)
            monitors.on(run_record("finished"))
        return monitors

    def nothing_failed(self) -> None:
        assert not [note for note in self.notes if note.startswith("monitor ")], self.notes


@pytest.fixture
def told(run_dir: Path) -> Told:
    return Told(run_dir)


# -- TensorBoard -----------------------------------------------------------------------------------


def events(directory: Path) -> Iterator[Any]:
    """What the event files hold: records of length, checksum, data, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(directory.glob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event()
            event.ParseFromString(data[12 : 12 + length])
            data = data[16 + length :]
            yield event


def test_tensorboard_has_scalars_and_text_and_hides_what_was_trained_again(told: Told) -> None:
    told.of("tensorboard", 1, 2, 3, 2, 3)
    told.nothing_failed()
    directory = told.run_dir / "tensorboard"
    assert f"TensorBoard: tensorboard --logdir {directory}" in told.notes
    found = list(events(directory))
    values = [(e.step, v) for e in found for v in e.summary.value]
    rewards = [(step, v.simple_value) for step, v in values if v.tag == "reward/mean"]
    assert rewards == [(1, 0.25), (2, 0.5), (3, 0.75), (2, 0.5), (3, 0.75)]
    assert [e.step for e in found if e.session_log.status == 1] == [1, 2], (
        "TensorBoard purges there"
    )
    texts = [v.tensor.string_val[0].decode() for _, v in values if v.tag.startswith("samples")]
    assert "    find <b>" in texts[0]
    assert "trajectory 1.1.0, reward 0.25, 1 turns" in texts[0]


# -- W&B -------------------------------------------------------------------------------------------


def test_wandb_goes_on_offline_with_the_runs_id(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    told.of("wandb", 1, 2, project="mine", tags=["first"])
    told.of("wandb", 3, project="mine")
    told.nothing_failed()
    import wandb

    wandb.teardown()  # W&B's own process writes the last of it when it ends
    first, second = sorted((told.run_dir / "wandb").glob("offline-run-*"))
    assert (first / f"run-{RUN}.wandb").is_file()
    assert (second / f"run-{RUN}.wandb").is_file()
    history, config = wandb_rows(first)
    steps = [row for row in history if "reward/mean" in row]
    assert [(row["train/step"], row["reward/mean"]) for row in steps] == [(1, 0.25), (2, 0.5)]
    assert config["training"]["learning_rate"] == 1e-4
    tables = list((first / "files" / "media" / "table").glob("samples*.json"))
    shown = json.loads(tables[0].read_text())
    assert shown["columns"][:3] == ["step", "trajectory", "reward"]
    assert any("find <b>" in row[-1] for row in shown["data"])
    assert [row["train/step"] for row in wandb_rows(second)[0] if "reward/mean" in row] == [3]


def wandb_records(directory: Path) -> Iterator[bytes]:
    """What W&B's file holds, which is a log of LevelDB: blocks of 32 KiB after a header."""
    (path,) = directory.glob("*.wandb")
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32_768 - at % 32_768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if left < 7 or not kind:
            at += left
            continue
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def wandb_rows(directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The history and the config."""
    from wandb.proto.wandb_internal_pb2 import Record

    history: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    for data in wandb_records(directory):
        record = Record.FromString(data)
        if items := record.history.item:
            keys = [item.key or "/".join(item.nested_key) for item in items]
            values = [json.loads(item.value_json) for item in items]
            history.append(dict(zip(keys, values, strict=True)))
        updates = [*record.run.config.update, *record.config.update]
        config |= {update.key: json.loads(update.value_json) for update in updates if update.key}
    return history, config


def test_wandb_without_a_key_is_named_and_asks_nobody(
    told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    import wandb

    wandb.teardown()  # it reads the environment once
    told.of("wandb", 1)
    (note,) = told.notes
    assert "monitor wandb is dropped" in note
    assert "WANDB_MODE=offline" in note


# -- Trackio ---------------------------------------------------------------------------------------


def test_trackio_keeps_metrics_and_tables_and_goes_on_with_its_run(
    told: Told, tmp_path: Path
) -> None:
    """In a process of its own: Trackio reads TRACKIO_DIR when it is imported."""
    code = (
        "import sys; from pathlib import Path; from tests.integration.test_monitors import Told;"
        "told = Told(Path(sys.argv[1])); told.of('trackio', 1, 2); told.of('trackio', 3);"
        "told.nothing_failed()"
    )
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code, told.run_dir], env=environment, check=True)
    (path,) = (tmp_path / "trackio").glob("libra.db")
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id")
        told_rows = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    connection.close()
    rewards = [(n, step, m["reward/mean"]) for n, step, m in told_rows if "reward/mean" in m]
    assert rewards == [(RUN, 1, 0.25), (RUN, 2, 0.5), (RUN, 3, 0.75)]
    (first, *_) = [m["samples"] for _, _, m in told_rows if "samples" in m]
    assert "find <b>" in json.dumps(first)


# -- MLflow ----------------------------------------------------------------------------------------


def test_mlflow_finds_its_run_again(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path}/mlflow"
    told.of("mlflow", 1, 2, tracking_uri=uri)
    told.of("mlflow", 3, tracking_uri=uri)
    told.nothing_failed()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("libra")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (RUN, "FINISHED")
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    page = Path(client.download_artifacts(run.info.run_id, "samples/step-000003.md"))
    assert "    find <b>" in page.read_text()


# -- Prometheus ------------------------------------------------------------------------------------


def test_prometheus_is_scraped_on_loopback(told: Told) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    run = MonitoredRun(RUN, told.run_dir, RECIPE, told.notes.append)
    with Monitors({"prometheus": {"port": 0}}, run) as monitors:
        for record in [*records(1, 2), reading("local/1")]:
            monitors.on(record)
        page = scraped(told, "libra_step", 2.0)
        values = {
            (sample.name, sample.labels.get("slot")): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        assert values["libra_reward_mean", None] == 0.5
        assert values["libra_server_kv_usage", "local/1"] == 0.25
        assert values["libra_server_running", "local/0"] == 3
        assert values["libra_response_length_clip_ratio", None] == 1.0
        assert values["libra_tools_failure_rate", None] == 0.5
        assert 'run="quickstart-1"' in page
    told.nothing_failed()


def scraped(told: Told, name: str, value: float) -> str:
    """The page, once it has that value."""
    waited = threading.Event()
    for _ in range(200):
        (url,) = [note.split()[-1] for note in told.notes] or [""]
        if url:
            page: str = urllib.request.urlopen(url, timeout=5).read().decode()
            if f'{name}{{run="{RUN}"}} {value}' in page:
                return page
        waited.wait(0.05)
    raise AssertionError(told.notes)


# -- OpenTelemetry ---------------------------------------------------------------------------------


class Collector(HTTPServer):
    """Takes OTLP over HTTP on loopback."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taker)
        self.spans: list[Any] = []
        self.run = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Taker(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        import gzip

        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

        server = self.server
        assert isinstance(server, Collector)
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = pb.ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            named = {one.key: one.value.string_value for one in resource.resource.attributes}
            server.run = named["libra.run"]
            server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        answer = pb.ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_spans_of_trajectory_turn_and_tool_reach_a_collector(
    told: Told, collector: Collector
) -> None:
    told.of("opentelemetry", 1, 2, endpoint=collector.url)
    told.nothing_failed()
    assert collector.run == RUN
    spans = {span.span_id: span for span in collector.spans}
    assert sorted(span.name for span in spans.values()) == [
        *["tool"] * 4,
        *["trajectory"] * 2,
        *["turn"] * 2,
    ]
    above = {"tool": "turn", "turn": "trajectory"}
    for span in spans.values():
        if span.name != "trajectory":
            parent = spans[span.parent_span_id]
            assert (parent.name, parent.trace_id) == (above[span.name], span.trace_id)
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert parent.end_time_unix_nano >= span.end_time_unix_nano
    tools = sorted(
        (span.start_time_unix_nano, span.end_time_unix_nano, attributes(span)["gen_ai.tool.name"])
        for span in spans.values()
        if span.name == "tool"
    )
    assert tools[:2] == [(104e9, 104.5e9, "get"), (104.5e9, 106.5e9, "put")]
    root = next(span for span in spans.values() if span.name == "trajectory")
    assert attributes(root)["libra.reward"] == 0.25


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_a_collector_that_is_not_there_is_told_of_once(told: Told) -> None:
    told.of("opentelemetry", 1, 2, endpoint="http://me:hunter2@127.0.0.1:9")
    (note,) = told.notes
    assert note.startswith("monitor opentelemetry: ")
    assert "hunter2" not in note


def test_nothing_is_imported_that_no_recipe_names(run_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.integration.test_monitors import Told;"
        "told = Told(Path(sys.argv[1])); told.of('jsonl', 1);"
        "print([m for m in ('wandb', 'trackio', 'mlflow', 'tensorboardX', 'prometheus_client',"
        " 'opentelemetry') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, run_dir], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
