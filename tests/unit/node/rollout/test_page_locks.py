"""Pages of a version are locked for a GPU once, in one piece, and unlocked while still mapped."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from libra_cli.node.rollout import page_locks  # noqa: E402
from libra_cli.node.rollout.page_locks import (  # noqa: E402
    PageLocks,
    locks_for,
    pages_of,
    shared_tensors,
)
from libra_cli.node.rollout.prepared import PreparedVersion, Region  # noqa: E402

ROWS, COLUMNS = 64, 4096
GPU = torch.device("cuda", 1)


class Runtime:
    """CUDA's runtime as far as it locks pages: it refuses what the real one does."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.calls = 0
        self.refuses = False

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls += 1
        assert begin % PAGESIZE == size % PAGESIZE == 0
        assert is_shared(begin, begin + size), "locking private pages copies them"
        if self.refuses or any(begin < end and at < begin + size for at, end in self._spans()):
            return 712
        self.locked[begin] = size
        return 0

    def cudaHostUnregister(self, begin: int) -> int:  # noqa: N802
        assert is_shared(begin, begin + self.locked.pop(begin)), "it is mapped no more"
        return 0

    def _spans(self) -> list[tuple[int, int]]:
        return [(begin, begin + size) for begin, size in self.locked.items()]


def is_shared(begin: int, end: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        first, last = (int(one, 16) for one in span.split("-"))
        if first <= begin and end <= last:
            return mode[3] == "s"
    return False


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    fake = SimpleNamespace(cudart=lambda: runtime, device=lambda device: nullcontext())
    monkeypatch.setattr(page_locks, "torch", SimpleNamespace(**vars(torch) | {"cuda": fake}))
    return runtime


@pytest.fixture
def version(tmp_path: Path) -> dict[str, Any]:
    tensors = {
        "matrix": torch.randn(ROWS, COLUMNS),
        "other": torch.randn(ROWS, COLUMNS).bfloat16(),
        "norm": torch.randn(3).bfloat16(),
        "scalar": torch.tensor(2.0),
    }
    for number, names in enumerate((("matrix", "norm", "scalar"), ("other",))):
        part = {name: tensors[name] for name in names}
        save_file(part, tmp_path / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
    return tensors


def test_a_file_that_is_mapped_as_shared_has_the_tensors_that_safetensors_reads(
    tmp_path: Path, version: dict[str, Any]
) -> None:
    for path in tmp_path.glob("*.safetensors"):
        found, wanted = dict(shared_tensors(path)), load_file(path)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_all_pages_are_locked_and_unlocked(
    tmp_path: Path, version: dict[str, Any], cuda: Runtime
) -> None:
    made = PreparedVersion(str(tmp_path), {}, PageLocks(GPU))
    assert dict(made.tensors()).keys() == version.keys()
    assert len(cuda.locked) == 2  # a piece for each file: no tensor goes over a border
    files = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert files <= sum(cuda.locked.values()) < files + 2 * PAGESIZE
    made.close().join(timeout=30)
    assert not cuda.locked


@pytest.mark.parametrize(
    ("region", "share"),
    [
        ((slice(16, 32), slice(None)), 0.25),
        ((slice(None), slice(0, COLUMNS // 2)), 0.0),  # the CPU puts columns together first
    ],
)
def test_of_a_matrix_the_rows_of_the_rank_are_locked(
    tmp_path: Path, version: dict[str, Any], cuda: Runtime, region: Region, share: float
) -> None:
    made = PreparedVersion(str(tmp_path), {"matrix": region, "other": region}, PageLocks(GPU))
    list(made.tensors())
    most = sum(one.nbytes for one in version.values())
    assert abs(sum(cuda.locked.values()) / most - share) < 0.03
    made.close().join(timeout=30)
    assert not cuda.locked


def test_where_cuda_refuses_it_is_told_once_and_not_tried_again(
    tmp_path: Path, version: dict[str, Any], cuda: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.refuses, locks = True, PageLocks(GPU)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = PreparedVersion(str(tmp_path), {}, locks)
            assert torch.equal(dict(made.tensors())["matrix"], version["matrix"])
            made.close().join(timeout=30)
    assert cuda.calls == 1
    (record,) = caplog.records
    assert "CUDA cannot lock" in record.getMessage()


def test_nothing_is_locked_where_there_is_no_gpu() -> None:
    assert locks_for(torch.device("cpu")) is None
    assert locks_for(GPU) is locks_for(GPU) is not None


def test_pieces_that_share_or_touch_a_page_are_one() -> None:
    first, second, apart = (10, 20), (PAGESIZE, PAGESIZE + 1), (4 * PAGESIZE - 1, 4 * PAGESIZE)
    assert pages_of([apart, second, first]) == [
        (0, 2 * PAGESIZE),
        (3 * PAGESIZE, 4 * PAGESIZE),
    ]
