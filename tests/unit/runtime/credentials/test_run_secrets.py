"""A run's directory and its secrets are this user's alone, and the secrets last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from libra_cli.config.errors import StateError
from libra_cli.runtime.credentials.run_secrets import SECRETS, RunSecrets
from libra_cli.runtime.run_records import Listeners, open_records
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.run_directory import make_run_dir, write_private
from tests import sample_run, world


def modes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}


def test_secrets_are_read_again_as_they_were_made(tmp_path: Path) -> None:
    made = RunSecrets.make(tmp_path / "run")
    assert len(made.token) >= 32
    assert RunSecrets.read(tmp_path / "run") == RunSecrets.of(tmp_path / "run") == made


def test_two_runs_have_other_secrets(tmp_path: Path) -> None:
    assert RunSecrets.of(tmp_path / "a") != RunSecrets.of(tmp_path / "b")


def test_nobody_else_may_enter_a_run_or_read_its_files(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        run_dir = tmp_path / "runs" / "run"
        RunSecrets.make(run_dir)
        with Journal(run_dir) as journal:
            journal.save(sample_run.run_record())
            journal.flush()
            assert {"libra.db", "libra.db-wal"} <= set(modes(run_dir))
            assert set(modes(run_dir).values()) == {0o600}
    finally:
        os.umask(before)
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_a_run_directory_that_is_open_to_others_is_closed_when_the_run_goes_on(
    tmp_path: Path,
) -> None:
    """An older libra let everybody in."""
    with Journal(tmp_path / "run"):
        pass
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "run/libra.db").chmod(0o644)
    nobody = Listeners(lambda record: None, lambda text: None, str)
    with open_records(world.recipe(), tmp_path / "run", sample_run.run_record(), nobody):
        assert modes(tmp_path / "run")["libra.db"] == 0o600
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"token": 1}', '{"token": ""}', "\udcff"])
def test_damaged_secrets_are_told_with_their_file(tmp_path: Path, text: str) -> None:
    (tmp_path / SECRETS).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StateError, match=SECRETS):
        RunSecrets.of(tmp_path)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write_private(tmp_path / "kept", "before")
    with pytest.raises(UnicodeEncodeError):
        write_private(tmp_path / "kept", "\ud83d")
    assert (tmp_path / "kept").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_run_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(StateError, match="cannot be made"):
        make_run_dir(tmp_path / "runs" / "run")
