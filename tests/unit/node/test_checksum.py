"""The checksum of a tensor: of its numbers, in parts, wherever it lies."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.node.weights import checksum as module
from libra_cli.node.weights.checksum import FORMATS, MODULUS, as_rows, checksum, checksum_of

DTYPES = st.sampled_from(FORMATS)
SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**32 - 1)


def some(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


@given(rows=SIZES, columns=SIZES, dtype=DTYPES, seed=SEEDS, data=st.data())
def test_the_checksums_of_parts_add_up_to_that_of_the_whole(rows, columns, dtype, seed, data):
    tensor = some(rows, columns, dtype, seed)
    row = data.draw(st.integers(0, rows))
    column = data.draw(st.integers(0, columns))
    parts = [
        checksum(tensor[:row]),
        checksum(tensor[row:, :column], row, 0),
        checksum(tensor[row:, column:], row, column),
    ]
    assert sum(parts) % MODULUS == checksum(tensor)


@given(rows=SIZES, columns=SIZES, dtype=DTYPES, seed=SEEDS, data=st.data())
def test_one_changed_bit_changes_it(rows, columns, dtype, seed, data):
    tensor = some(rows, columns, dtype, seed)
    other = tensor.clone()
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    bits = other.view(integer).view(-1)
    at = data.draw(st.integers(0, bits.numel() - 1))
    bit = data.draw(st.integers(0, 8 * tensor.element_size() - 1))
    bits[at] ^= (1 << bit) - (2 << bit if bit == 8 * tensor.element_size() - 1 else 0)
    assert not torch.equal(tensor, other)
    assert checksum(tensor) != checksum(other)


@given(rows=SIZES, columns=st.integers(2, 40), dtype=DTYPES, seed=SEEDS)
def test_two_exchanged_numbers_change_it(rows, columns, dtype, seed):
    tensor = some(rows, columns, dtype, seed)
    if not torch.equal(tensor[:, 0], tensor[:, 1]):
        assert checksum(tensor[:, [1, 0, *range(2, columns)]]) != checksum(tensor)
    if rows > 1 and not torch.equal(tensor[0], tensor[1]):
        assert checksum(tensor[[1, 0, *range(2, rows)]]) != checksum(tensor)


def test_what_a_kernel_may_flush_to_zero_counts_as_zero():
    assert checksum(torch.tensor([-0.0, 1.0])) == checksum(torch.tensor([0.0, 1.0]))
    assert checksum(torch.tensor([1e-40, 1.0])) == checksum(torch.tensor([0.0, 1.0]))
    half = torch.float16  # in which subnormal numbers are not tiny
    changed = checksum(torch.tensor([1e-6], dtype=half))
    assert changed != checksum(torch.tensor([0.0], dtype=half))


@pytest.mark.parametrize("block", [1, 7, 64])
def test_it_does_not_depend_on_how_much_is_summed_at_a_time(block, monkeypatch):
    tensor = some(13, 11, torch.bfloat16, 0)
    expected = checksum(tensor)
    monkeypatch.setitem(module.BLOCKS, "cpu", block)
    assert checksum(tensor) == expected
    assert checksum(tensor.T.contiguous().T) == expected, "nor on how it lies in memory"


def test_a_tensor_of_any_dimensions_is_rows_and_columns():
    flat = some(1, 12, torch.float32, 1)
    assert checksum(flat[0]) == checksum(flat)
    assert as_rows(torch.zeros(3, 2, 5)).shape == (3, 10)
    assert int(checksum_of(flat, 0, 0)) % MODULUS == checksum(flat)


def test_it_stays_what_it_was_since_versions_are_kept_on_disk():
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert f"{checksum(tensor):016x}" == "f3cdd0354a700000"
    assert f"{checksum(tensor.to(torch.bfloat16)):016x}" == "bff7f3cdd0354a70"
