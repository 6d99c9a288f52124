"""The shell completes what there is."""

from __future__ import annotations

from pathlib import Path

from libra_cli.cli import completion
from tests.sample_run import write


def test_run_directories_are_those_with_a_database(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs/one")
    write(tmp_path / "other/two")
    Path("runs/empty").mkdir()
    assert list(completion.run_directories("")) == ["runs/one"]
    assert list(completion.run_directories("runs/o")) == ["runs/one"]
    assert list(completion.run_directories("other/")) == ["other/two"]
    assert list(completion.run_directories(f"{tmp_path}/other/t")) == [f"{tmp_path}/other/two"]
    assert list(completion.run_directories("none")) == []


def test_keys_are_those_of_the_recipe_and_of_status():
    assert list(completion.keys("training.max_s")) == ["training.max_staleness"]
    assert "sync.gap_max" in completion.keys("sync.")


def test_topics_come_with_their_titles():
    assert list(completion.topics("sta")) == [
        ("staleness", "Staleness: how asynchronous training is"),
        ("start", "Start: from nothing to a run"),
        ("status", "Status: the object of libra status --json, key by key"),
    ]


def test_hosts_are_the_aliases_that_stand_for_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(completion.hosts("")) == []
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host gpu-01 gpu-02 !gpu-03\nHost *.lab\nHost web\n")
    assert list(completion.hosts("gpu")) == ["gpu-01", "gpu-02"]
