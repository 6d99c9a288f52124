"""``libra eval`` without a host: what is played at every seat, and which model is meant."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libra_cli.app import evaluate as command
from libra_cli.app.evaluate import model_of
from libra_cli.config.errors import (
    EnvironmentBroken,
    HostError,
    InputError,
    LibraError,
    StateError,
    StoppedByUser,
    WrongRun,
)
from libra_cli.core.actions import Generate
from libra_cli.core.events import ServerFailed, TurnFailed, TurnGenerated
from libra_cli.core.records import EvaluationRecord, ExportRecord
from libra_cli.core.types import STARTED_WITH, TrajectoryId, VersionSpan
from libra_cli.runtime.episodes.player import TurnResult
from libra_cli.runtime.evaluation import standalone
from libra_cli.runtime.evaluation.standalone import StandaloneEvaluation
from libra_cli.runtime.interrupts import CLEARING, STOPPING
from libra_cli.runtime.rollout.connection import turn_failed
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.run_directory import RECIPE
from tests.unit.runtime.test_interrupts import interrupted
from tests.world import recipe


class SaysSeven:
    """Servers that answer every turn with one token."""

    most = now = 0

    @property
    def processes(self) -> SaysSeven:
        return self

    async def generate(self, action: Generate) -> TurnGenerated:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return TurnGenerated(
            action.request, action.trajectory, action.slot, action.incarnation, action.prompt_ids,
            array("i", [7]), array("f", [-1.0]), (VersionSpan(0, 0, 1),), STARTED_WITH,
            action.cache_key, "stop", 0.0,
        )  # fmt: skip

    async def close(self) -> None:
        pass


class TwoTurns:
    """Rewards the first member of each task; the environment of task 1 breaks at every start."""

    def __init__(self) -> None:
        self.turns: dict[TrajectoryId, int] = {}

    async def start(self, trajectory: TrajectoryId, group: int, **seeds: int) -> array[int]:
        if group & 0xFFFFF == 1:
            raise EnvironmentBroken("no such task")
        self.turns[trajectory] = 0
        return array("i", [1, 2])

    def turn_limit_of(self, trajectory: TrajectoryId) -> None:
        return None

    async def advance(self, trajectory: TrajectoryId, *turn: Any) -> TurnResult:
        self.turns[trajectory] += 1
        if self.turns[trajectory] < 2:
            return TurnResult(array("i", [3]), (), done=False, reward=None)
        return await self.finish(trajectory)

    async def finish(self, trajectory: TrajectoryId) -> TurnResult:
        reward = 1.0 if trajectory.member == 0 else 0.0
        return TurnResult(array("i"), (), done=True, reward=reward)

    def forget(self, trajectory: TrajectoryId) -> None:
        self.turns.pop(trajectory, None)


def test_every_seat_plays_and_what_breaks_is_tried_again_and_counted(tmp_path: Path) -> None:
    told: list[EvaluationRecord] = []
    settings = recipe(evaluation={"num_tasks": 4, "samples": 2, "at_start": False})
    alone = StandaloneEvaluation(settings, tmp_path, told=told.append, note=lambda text: None)
    servers, player = SaysSeven(), TwoTurns()
    alone._servers, alone._player = cast("Any", servers), cast("Any", player)
    asyncio.run(alone._play_all())
    last = told[-1]
    assert (last.state, last.finished, last.failed) == ("finished", 6, 2)
    assert (last.metrics["pass@1"], last.metrics["pass@2"]) == (0.5, 1.0)
    assert (last.metrics["turns"], last.generated_tokens) == (2.0, 12)
    assert servers.most > 1
    assert not player.turns


class Breaks(SaysSeven):
    """Servers that break off each of the first turns, as where a connection is lost."""

    def __init__(self, first: int) -> None:
        self.left = first

    async def generate(self, action: Generate) -> TurnGenerated | TurnFailed:  # type: ignore[override]
        if self.left:
            self.left -= 1
            return turn_failed(action, "connection refused", unreachable=True)
        return await super().generate(action)


def alone_at(tmp_path: Path, servers: Any) -> StandaloneEvaluation:
    settings = recipe(evaluation={"num_tasks": 4, "samples": 2, "at_start": False})
    alone = StandaloneEvaluation(settings, tmp_path, told=lambda row: None, note=lambda text: None)
    alone._servers, alone._player = servers, cast("Any", TwoTurns())
    return alone


def test_a_connection_that_is_lost_for_a_while_costs_no_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "AGAIN_S", 0.001)
    alone = alone_at(tmp_path, Breaks(100))
    asyncio.run(asyncio.wait_for(alone._play_all(), 20))
    (row,) = alone._rows.values()
    assert (row.state, row.finished, row.failed) == ("finished", 6, 2)


def test_what_a_server_itself_says_is_wrong_is_not_asked_again(tmp_path: Path) -> None:
    class Wrong(SaysSeven):
        async def generate(self, action: Generate) -> TurnFailed:  # type: ignore[override]
            return turn_failed(action, "a log-probability is not a number")

    alone = alone_at(tmp_path, Wrong())
    asyncio.run(asyncio.wait_for(alone._play_all(), 20))
    (row,) = alone._rows.values()
    assert (row.finished, row.failed) == (0, 8)


def test_a_server_that_has_ended_breaks_off_the_evaluation_before_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "AGAIN_S", 0.001)
    servers = Breaks(10**9)
    alone = alone_at(tmp_path, servers)

    async def scene() -> None:
        ended = ServerFailed("a:0", 1, "it was killed")
        asyncio.get_running_loop().call_later(0.1, alone._post, ended)
        await alone._play_all()

    with pytest.raises(LibraError, match="it was killed"):
        asyncio.run(asyncio.wait_for(scene(), 20))


def test_a_model_is_a_directory_and_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no directory"):
        model_of(tmp_path / "none", None)
    assert model_of(tmp_path, None).path == tmp_path
    with pytest.raises(InputError, match="--step chooses among the models of a run"):
        model_of(tmp_path, 40)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(StateError, match="adapter"):
        model_of(tmp_path, None)


def test_of_an_adapter_and_what_it_was_merged_into_the_newer_is_the_run_s(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Journal(run_dir) as journal:
        for at, name in ((1.0, "step-4"), (2.0, "step-4-merged"), (3.0, "step-2")):
            score = 0.1 if name == "step-2" else 0.5
            step = int(name.split("-")[1])
            journal.save(ExportRecord(step, "n", f"/models/{name}", at, 1, 1.0, score))
    assert model_of(run_dir, None).path == Path("/models/step-4-merged")


def test_the_best_model_is_told_by_evaluations_that_ended_after_it_was_made(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    with Journal(run_dir) as journal:
        for number, (step, reward) in enumerate({2: 0.25, 4: 0.75, 6: 0.5}.items()):
            journal.save(ExportRecord(step, "n", f"/models/step-{step}", step, 1, 1.0, None))
            metrics = json.dumps({"avg@1": reward})
            journal.save(
                EvaluationRecord(
                    number, "held-out", step, 1, "finished", 0.0, 1.0, 1, 1, 1, 0, step, 1, metrics
                )
            )
    told = recipe(evaluation=[{"name": "held-out", "num_tasks": 1, "samples": 1}])
    (run_dir / RECIPE).write_text(told.model_dump_json())
    assert model_of(run_dir, None).path == Path("/models/step-4")
    assert model_of(run_dir, 6).path == Path("/models/step-6")
    (run_dir / RECIPE).unlink()  # or of a libra that read another one
    assert model_of(run_dir, 6).path == Path("/models/step-6")


@pytest.mark.parametrize(
    ("made", "step", "kind", "hint"),
    [
        ({4: "local"}, None, WrongRun, "libra export run"),
        ({4: "local"}, 4, WrongRun, "libra export run --step 4"),
        (
            {4: "local", 2: "local"},
            None,
            WrongRun,
            "libra export run; or libra eval run RECIPE --step 2",
        ),
        ({4: "elsewhere"}, None, HostError, "libra doctor RECIPE"),
    ],
)
def test_a_model_that_the_run_lists_and_that_was_removed_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made, step, kind, hint
) -> None:
    class Lacks(StandaloneEvaluation):
        async def run(self) -> list[EvaluationRecord]:
            looked = SimpleNamespace(facts=SimpleNamespace(paths=()))
            self._cluster.reports["local"] = cast("Any", looked)
            raise HostError("local: model: there is no model", hint="libra doctor RECIPE")

    monkeypatch.setattr(command, "StandaloneEvaluation", Lacks)
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(
        "nodes: [{host: local, slots: 2}]\nmodel: {build: {}}\n"
        "evaluation: {environment: {name: calculator}}\n"
    )
    with Journal(Path("run")) as journal:
        for at, (of, node) in enumerate(made.items()):
            journal.save(ExportRecord(of, node, f"/models/step-{of}", at, 1, 1.0, of / 10))
    with pytest.raises(kind) as told:
        command.evaluate(
            Path("run"), Path("recipe.yaml"), None,
            step=step, told=lambda row: None, note=lambda text: None,
        )  # fmt: skip
    assert told.value.hint == hint
    if kind is WrongRun:
        assert str(told.value).startswith("local has no /models/step-4 any more")


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Evaluate without a host, to a file below ``tmp_path``, and count what is played."""

    class Played(StandaloneEvaluation):
        async def run(self) -> list[EvaluationRecord]:
            played.append(True)
            return []

    def result(
        output: str, note: Callable[[str], None] = lambda text: None
    ) -> command.EvaluationResult:
        where = (Path(), Path("recipe.yaml"), Path(output))
        return command.evaluate(*where, step=None, told=lambda row: None, note=note)

    played: list[bool] = []
    monkeypatch.setattr(command, "StandaloneEvaluation", Played)
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(
        "nodes: [{host: local, slots: 2}]\nmodel: {build: {}}\n"
        "evaluation: {environment: {name: calculator}}\n"
    )
    return result, played


