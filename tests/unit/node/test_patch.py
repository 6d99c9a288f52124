"""What changed between two files is little, and gives the newer one back bit for bit."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.node.weights import patch

NO_LIMIT = 2**40
DEADLINE_S = 20.0


def encoded(directory: Path, old: Any, new: Any, *, limit: int = NO_LIMIT) -> bool:
    old.tofile(directory / "old")
    new.tofile(directory / "new")
    return patch.encode(
        directory / "old",
        directory / "new",
        directory / "delta",
        word_bytes=old.itemsize,
        limit=limit,
        within_s=DEADLINE_S,
    )


def there_and_back(directory: Path, old: Any, new: Any) -> int:
    """Bytes of the delta."""
    assert encoded(directory, old, new)
    patch.rebuild(directory / "old", directory / "delta", directory / "again")
    assert (directory / "again").read_bytes() == new.tobytes()
    return (directory / "delta").stat().st_size


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """Words of any value, of which none, some or all are others in the second array."""
    dtype: Any = np.dtype(draw(st.sampled_from(["<u2", "<u4"])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 3000))
    share = draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))
    near = draw(st.booleans())
    top = int(np.iinfo(dtype).max)
    old = rng.integers(0, top, size, dtype=dtype, endpoint=True)
    to = old + dtype.type(1) if near else rng.integers(0, top, size, dtype=dtype, endpoint=True)
    return old, np.where(rng.random(size) < share, to, old)


@given(pairs())
def test_the_newer_file_comes_back_bit_for_bit(pair):
    with tempfile.TemporaryDirectory() as directory:
        there_and_back(Path(directory), *pair)


@pytest.mark.parametrize("block_words", [1, 7, 300])
def test_blocks_of_any_size_give_the_same_file(tmp_path, monkeypatch, block_words):
    monkeypatch.setattr(patch, "BLOCK_WORDS", block_words)
    rng = np.random.default_rng(1)
    old = rng.integers(0, 2**16, 1000, dtype="<u2")
    there_and_back(tmp_path, old, np.where(rng.random(1000) < 0.3, old ^ 5, old))


def test_changes_far_apart_and_at_both_ends_are_found(tmp_path):
    old: Any = np.zeros(200_000, dtype="<u2")
    new = old.copy()
    new[[0, 1, 300, 199_999]] = [65535, 1, 32768, 7]
    assert there_and_back(tmp_path, old, new) < 100


def test_nothing_changed_takes_next_to_nothing(tmp_path):
    words: Any = np.arange(10_000, dtype="<u4")
    assert there_and_back(tmp_path, words, words) < 30


def test_one_value_in_fifty_moved_to_its_neighbour_takes_a_bit_over_a_byte_each(tmp_path):
    rng = np.random.default_rng(2)
    old = rng.integers(0, 2**16, 500_000, dtype="<u2")
    step = rng.choice(np.array([1, 65535], dtype="<u2"), len(old))
    new = np.where(rng.random(len(old)) < 0.02, old + step, old)
    assert there_and_back(tmp_path, old, new) < 1.3 * np.count_nonzero(new != old)


def test_what_takes_too_many_bytes_is_given_up(tmp_path):
    rng = np.random.default_rng(3)
    old, new = rng.integers(0, 2**32, (2, 1000), dtype="<u4")
    assert not encoded(tmp_path, old, new, limit=2000)


def test_what_takes_too_long_is_given_up(tmp_path):
    (tmp_path / "a").write_bytes(b"12345678")
    same = (tmp_path / "a", tmp_path / "a", tmp_path / "delta")
    assert not patch.encode(*same, word_bytes=2, limit=NO_LIMIT, within_s=-1.0)


def test_the_pace_of_the_first_blocks_tells_what_will_take_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(patch, "BLOCK_WORDS", 10)
    at = iter(range(1000))  # a second a block
    monkeypatch.setattr(time, "monotonic", lambda: float(next(at)))
    old: Any = np.zeros(1000, dtype="<u2")
    old.tofile(tmp_path / "old")
    same = (tmp_path / "old", tmp_path / "old", tmp_path / "delta")
    assert not patch.encode(*same, word_bytes=2, limit=NO_LIMIT, within_s=80.0)
    assert next(at) < 20
    assert patch.encode(*same, word_bytes=2, limit=NO_LIMIT, within_s=120.0)


def test_files_of_two_sizes_have_no_delta(tmp_path):
    assert not encoded(tmp_path, np.zeros(4, dtype="<u2"), np.zeros(5, dtype="<u2"))


@pytest.mark.parametrize("kept", [0, 5, 20, -1])
def test_a_delta_that_was_cut_off_is_refused(tmp_path, kept):
    rng = np.random.default_rng(4)
    old, new = rng.integers(0, 2**16, (2, 1000), dtype="<u2")
    assert encoded(tmp_path, old, new)
    whole = (tmp_path / "delta").read_bytes()
    (tmp_path / "delta").write_bytes(whole[:kept])
    with pytest.raises(patch.Damaged, match="ends too early"):
        patch.rebuild(tmp_path / "old", tmp_path / "delta", tmp_path / "again")
    (tmp_path / "delta").write_bytes(whole + b"x")
    with pytest.raises(patch.Damaged, match="goes on after its end"):
        patch.rebuild(tmp_path / "old", tmp_path / "delta", tmp_path / "again")


def test_the_command_rebuilds_every_file_there_is_a_delta_of(tmp_path):
    base, draft = tmp_path / "base", tmp_path / "draft"
    base.mkdir()
    draft.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        assert encoded(tmp_path, np.arange(9, dtype="<u2"), np.arange(1, 10, dtype="<u2"))
        (tmp_path / "old").rename(base / name)
        (tmp_path / "delta").rename(draft / f"{name}.delta")
    command = [sys.executable, "-m", "libra_cli.node.weights.patch", str(base), str(draft)]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    for name in ("a.safetensors", "b.safetensors"):
        assert (draft / name).read_bytes() == (tmp_path / "new").read_bytes()
    (draft / "b.safetensors.delta").write_bytes(b"")
    failed = subprocess.run(
        command, check=False, timeout=DEADLINE_S, capture_output=True, text=True
    )
    assert (failed.returncode, failed.stderr.endswith(".delta ends too early\n")) == (1, True)
