"""Several ranks write a version together: each its own rows, and rank 0 the manifest."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from safetensors.torch import load_file

from libra_cli.node.batch.shares import rows_of
from libra_cli.node.weights import files, part_writer, parts, publisher
from libra_cli.node.weights.checksum import checksum
from libra_cli.node.weights.chunks import MANIFEST
from libra_cli.node.weights.files import write_rows
from libra_cli.node.weights.layout import layout_of
from libra_cli.node.weights.part_writer import PartWriter
from libra_cli.node.weights.parts import Share
from libra_cli.node.weights.publisher import Publisher
from libra_cli.node.weights.tensor_rows import TensorRows, whole
from libra_cli.node.weights.versions import ProbeResult
from libra_cli.node.weights.weight_server import WeightServer
from tests.credentials import credentials_of, url_of

PROBE = ProbeResult([1, 2], [-0.5])
PATIENCE_S = 20.0
WRITERS = 3
SHARDS = 5
WHOLE = ("experts", "scale")
"""The tensors that every rank has whole."""


def weights(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    made = {
        f"layer.{number}": torch.randn(64, 16 + number, generator=generator) for number in range(7)
    }
    # Of one dimension, with fewer rows than ranks, of three dimensions, and without any.
    made |= {"norm": torch.randn(10, generator=generator), "one": torch.ones(1, 5)}
    three = torch.randn(3, 4, 5, generator=generator)
    made |= {"experts": three, "conv": three[:2].clone(), "scale": torch.tensor(2.5)}
    return {name: one + 1e-3 * step * (one > 2) for name, one in made.items()}


def held(version: int, rank: int, writers: int) -> Iterator[TensorRows]:
    """What a rank has of a version that so many write: its rows and those that some of the other
    ranks sent it, but of some tensors all."""
    for name, tensor in weights(version).items():
        if name in WHOLE:
            yield from whole([(name, tensor)])
        for shard in [] if name in WHOLE else range(rank, SHARDS, writers):
            first, end = rows_of(len(tensor), rank=shard, world=SHARDS)
            yield TensorRows(name, tensor[first:end], tuple(tensor.shape), first)


class Ranks:
    """The ranks of a host that write to ``root``, as the trainer's do."""

    def __init__(self, root: Path, writers: int = WRITERS, *, gathered: bool = False) -> None:
        self.root = root
        self.writers = writers
        self.gathered = gathered
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
            for rank, one in enumerate(self.others, 1):
                one.stage(self.pieces(version, rank), version=version)
            self.first.stage(self.pieces(version, 0), version=version, probe=PROBE)

    def pieces(self, version: int, rank: int) -> Iterator[TensorRows]:
        if self.gathered:
            return whole(weights(version).items())
        return held(version, rank, self.writers)

    def close(self) -> None:
        self.first.close()
        for one in self.others:
            one.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LOOK_S", 0.01)
    monkeypatch.setattr(part_writer, "LOOK_S", 0.01)
    monkeypatch.setattr(publisher, "LOOK_S", 0.02)
    monkeypatch.setattr(files, "DELTA_S", PATIENCE_S)


@pytest.fixture(params=[False, True], ids=["rows", "gathered"])
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path / "run", gathered=request.param)
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
    assert {0o600} == {one.stat().st_mode & 0o777 for one in (ranks.root / done.name).glob("m*-*")}
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
    def fails_elsewhere(*args: Any) -> dict[str, int]:
        if threading.current_thread().name == "part-writer":
            raise problem
        return write_rows(*args)

    monkeypatch.setattr(parts, "write_rows", fails_elsewhere)
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


def test_tensors_that_all_have_go_to_the_writer_that_has_the_least() -> None:
    given = [(str(size), torch.zeros(size)) for size in (8, 3, 3, 1, 5, 4)]

    def taken(share: Share) -> list[str]:
        return [one.name for one in share.of(whole(given)) if not one.is_empty]

    assert [taken(Share(number, 3)) for number in range(3)] == [["8"], ["3", "1", "4"], ["3", "5"]]
    assert taken(Share()) == [name for name, _ in given]


def test_every_rank_lays_a_version_out_alike_whatever_it_holds() -> None:
    layouts = [
        layout_of([*Share(rank, WRITERS).of(held(0, rank, WRITERS))], files=WRITERS)
        for rank in range(WRITERS)
    ]
    assert layouts[0] == layouts[1] == layouts[2]
    assert len(layouts[0].files) == WRITERS


def test_a_version_is_the_same_to_the_byte_whoever_writes_which_rows(tmp_path: Path) -> None:
    contents = []
    for gathered in (False, True):
        ranks = Ranks(tmp_path / str(gathered), gathered=gathered)
        ranks.stage(0)
        done = ranks.first.wait()
        ranks.close()
        assert done is not None
        found = (tmp_path / str(gathered) / done.name).iterdir()
        contents.append({one.name: one.read_bytes() for one in found if one.name != MANIFEST})
    assert contents[0] == contents[1]


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
