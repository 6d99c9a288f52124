"""Several ranks write a version together: each its own tensors, and rank 0 the manifest."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from safetensors.torch import load_file

from libra_cli.node.weights import parts, publisher, versions
from libra_cli.node.weights.checksum import checksum
from libra_cli.node.weights.chunks import MANIFEST
from libra_cli.node.weights.parts import PartWriter, Share
from libra_cli.node.weights.publisher import Publisher
from libra_cli.node.weights.versions import ProbeResult
from libra_cli.node.weights.weight_server import WeightServer
from tests.credentials import credentials_of, url_of

PROBE = ProbeResult([1, 2], [-0.5])
PATIENCE_S = 20.0
WRITERS = 3


def weights(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    made = {
        f"layer.{number}": torch.randn(64, 16 + number, generator=generator) for number in range(7)
    }
    return {name: one + 1e-3 * step * (one > 2) for name, one in made.items()}


class Ranks:
    """The ranks of a host that write to ``root``, as the trainer's do."""

    def __init__(self, root: Path, writers: int = WRITERS) -> None:
        self.root = root
        self.problems: list[BaseException] = []
        options: dict[str, Any] = {"trainer_incarnation": 0, "dtype": torch.bfloat16}
        self.first = Publisher(
            root,
            **options,
            keep=2,
            published=lambda version: None,
            failed=self.problems.append,
            share=Share(0, writers),
        )
        self.others = [
            PartWriter(root, **options, share=Share(number, writers))
            for number in range(1, writers)
        ]

    def stage(self, version: int) -> None:
        with self.first.settled():
            for one in self.others:
                one.stage(weights(version).items(), version=version)
            self.first.stage(weights(version).items(), version=version, probe=PROBE)

    def close(self) -> None:
        self.first.close()
        for one in self.others:
            one.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LOOK_S", 0.01)
    monkeypatch.setattr(publisher, "LOOK_S", 0.02)
    monkeypatch.setattr(versions, "DELTA_S", PATIENCE_S)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path / "run")
    yield ranks
    ranks.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check(directory: Path, version: int) -> dict[str, Any]:
    """All of a version is there, right, and once; its manifest."""
    manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes())
    expected = {name: one.bfloat16() for name, one in weights(version).items()}
    found = {file: load_file(directory / file) for file in manifest["files"]}
    assert sorted(name for one in found.values() for name in one) == sorted(expected)
    assert manifest["tensors"].keys() == expected.keys()
    for name, about in manifest["tensors"].items():
        assert found[about["file"]][name].equal(expected[name])
        assert int(about["checksum"], 16) == checksum(expected[name])
    listed = {MANIFEST, *manifest["files"], *(manifest["delta"] or {"files": {}})["files"]}
    assert {one.name for one in directory.iterdir()} == listed
    return manifest


def test_a_version_of_several_writers_is_whole_and_each_has_written_its_share(ranks: Ranks) -> None:
    ranks.stage(0)
    done = ranks.first.wait()
    assert done is not None
    manifest = check(ranks.root / done.name, 0)
    sizes = [one["bytes"] for one in manifest["files"].values()]
    assert len(sizes) == WRITERS
    assert max(sizes) < 0.5 * sum(sizes)
    assert done.bytes == sum(sizes)


def test_a_host_follows_several_writers_by_the_delta_of_each(ranks: Ranks, tmp_path: Path) -> None:
    there = WeightServer(ranks.root, credentials_of())
    here = WeightServer(tmp_path / "host" / "run", credentials_of())
    source = url_of(there.serve("127.0.0.1", 0))
    try:
        for version in range(3):
            ranks.stage(version)
            done = ranks.first.wait()
            assert done is not None
            pulled = here.pull(done.name, [source], patience_s=PATIENCE_S)
            assert pulled.kind == ("delta" if version else "full"), pulled.detail
            manifest = json.loads((Path(pulled.path) / MANIFEST).read_bytes())
            for name, about in manifest["tensors"].items():
                held = load_file(Path(pulled.path) / about["file"])[name]
                assert held.equal(weights(version)[name].bfloat16())
    finally:
        here.close()
        there.close()


def test_a_version_that_is_gone_is_written_again_by_all(ranks: Ranks) -> None:
    ranks.stage(0)
    done = ranks.first.wait()
    assert done is not None
    shutil.rmtree(ranks.root / done.name)
    until(lambda: (ranks.root / done.name / MANIFEST).exists())
    check(ranks.root / done.name, 0)
    ranks.stage(1)
    after = ranks.first.wait()
    assert after is not None
    check(ranks.root / after.name, 1)


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (OSError(28, "No space left on device"), r"writer 1: OSError: \[Errno 28\] No space left"),
        (RuntimeError("of another kind"), "writer 1: RuntimeError: of another kind"),
    ],
)
def test_a_writer_that_cannot_write_is_named(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, problem: Exception, told: str
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise problem

    monkeypatch.setattr(parts, "write_tensors", fails)
    ranks.stage(0)
    with pytest.raises(OSError, match=told):
        ranks.first.wait()
    assert len(ranks.problems) == 1
    assert not [*ranks.root.glob("v*")]


def test_a_writer_that_gives_nothing_is_waited_for_no_longer_than_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PARTS_S", 0.1)
    alone = Ranks(tmp_path / "run", writers=2)
    alone.others.pop().close()
    alone.stage(0)
    with pytest.raises(OSError, match="writer 1 gave no part"):
        alone.first.wait()
    alone.close()


def test_tensors_go_to_the_writer_that_has_the_least() -> None:
    given = [(str(size), torch.zeros(size)) for size in (8, 3, 3, 1, 5, 4)]
    shares = [[name for name, _ in Share(number, 3).of(iter(given))] for number in range(3)]
    assert shares == [["8"], ["3", "1", "4"], ["3", "5"]]
    assert [name for name, _ in Share().of(iter(given))] == [name for name, _ in given]


def test_a_disk_that_is_away_for_a_while_is_looked_at_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = PartWriter._look

    def sometimes(writer: PartWriter) -> None:
        looks.append(1)
        if len(looks) <= WRITERS:
            raise OSError(116, "Stale file handle")
        look(writer)

    monkeypatch.setattr(PartWriter, "_look", sometimes)
    ranks.stage(0)
    done = ranks.first.wait()
    assert done is not None
    check(ranks.root / done.name, 0)