@pytest.mark.parametrize("output", ["taken/x.json", "."])
def test_a_place_that_takes_no_result_is_refused_before_anything_is_played(
    evaluated, output: str
) -> None:
    result, played = evaluated
    Path("taken").touch()
    with pytest.raises(InputError) as told:
        result(output)
    assert str(told.value).startswith(output)
    assert told.value.hint == "libra eval . recipe.yaml -o result.json"
    assert not played


def test_a_result_is_there_to_be_shown_where_its_file_cannot_be_written(evaluated) -> None:
    found = evaluated[0]("new/x.json")
    found.write()
    assert json.loads(Path("new/x.json").read_text())["evaluations"] == []
    Path("new/x.json").unlink()
    Path("new/x.json").mkdir()
    with pytest.raises(LibraError, match="cannot be written: Is a directory"):
        found.write()


@pytest.mark.parametrize("played", [True, False])
def test_no_signal_interrupts_the_clearing_of_the_hosts(
    evaluated, monkeypatch: pytest.MonkeyPatch, played: bool
) -> None:
    """Neither a second one, nor the first where all is played."""
    noted: list[str] = []
    cleared: list[bool] = []

    class Interrupted(StandaloneEvaluation):
        async def run(self) -> list[EvaluationRecord]:
            try:
                if not played:
                    await interrupted(noted, "")
            finally:
                if not played:
                    await interrupted(noted, STOPPING)
                self._ending()
                await interrupted(noted, CLEARING)
                cleared.append(True)
            return []

    monkeypatch.setattr(command, "StandaloneEvaluation", Interrupted)
    if played:
        evaluated[0]("x.json", note=noted.append)
    else:
        with pytest.raises(StoppedByUser):
            evaluated[0]("x.json", note=noted.append)
    assert cleared == [True]


def test_what_environments_say_is_told_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(StandaloneEvaluation):
        async def run(self) -> list[EvaluationRecord]:
            self._note("task 0.0.0 failed too often: no answer with key very-hidden")
            raise EnvironmentBroken("very-hidden is refused", hint="see very-hidden")

    monkeypatch.setattr(command, "StandaloneEvaluation", Broken)
    monkeypatch.setenv("JUDGE_KEY", "very-hidden")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "nodes: [{host: local, slots: 2}]\nmodel: {build: {}}\n"
        "evaluation: {environment: {name: calculator, workers: 1, secrets: {K: '${JUDGE_KEY}'}}}\n"
    )
    noted: list[str] = []
    with pytest.raises(EnvironmentBroken) as told:
        command.evaluate(tmp_path, path, None, step=None, told=lambda row: None, note=noted.append)
    assert noted == ["task 0.0.0 failed too often: no answer with key [masked]"]
    assert str(told.value) == "[masked] is refused"
    assert told.value.hint == "see [masked]"
