"""Temporary directories go with the process that made them, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from libra_cli.runtime.hosts.owned_directory import LOCK, OwnedDirectory

PREFIX = "libra-sockets-"
MAKES_ONE = """
import socket, sys
from libra_cli.runtime.hosts.owned_directory import OwnedDirectory
made = OwnedDirectory("sockets")
listening = socket.socket(socket.AF_UNIX)
listening.bind(str(made.path / "0.sock"))
print(made.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of temporary files, here and in processes that are started."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def made_by(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_goes_when_another_begins_and_nothing_else(
    temporary: Path,
) -> None:
    without_lock = temporary / f"{PREFIX}without-lock"
    without_lock.mkdir()
    (temporary / f"{PREFIX}link").symlink_to(without_lock)
    command = [sys.executable, "-c", MAKES_ONE]
    with (
        subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as killed,
        subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as living,
    ):
        left, kept = made_by(killed), made_by(living)
        OwnedDirectory("sockets").remove()
        assert (left / "0.sock").exists(), "its process lives"
        killed.kill()
        killed.wait(60)
        assert (left / "0.sock").exists(), "a killed process removes nothing"
        mine = OwnedDirectory("sockets")
        assert not left.exists()
        assert (kept / "0.sock").exists()
        assert sorted(temporary.iterdir()) == sorted(
            [kept, mine.path, without_lock, temporary / f"{PREFIX}link"]
        )
        mine.remove()
        assert not mine.path.exists()


def test_only_its_user_can_enter_it() -> None:
    with OwnedDirectory("work") as made:
        assert made.stat().st_mode & 0o777 == 0o700
    assert not made.exists()


def test_one_of_another_kind_stays(temporary: Path) -> None:
    abandoned = temporary / "libra-work-abandoned"
    abandoned.mkdir()
    (abandoned / LOCK).touch()
    OwnedDirectory("sockets").remove()
    assert abandoned.exists()
    OwnedDirectory("work").remove()
    assert not abandoned.exists()


def test_what_belongs_to_another_user_stays(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = temporary / f"{PREFIX}abandoned"
    abandoned.mkdir()
    (abandoned / LOCK).touch()
    monkeypatch.setattr(os, "geteuid", lambda: abandoned.stat().st_uid + 1)
    OwnedDirectory("sockets").remove()
    assert abandoned.exists()
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    OwnedDirectory("sockets").remove()
    assert not abandoned.exists(), "it was that user's alone to remove"
