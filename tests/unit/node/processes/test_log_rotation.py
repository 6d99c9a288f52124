"""Logs of processes that write for weeks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from libra_cli.node.processes.log_rotation import rotate


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server-0.log"


def test_a_log_and_its_copy_stay_within_their_bound_while_a_process_appends(log) -> None:
    most = 1000
    with log.open("ab", buffering=0) as writer:  # as processes have it
        for number in range(500):
            writer.write(f"line {number}\n".encode())
            rotate([log], most)
    copy = log.with_name("server-0.log.1")
    assert log.stat().st_size <= most + 10
    assert copy.stat().st_size <= most + 10
    lines = (copy.read_text() + log.read_text()).splitlines()
    first = int(lines[0].split()[1])
    assert lines == [f"line {number}" for number in range(first, 500)]
    assert copy.stat().st_mode & 0o077 == 0


def test_a_full_disk_costs_the_copy_and_not_the_bound(log, monkeypatch) -> None:
    log.write_bytes(b"x" * 2000)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    assert rotate([log], 1000) == [log]
    assert log.stat().st_size == 0
    assert list(log.parent.iterdir()) == [log]


def test_a_log_that_is_gone_is_none(log) -> None:
    assert rotate([log]) == []
