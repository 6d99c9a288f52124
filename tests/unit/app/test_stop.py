"""``libra stop``, where the controller is gone, and where no run is named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from libra_cli.app import stop
from libra_cli.cli import main
from libra_cli.cli.main import app
from libra_cli.config.errors import HostLost
from libra_cli.core.records import ENDING, RunRecord
from libra_cli.runtime.store.journal import Journal
from tests import sample_run

DEADLINE_S = 10.0


def test_a_host_that_does_not_answer_keeps_no_other_from_being_stopped(monkeypatch) -> None:
    stopped = asyncio.Event()

    class FakeHost:
        def __init__(self, node: Any) -> None:
            self.name = node.name

        async def stop_remains(self, run_id: str) -> tuple[str, ...]:
            if self.name == "silent":
                await stopped.wait()
                raise HostLost("silent: no answer")
            stopped.set()
            return ("7 (server)",)

    monkeypatch.setattr(stop, "host_of", FakeHost)
    nodes = [SimpleNamespace(name=name) for name in ("silent", "n2")]
    recipe: Any = SimpleNamespace(nodes=nodes, run=SimpleNamespace(lease_s=120.0))

    async def scene() -> list[str]:
        return await asyncio.wait_for(stop._stop_remains(recipe, "r"), DEADLINE_S)

    assert asyncio.run(scene()) == [
        "silent: silent: no answer; its lease of 120 s ends what runs there",
        "n2: 7 (server)",
    ]


@pytest.mark.parametrize(
    ("waiting", "at_once", "signalled"),
    [
        ("nobody waits", False, [False]),
        (f"{ENDING} (stopped)", False, []),
        (f"{ENDING} (stopped)", True, [True]),
    ],
)
def test_a_run_that_is_ending_is_hurried_only_if_it_is_to_end_at_once(
    tmp_path, monkeypatch, waiting, at_once, signalled
) -> None:
    signals: list[bool] = []

    def interrupt(row: RunRecord, *, at_once: bool) -> None:
        signals.append(at_once)

    async def none_left(recipe: object, run_id: str) -> list[str]:
        return []

    waited: list[RunRecord] = []
    monkeypatch.setattr(stop, "_interrupt", interrupt)
    monkeypatch.setattr(stop, "_await_end", lambda row, run_dir: waited.append(row))
    monkeypatch.setattr(stop, "_stop_remains", none_left)
    run_dir = sample_run.write_whole(tmp_path / "run")
    with Journal(run_dir) as journal:
        journal.save(sample_run.run_record(waiting=waiting))
        journal.flush()
        assert stop.stop(run_dir, at_once=at_once, note=lambda text: None) == []
    assert signals == signalled
    assert len(waited) == 1


@pytest.mark.parametrize(("left", "code"), [([], 0), (["n2: 7 (server)"], 3)])
def test_what_may_be_left_is_an_exit_code_of_its_own(monkeypatch, left, code) -> None:
    monkeypatch.setattr(stop, "stop", lambda run_dir, *, at_once, note: left)
    done = CliRunner().invoke(app, ["stop", "runs/r"])
    assert done.exit_code == code
    assert ("nothing of this run is left" in done.output) is (not left)
    assert all(f"not proved gone: {line}" in done.output for line in left)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Two runs of this directory whose controller, this process, lives; a newer one has ended."""
    stopped: list[Path] = []

    def stop_it(run_dir: Path, *, at_once: bool, note: object) -> list[str]:
        stopped.append(run_dir)
        return []

    monkeypatch.setattr(stop, "stop", stop_it)
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        for name, began in (("older", 1.0), ("newer", 2.0), ("ended", 3.0)):
            journal = stack.enter_context(Journal(tmp_path / "runs" / name))
            journal.save(sample_run.run_record(started_at=sample_run.START + began, step=7))
            journal.flush()
            if name == "ended":
                journal.close()
        yield stopped


def test_nobody_to_ask_is_told_what_to_type(running):
    done = CliRunner().invoke(app, ["stop"])
    assert done.exit_code != 0
    assert "next: libra stop runs/newer" in done.output
    assert running == []


@pytest.mark.parametrize(("answer", "stops"), [("y\n", [Path("runs/newer")]), ("\n", [])])
def test_the_newest_run_that_is_running_is_stopped_after_a_question(
    running, monkeypatch, answer, stops
):
    monkeypatch.setattr(main, "_can_be_asked", lambda: True)
    done = CliRunner().invoke(app, ["stop"], input=answer)
    assert done.exit_code == 0
    assert "Stop runs/newer at step 7 of 40; 1 more running stay?" in done.output
    assert running == stops


def test_a_directory_where_nothing_is_running_says_so(tmp_path, monkeypatch):
    sample_run.write(tmp_path / "runs" / "ended", steps=2)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["stop"])
    assert done.exit_code != 0
    assert "no run under runs is running" in done.output
