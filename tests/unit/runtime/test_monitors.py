"""Monitors have arguments, bounded queues and samples, and cost the run nothing when they fail."""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from libra_cli.config.errors import PluginError, RecipeError
from libra_cli.config.recipe import Recipe
from libra_cli.core.records import Record, TrajectoryRecord, TurnRecord
from libra_cli.runtime.monitors import dispatch
from libra_cli.runtime.monitors.between_steps import BetweenSteps
from libra_cli.runtime.monitors.dispatch import Monitors
from libra_cli.runtime.monitors.jsonl import FILE, JsonLines
from libra_cli.runtime.monitors.protocol import MonitoredRun
from libra_cli.runtime.monitors.samples import LONGEST_TEXT, SampledTrajectory, as_markdown
from libra_cli.runtime.recipes.loader import load_recipe
from tests.sample_run import records, run_record, step_record

RECIPE = "nodes:\n  - {host: local, slots: 2}\nmodel: {build: {}}\nrun:\n  steps: 3\n"
ALIVE: list[Fake] = []
MADE = threading.Event()


class Fake:
    """Remembers what it was told."""

    records: ClassVar = (TurnRecord,)

    def __init__(self, *, greeting: str = "hello", broken: str = "") -> None:
        self.greeting, self.broken = greeting, broken
        self.told: Counter[str] = Counter()
        self.samples: list[SampledTrajectory] = []
        self.go_on = threading.Event()
        ALIVE.append(self)
        MADE.set()

    def start(self, run: MonitoredRun) -> None:
        if self.broken == "waits":
            self.go_on.wait(20)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told["log"] += 1
        if self.broken == "raises":
            raise SystemExit("cannot reach http://me:hunter2@host with abcd1234")

    def log_samples(self, step: int, samples: Sequence[SampledTrajectory]) -> None:
        self.samples += samples

    def saw(self, record: Record) -> None:
        self.told[type(record).__name__] += 1

    def finish(self, state: str) -> None:
        self.told[state] += 1


@pytest.fixture(autouse=True)
def _fresh() -> None:
    ALIVE.clear()
    MADE.clear()


NAME = "fake_monitors:Fake"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fake_monitors")
    module.Fake = Fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_monitors", module)


def monitors(tmp_path: Path, notes: list[str], **arguments: Any) -> Monitors:
    run = MonitoredRun("quickstart-1", tmp_path, {}, notes.append)
    return Monitors({NAME: arguments}, run, samples=2)


def recipe(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE + text)
    return load_recipe(path, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("monitors: jsonl", {"jsonl": {}}),
        ("monitors: [jsonl, tensorboard]", {"jsonl": {}, "tensorboard": {}}),
        (
            "monitors: {wandb: {project: mine}, jsonl: }",
            {"wandb": {"project": "mine"}, "jsonl": {}},
        ),
        ("monitors: [jsonl, wandb: {project: mine}]", {"jsonl": {}, "wandb": {"project": "mine"}}),
        ("monitors: []", {}),
    ],
)
def test_a_recipe_names_monitors_with_and_without_arguments(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    read = recipe(tmp_path, f"  {text}\n")
    assert read.run.monitors == expected
    again = Recipe.model_validate_json(read.model_dump_json())
    assert again.run.monitors == expected


def test_a_recipe_of_an_older_run_with_a_list_is_read(tmp_path: Path) -> None:
    told = json.loads(recipe(tmp_path, "").model_dump_json())
    told["run"]["monitors"] = ["jsonl"]
    assert Recipe.model_validate(told).run.monitors == {"jsonl": {}}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{wandb: {api_key: abc}}", "run.monitors.wandb.api_key"),
        ("{mlflow: {tracking_uri: 'http://me:pw@host'}}", "run.monitors.mlflow.tracking_uri"),
        ("{trackio: {server_url: 'http://h/?write_token=a'}}", "run.monitors.trackio.server_url"),
        ("{opentelemetry: {headers: {x-api-key: abc}}}", "run.monitors.opentelemetry.headers"),
    ],
)
def test_a_secret_among_arguments_is_refused_and_not_repeated(
    tmp_path: Path, text: str, key: str
) -> None:
    with pytest.raises(RecipeError, match="this is no place for one") as caught:
        recipe(tmp_path, f"  monitors: {text}\n")
    assert key in str(caught.value)
    assert not {"abc", "pw@", "token=a"} & set(str(caught.value).split())


def test_an_argument_that_a_monitor_does_not_take_ends_the_run_before_it_starts(
    tmp_path: Path,
) -> None:
    with pytest.raises(PluginError, match="unexpected keyword argument 'greting'") as caught:
        monitors(tmp_path, [], greting="ho")
    assert "greeting, broken" in caught.value.hint
    assert not ALIVE


