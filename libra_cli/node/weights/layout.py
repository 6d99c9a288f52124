"""Where the tensors of a version lie in its files, which is known before any is written.

A safetensors file is the length of its header (8 bytes, little-endian), the header in JSON, and the
tensors' bytes one behind the other, in the order of their rows. So whoever holds some rows of a
tensor can write them by itself, and the header as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from libra_cli.node.weights.tensor_rows import TensorRows

FILE_BYTES = 2 * 1024**3
"""A file is closed once it has this size, so that files are written and hashed in parallel."""
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""What safetensors calls the formats that have a checksum."""
_ALIGNMENT = 8
"""Alignment of the first tensor in a file, in bytes."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of tensors as it is going to be."""

    name: str
    head: bytes
    """All that stands before the first tensor."""
    bytes: int
    """Size of the whole file."""
    word_bytes: int
    """Size of its smallest numbers, of which everything in it begins at a multiple."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies."""

    file: str
    offset: int
    """Where its first byte is in the file."""
    row_bytes: int
    """Size of one of its rows."""
    shape: tuple[int, ...]
    dtype: str
    """The number format, as torch calls it without the module."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The files of a version, and the tensors in them by name."""

    files: tuple[PlannedFile, ...]
    places: Mapping[str, Place]


def layout_of(pieces: Collection[TensorRows], *, files: int = 1) -> FileLayout:
    """Lay out the tensors of which these are pieces, as at least ``files`` files if they can be
    cut so at the ends of tensors."""
    pieces = {one.name: one for one in pieces}.values()  # of one with several, any
    size = min(FILE_BYTES, -(-sum(map(_bytes_of, pieces)) // files))
    planned, places = list[PlannedFile](), dict[str, Place]()
    for number, part in enumerate(_cut(pieces, size)):
        file, inside = _planned(f"model-{number:05d}.safetensors", part)
        planned.append(file)
        places |= inside
    return FileLayout(tuple(planned), places)


def _cut(pieces: Collection[TensorRows], size: int) -> Iterator[list[TensorRows]]:
    part, filled = list[TensorRows](), 0
    for piece in pieces:
        part.append(piece)
        filled += _bytes_of(piece)
        if filled >= size:
            yield part
            part, filled = [], 0
    if part:
        yield part


def _planned(name: str, pieces: list[TensorRows]) -> tuple[PlannedFile, dict[str, Place]]:
    # Numbers of the largest size first, so that all of them are aligned.
    pieces = sorted(pieces, key=lambda one: -one.tensor.element_size())
    told: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends, end = dict[str, int](), 0
    for one in pieces:
        begin, end = end, end + _bytes_of(one)
        ends[one.name] = begin
        told[one.name] = {
            "dtype": _NAMES[one.tensor.dtype],
            "shape": list(one.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    places = {
        one.name: Place(
            name,
            len(head) + ends[one.name],
            prod(one.shape[1:]) * one.tensor.element_size(),
            one.shape,
            str(one.tensor.dtype).removeprefix("torch."),
        )
        for one in pieces
    }
    word_bytes = min(one.tensor.element_size() for one in pieces)
    return PlannedFile(name, head, len(head) + end, word_bytes), places


def _bytes_of(piece: TensorRows) -> int:
    """Return the bytes of the whole tensor."""
    return int(prod(piece.shape) * piece.tensor.element_size())
