"""``libra setup`` without SSH: what it reads here and on a host, and what it writes there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from libra_cli.config.errors import InputError
from libra_cli.config.recipe import NodeSpec
from libra_cli.runtime.doctor import setup as module
from libra_cli.runtime.doctor.environment import HostEnvironment, Packages
from libra_cli.runtime.doctor.remote_files import HostFiles, LocalFiles
from libra_cli.runtime.hosts.local import LocalTransport


def test_a_model_in_a_cache_of_links_is_read_as_any_other(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/1"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (blobs / name[:3]).write_text(name)
        (snapshot / name).symlink_to(blobs / name[:3])
    there = asyncio.run(HostFiles(LocalTransport(), str(snapshot)).hashes())
    assert sorted(there) == ["config.json", "model.safetensors"]
    assert there == asyncio.run(LocalFiles(snapshot).hashes())


def test_files_here_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read here: .*No such file") as told:
        asyncio.run(LocalFiles(tmp_path / "model").hashes())
    assert told.value.hint == f"ls -l {tmp_path / 'model'}"


def test_a_model_that_nobody_may_look_at_here_is_sought_on_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refused)  # whoever is root may look anywhere
    assert module._model_here(str(tmp_path)) is None


def test_a_work_directory_that_is_not_there_is_made_for_what_packages_need(tmp_path: Path) -> None:
    node = NodeSpec(host="gpu-1", workdir=str(tmp_path / "scratch/libra"))
    environment = HostEnvironment(node, LocalTransport())
    asyncio.run(environment._install("true", Packages(()), ()))
    assert (tmp_path / "scratch/libra/overrides.txt").is_file()