def test_a_package_that_is_missing_is_told_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "packages", ("not_here.at.all",), raising=False)
    with pytest.raises(PluginError, match="needs the package not_here") as caught:
        monitors(tmp_path, [])
    assert "pip install" in caught.value.hint


def test_every_run_has_metrics_in_jsonl(tmp_path: Path) -> None:
    with Monitors({}, MonitoredRun("quickstart-1", tmp_path, {})) as told:
        told.on(step_record(1, 10.0))
    (row,) = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert (row["step"], row["reward/mean"]) == (1, 0.5)


def test_a_monitor_is_told_the_records_it_asks_for_and_some_samples(tmp_path: Path) -> None:
    notes: list[str] = []
    life = [record for _, record in records(steps=2)]
    with monitors(tmp_path, notes) as told:
        for record in life:
            told.on(record)
    (fake,) = ALIVE
    assert fake.told["TurnRecord"] == sum(isinstance(record, TurnRecord) for record in life)
    assert (fake.told["log"], fake.told["finished"], len(fake.samples)) == (2, 1, 4)
    assert notes == []


def test_samples_are_drawn_evenly_and_the_same_again() -> None:
    life = [record for _, record in records(steps=30)]
    drawn: list[list[tuple[int, int]]] = []
    for _ in range(2):
        between = BetweenSteps("quickstart-1", 2)
        drawn.append([])
        for record in life:
            between.saw(record)
            if type(record).__name__ == "StepRecord":
                _, sampled = between.take(1)
                drawn[-1] += [(one.group_id, one.member) for one in sampled]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 60
    places = [group % 16 for group, _ in drawn[0]]
    assert 5.0 < sum(places) / len(places) < 10.0, "neither the first nor the last to end"


def test_a_long_text_loses_its_middle() -> None:
    record = next(one for _, one in records(steps=1) if isinstance(one, TrajectoryRecord))
    sample = SampledTrajectory(record, lambda _: "a" * LONGEST_TEXT + "b" * 5)
    assert "[5 characters left out]" in sample.text
    assert sample.text.endswith("b" * 5)
    assert as_markdown(sample).startswith(f"### trajectory {sample.name}, reward")


def test_a_monitor_that_is_too_slow_loses_what_comes_and_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "QUEUE", 3)
    notes: list[str] = []
    with monitors(tmp_path, notes, broken="waits") as told:
        for step in range(1, 21):
            told.on(step_record(step, 10.0 * step))
        told.on(run_record("finished"))
        assert MADE.wait(20)
        threading.Timer(0.1, ALIVE[0].go_on.set).start()
    (fake,) = ALIVE
    assert fake.told["log"] <= 3
    assert fake.told["finished"] == 1, "the end is told in any case"
    first, last = (note for note in notes if NAME in note)
    assert "slower than the run" in first
    assert "was not told of" in last


def test_the_end_of_a_run_waits_for_all_monitors_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "FINISH_S", 0.5)
    names = [f"fake_monitors:{letter}" for letter in "abcdef"]
    for name in names:
        monkeypatch.setattr(sys.modules["fake_monitors"], name[-1], Fake, raising=False)
    notes: list[str] = []
    run = MonitoredRun("quickstart-1", tmp_path, {}, notes.append)
    with Monitors({name: {"broken": "waits"} for name in names}, run):
        began = time.monotonic()
    assert time.monotonic() - began < 2.0
    assert sum("did not finish" in note for note in notes) == len(names)
    for fake in ALIVE:
        fake.go_on.set()


def test_a_monitor_that_fails_is_named_once_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abcd1234")
    notes: list[str] = []
    with monitors(tmp_path, notes, broken="raises") as told:
        for step in (1, 2, 3):
            told.on(step_record(step, 10.0 * step))
    (note,) = notes
    assert note.endswith("is dropped: SystemExit: cannot reach http://***@host with ***")
    assert ALIVE[0].told["log"] == 1


def test_a_full_disk_leaves_no_half_of_a_line(tmp_path: Path) -> None:
    """What was written of it stood before the next line, and pandas read neither."""
    lines = JsonLines()
    lines.start(MonitoredRun("r", tmp_path, {}))
    lines.log(1, {"reward": 0.5})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / FILE).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8, hard))
    try:
        lines.log(2, {"reward": 0.6})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / FILE).stat().st_size == size
    lines.log(3, {"reward": 0.7})
    steps = [json.loads(line)["step"] for line in (tmp_path / FILE).read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_a_line_that_cannot_be_written_now_is_written_with_the_next(tmp_path: Path) -> None:
    directory = tmp_path / "later"
    lines = JsonLines()
    lines.start(MonitoredRun("r", directory, {}))
    lines.log(1, {"reward": 0.5})
    directory.mkdir()
    lines.log(2, {"reward": 0.6})
    lines.finish("finished")
    steps = [json.loads(line)["step"] for line in (directory / FILE).read_text().splitlines()]
    assert steps == [1, 2]
