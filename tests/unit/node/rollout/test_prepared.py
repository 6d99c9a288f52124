"""What a worker brings into its memory before it stops for a version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from safetensors.torch import save_file  # noqa: E402

from libra_cli.node.rollout.prepared import PreparedVersion, Region, part_of, touch  # noqa: E402

ALL = (slice(None), slice(None))
ROWS, COLUMNS = 1024, 8192


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """One matrix of 16 MiB."""
    matrix = torch.arange(ROWS * COLUMNS, dtype=torch.int32).to(torch.bfloat16)
    save_file({"matrix": matrix.reshape(ROWS, COLUMNS)}, tmp_path / "model-00000.safetensors")
    return tmp_path


def resident_bytes(path: Path) -> int:
    """Of the mappings of a file in this process."""
    blocks = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    sizes = (re.search(r"^Rss: +(\d+) kB", one, re.M) for one in blocks if str(path) in one)
    return sum(1024 * int(size[1]) for size in sizes if size)


def prepared(version: Path, region: Region) -> PreparedVersion:
    made = PreparedVersion(str(version), {"matrix": region})
    list(made.tensors())
    assert made.is_done
    return made


def test_the_tensors_are_those_of_the_files(version: Path) -> None:
    made = PreparedVersion(str(version), {})
    ((name, tensor),) = made.tensors()
    expected = torch.arange(ROWS * COLUMNS, dtype=torch.int32).to(torch.bfloat16)
    assert name == "matrix"
    assert torch.equal(tensor, expected.reshape(ROWS, COLUMNS))


@pytest.mark.parametrize(
    ("region", "share"),
    [
        (ALL, 1.0),
        ((slice(256, 512), slice(None)), 0.25),
        ((slice(None), slice(0, COLUMNS // 2)), 0.5),
    ],
)
def test_only_what_a_rank_holds_is_in_memory(version: Path, region: Region, share: float) -> None:
    (file,) = version.glob("*.safetensors")
    keeps = prepared(version, region)
    mapped = resident_bytes(file) / file.stat().st_size
    # The kernel maps up to 16 pages around the one that is read, so columns come with others.
    most = share + 0.05 if region[1] == slice(None) else 1.0
    assert share - 0.01 <= mapped <= most
    assert keeps.is_done


def test_a_file_that_cannot_be_read_is_told_when_the_tensors_are_wanted(version: Path) -> None:
    (version / "model-00001.safetensors").write_bytes(b"nonsense")
    made = PreparedVersion(str(version), {})
    with pytest.raises(Exception, match=r"(?i)header|safetensors|deserializ"):
        list(made.tensors())


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0, 4)])
def test_tensors_of_any_shape_can_be_read(shape: tuple[int, ...]) -> None:
    touch(part_of(torch.zeros(shape, dtype=torch.bfloat16), ALL))
