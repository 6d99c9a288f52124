"""What an agent measures and finds: bandwidth, model files, what dead runs have left."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from libra_cli.node.agent.host_facts import bandwidth, facts, nvidia
from libra_cli.node.agent.host_facts.model_files import WHOLE, fingerprints
from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.processes import remains
from libra_cli.node.processes.ports import Ports
from tests.credentials import LOCAL, credentials_of, url_of


@pytest.fixture
def port() -> Iterator[int]:
    """Reserved, as it is on a host."""
    ports = Ports()
    (one,) = ports.take(21000, 21999, 1, ())
    yield one
    ports.release([one])


def test_data_comes_through_for_about_as_long_as_it_is_sent(port):
    bandwidth.serve(LOCAL, port, credentials_of("sender"), 0.2)
    found = bandwidth.receive(url_of(port, "sender"), credentials_of("receiver"))
    assert found["bytes"] > bandwidth.CHUNK
    assert 0.2 <= found["seconds"] < 20


def test_to_a_host_of_another_run_nothing_is_sent(port):
    bandwidth.serve(LOCAL, port, credentials_of("sender"), 0.2)
    with pytest.raises(AgentRefused, match="verify failed"):
        bandwidth.receive(url_of(port, "sender"), credentials_of(run="another"))


def test_a_port_where_nobody_sends_is_told(port):
    with pytest.raises(AgentRefused, match="refused"):
        bandwidth.receive(url_of(port, "sender"), credentials_of())


def write(directory: Path, size: int, changed: int | None = None) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"dtype": "bfloat16"}')
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(size)
        if changed is not None:
            file.seek(changed)
            file.write(b"x")


@pytest.mark.parametrize("place", [0, WHOLE // 2 + 5, WHOLE])
def test_files_that_differ_where_it_is_looked_have_other_fingerprints(tmp_path, place):
    write(tmp_path / "a", WHOLE + 1)
    write(tmp_path / "b", WHOLE + 1, changed=place)
    first, second = fingerprints(str(tmp_path / "a")), fingerprints(str(tmp_path / "b"))
    assert first["config"] == {"dtype": "bfloat16"}
    assert first != second
    assert fingerprints(str(tmp_path / "a")) == first


def test_a_small_file_counts_whole_and_a_copy_under_way_does_not(tmp_path):
    write(tmp_path, 1000)
    before = fingerprints(str(tmp_path))
    (tmp_path / "model-2.safetensors.part").touch()
    assert fingerprints(str(tmp_path)) == before
    write(tmp_path, 1000, changed=700)
    assert fingerprints(str(tmp_path)) != before


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(AgentRefused, match="No such file"):
        fingerprints(str(tmp_path / "nowhere"))


def run_dir(runs: Path, weights: Path, name: str) -> Path:
    """A run that has left a kilobyte."""
    lock = runs / name / "node" / remains.LOCK
    lock.parent.mkdir(parents=True)
    lock.touch()
    (weights / name).mkdir(parents=True)
    (weights / name / "model").write_bytes(bytes(1000))
    return lock


def test_only_dead_runs_of_this_work_directory_have_left_something(tmp_path):
    runs, weights = tmp_path / "runs", tmp_path / "weights"
    run_dir(runs, weights, "dead")
    held = run_dir(runs, weights, "with-agent")
    run_dir(runs, weights, "with-process")
    (weights / "of-another-work-directory").mkdir()
    own = weights / "own"
    own.mkdir()
    code = "import time; print('up', flush=True); time.sleep(60)"
    environment = {**os.environ, "LIBRA_RUN": "with-process"}
    with (
        held.open() as lock,
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
        ) as child,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert child.stdout is not None
        child.stdout.readline()
        try:
            assert remains.find(runs, own) == [{"name": "dead", "bytes": 1000}]
            everybody = [one.name for one in weights.iterdir()]
            assert remains.remove(runs, own, everybody) == ["dead"]
        finally:
            child.kill()
    assert {one.name for one in weights.iterdir()} == {*everybody} - {"dead"}


@pytest.mark.parametrize("living", ["n1", "n2"])
def test_a_run_lives_while_the_agent_of_any_of_its_nodes_does(tmp_path, living):
    locks = {name: tmp_path / "run" / name / remains.LOCK for name in ("n1", "n2")}
    for lock in locks.values():
        lock.parent.mkdir(parents=True)
        lock.touch()
    assert remains.is_dead(tmp_path / "run")
    with locks[living].open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not remains.is_dead(tmp_path / "run")


def test_a_sandbox_is_tried_only_where_one_is_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia, "describe", lambda devices: {})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    work = tmp_path / "runs/run/work"
    work.mkdir(parents=True)

    def missing(**asked: bool) -> object:
        return facts.facts([], [], [], [], work, tmp_path, **asked)["sandbox_missing"]

    assert missing() == ""
    assert missing(sandbox=True) == "there is no bwrap"
