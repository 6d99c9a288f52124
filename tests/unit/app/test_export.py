"""``libra export`` without a host: what a run directory says of its model, and where it may go."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from libra_cli.app import export as command
from libra_cli.app.evaluate import model_of
from libra_cli.app.export import ExportOrder
from libra_cli.config.errors import InputError, WrongRun
from libra_cli.core.records import ExportRecord
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import keep_recipe
from libra_cli.runtime.store.schema import DATABASE
from libra_cli.runtime.trainer.checkpoints import FoundCheckpoint
from tests import sample_run, world

MODEL = "/work/export/step-10"


class Makes:
    """Takes the place of ``ModelExports``."""

    def __init__(self, *_: object) -> None:
        pass

    async def make(self, checkpoint: FoundCheckpoint, *, merge: bool) -> ExportRecord:
        return ExportRecord(checkpoint.step, "local", MODEL, 1.0, 1, 1.0, checkpoint.score)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of hosts, which have one checkpoint."""

    async def reach(*_: object) -> dict[str, Any]:
        hosts.append("reached")
        return {}

    async def found(_: object) -> list[FoundCheckpoint]:
        return [FoundCheckpoint("step-10", 10, None, ("local",))]

    hosts: list[str] = []
    monkeypatch.setattr(command, "_reach", reach)
    monkeypatch.setattr(command, "find_checkpoints", found)
    monkeypatch.setattr(command, "ModelExports", Makes)
    return hosts


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The directory of a run that was killed."""
    made = sample_run.write(tmp_path / "run")
    keep_recipe(world.recipe(), made)
    return made


def without_models(run_dir: Path) -> bool:
    with Reader(run_dir) as reader:
        return not reader.exports()


def test_what_was_made_of_a_killed_run_is_the_run_s_model(asked, run_dir: Path) -> None:
    notes: list[str] = []
    assert without_models(run_dir)
    with pytest.raises(WrongRun, match="has made no model"):
        model_of(run_dir, 10)
    command.export(run_dir, ExportOrder(), notes.append)
    assert model_of(run_dir, 10).path == Path(MODEL)
    assert not notes


def test_a_run_directory_that_is_open_to_others_stays_so(asked, run_dir: Path) -> None:
    run_dir.chmod(0o750)
    (run_dir / DATABASE).chmod(0o640)
    command.export(run_dir, ExportOrder(), print)
    assert not without_models(run_dir)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o750
    assert stat.S_IMODE((run_dir / DATABASE).stat().st_mode) == 0o640


def test_while_a_run_goes_on_it_is_told_that_it_does_not_list_the_model(
    asked, run_dir: Path
) -> None:
    notes: list[str] = []
    with Journal(run_dir):
        command.export(run_dir, ExportOrder(), notes.append)
    assert without_models(run_dir)
    (note,) = notes
    assert note.endswith(f"libra export {run_dir} --to DIR, then libra eval DIR RECIPE")


@pytest.mark.parametrize("place", ["file", "file/model", "full"])
def test_a_place_that_takes_no_model_is_refused_before_a_host_is_asked(
    asked, run_dir: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/config.json").touch()
    with pytest.raises(InputError) as told:
        command.export(run_dir, ExportOrder(to=tmp_path / place), print)
    assert str(told.value).startswith(str(tmp_path / place))
    assert told.value.hint == f"libra export {run_dir} --to my-model"
    assert not asked
