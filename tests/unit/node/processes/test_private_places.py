"""Directories in places where other users may write, and what is removed there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.processes import temporary
from libra_cli.node.processes.private_files import make_private
from libra_cli.node.weights.weight_server import WeightServer


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_of_the_agent_and_those_it_makes_above_are_its_owners_alone(tmp_path) -> None:
    make_private(tmp_path / "runs/r/n1")
    assert {mode(tmp_path / one) for one in ("runs", "runs/r", "runs/r/n1")} == {0o700}
    (tmp_path / "runs/r/n1").chmod(0o755)
    make_private(tmp_path / "runs/r/n1")
    assert mode(tmp_path / "runs/r/n1") == 0o700


def test_a_link_of_somebody_else_is_no_directory_for_weights(tmp_path, monkeypatch) -> None:
    """In /dev/shm anybody may make ``libra-alice`` a link to a directory of alice."""
    target = tmp_path / "of-alice"
    target.mkdir()
    link = tmp_path / "libra-alice"
    link.symlink_to(target)
    theirs = os.getuid() + 1
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = real(path)
        return os.stat_result((*found[:4], theirs, *found[5:])) if path == link else found

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(AgentRefused, match=f"user with id {theirs}"):
        WeightServer(link / "run", None)


def test_a_directory_for_weights_lets_nobody_else_in(tmp_path) -> None:
    place = tmp_path / "libra-alice"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    WeightServer(place / "run", None)
    assert mode(place) == mode(place / "run") == 0o700


def test_temporary_files_are_removed_only_from_a_directory_of_ours(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shared, other = tmp_path / "shm", tmp_path / "libra-x"
    shared.mkdir()
    other.mkdir()
    (shared / "vllm_dist_of_another_run").touch()
    (other / "vllm_dist_").touch()  # as a prefix it would name the memory of every run
    monkeypatch.setattr(temporary, "SHARED_MEMORY", shared)
    (tmp_path / "tmp").symlink_to(other)
    temporary.remove()
    assert not other.exists()
    assert list(shared.iterdir())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "tmp").symlink_to(tmp_path / "link")
    temporary.remove()
    assert elsewhere.exists()
