"""Versions are written behind the trainer's steps: one at a time, of what was staged."""

from __future__ import annotations

import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from safetensors.torch import load_file

from libra_cli.node.weights import publisher as module
from libra_cli.node.weights.chunks import MANIFEST
from libra_cli.node.weights.publisher import Publisher
from libra_cli.node.weights.tensor_rows import whole
from libra_cli.node.weights.versions import ProbeResult, VersionOnDisk, publish

PROBE = ProbeResult([1, 2], [-0.5])
PATIENCE_S = 20.0


@dataclass
class Disk:
    """Where versions are written; it may be held up, or break."""

    root: Path
    free: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    refused: int = 0
    written: list[VersionOnDisk] = field(default_factory=list)
    told: list[BaseException] = field(default_factory=list)

    def publish(self, *args: Any, **options: Any) -> VersionOnDisk:
        assert self.free.wait(PATIENCE_S)
        if self.error is not None:
            self.refused += 1
            raise self.error
        return publish(*args, **options)

    def values(self, version: int) -> dict[str, torch.Tensor]:
        """What lies on it of a version."""
        tensors: dict[str, torch.Tensor] = load_file(
            self.root / f"v{version:06d}-e3" / "model-00000.safetensors"
        )
        return tensors


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(tmp_path / "versions")
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "publish", disk.publish)
    return disk


@pytest.fixture
def publisher(disk: Disk) -> Iterator[Publisher]:
    publisher = Publisher(
        disk.root,
        trainer_incarnation=3,
        dtype=torch.bfloat16,
        keep=2,
        published=disk.written.append,
        failed=disk.told.append,
    )
    yield publisher
    disk.free.set()
    publisher.close()


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), 1.5), "b": torch.zeros(5)}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_trainer_goes_on_before_anything_is_written(disk, publisher, weights):
    publisher.stage(whole(weights.items()), version=1, probe=PROBE)
    assert not disk.written
    weights["a"].fill_(9.0)  # the next step
    disk.free.set()
    assert publisher.wait() == disk.written[0]
    assert disk.values(1)["a"].eq(1.5).all()
    assert disk.values(1)["a"].dtype == torch.bfloat16


def test_a_version_waits_for_the_one_before_it_to_be_written(disk, publisher, weights):
    publisher.stage(whole(weights.items()), version=1, probe=PROBE)
    weights["a"].fill_(2.0)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(publisher.stage, whole(weights.items()), version=2, probe=PROBE)
        assert not second.done()
        disk.free.set()
        second.result(PATIENCE_S)
    publisher.wait()
    assert [one.version for one in disk.written] == [1, 2]
    assert disk.values(1)["a"].eq(1.5).all()
    assert disk.values(2)["a"].eq(2.0).all()


def test_versions_share_one_copy(disk, publisher, weights, monkeypatch):
    disk.free.set()
    publisher.stage(whole(weights.items()), version=1, probe=PROBE)
    publisher.wait()
    made: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda *_, **__: made.append(1))
    publisher.stage(whole(weights.items()), version=2, probe=PROBE)
    publisher.wait()
    assert not made


def test_a_failure_is_told_at_once_and_stops_the_next_version(disk, publisher, weights):
    disk.error = OSError(28, "No space left on device")
    disk.free.set()
    publisher.stage(whole(weights.items()), version=1, probe=PROBE)
    with pytest.raises(OSError, match="No space"):
        publisher.wait()
    assert disk.told == [disk.error]
    with pytest.raises(OSError, match="No space"):
        publisher.stage(whole(weights.items()), version=2, probe=PROBE)


def test_the_end_waits_for_the_last_version(disk, publisher, weights):
    publisher.stage(whole(weights.items()), version=1, probe=PROBE)
    threading.Timer(0.05, disk.free.set).start()
    publisher.close()
    assert [one.version for one in disk.written] == [1]


def test_nothing_was_written_before_the_first(publisher):
    assert publisher.wait() is None


def test_a_version_that_is_gone_from_the_disk_is_written_again(disk, publisher, weights):
    disk.free.set()
    publisher.stage(whole(weights.items()), version=1, probe=PROBE)
    done = publisher.wait()
    weights["a"].fill_(9.0)  # the next step is computed meanwhile
    shutil.rmtree(disk.root / done.name)
    until(lambda: (disk.root / done.name / MANIFEST).exists())
    assert disk.values(1)["a"].eq(1.5).all()
    assert disk.written == [done], "it is told once"


def test_a_version_that_cannot_be_written_again_ends_nothing(disk, publisher, weights):
    disk.free.set()
    publisher.stage(whole(weights.items()), version=1, probe=PROBE)
    done = publisher.wait()
    disk.error = OSError(28, "No space left on device")
    shutil.rmtree(disk.root / done.name)
    until(lambda: disk.refused > 0)
    disk.error = None
    until(lambda: (disk.root / done.name / MANIFEST).exists())
    publisher.stage(whole(weights.items()), version=2, probe=PROBE)
    assert publisher.wait().version == 2
    assert not disk.told


def test_a_real_disk_that_is_full_ends_nothing_either(disk, publisher, weights):
    disk.free.set()
    publisher.stage(whole(weights.items()), version=1, probe=PROBE)
    done = publisher.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))  # as full as a disk without root gets
    try:
        shutil.rmtree(disk.root / done.name)
        until(lambda: publisher._writing.done() and publisher._writing.result() is done)
        time.sleep(0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    until(lambda: (disk.root / done.name / MANIFEST).exists())
    publisher.stage(whole(weights.items()), version=2, probe=PROBE)
    assert publisher.wait().version == 2
    assert not disk.told


def test_a_file_system_that_is_away_for_a_while_is_looked_at_again(
    disk, publisher, weights, monkeypatch
):
    disk.free.set()
    publisher.stage(whole(weights.items()), version=1, probe=PROBE)
    done = publisher.wait()
    looked = threading.Event()

    def away(_: Path) -> bool:
        looked.set()
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", away)
        assert looked.wait(PATIENCE_S)
    shutil.rmtree(disk.root / done.name)
    until(lambda: (disk.root / done.name / MANIFEST).exists())
