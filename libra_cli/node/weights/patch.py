"""Encodes the difference between two files of the same size, and rebuilds the newer from it.

    python -m libra_cli.node.weights.patch BASE_DIR DRAFT_DIR

applies every DRAFT_DIR/<file>.delta to BASE_DIR/<file>, which gives DRAFT_DIR/<file>.

Files are read as words of the size of their tensors' elements, so a changed value is one changed
word, and the result is the newer file bit for bit. In the precision of publication an optimizer
step leaves most values as they are and moves most others to a neighbouring value. Hence a changed
word is stored as its distance from the old one, a small number, and its position as the gap to the
changed word before it. The bytes of the same significance of either are put together and
compressed, which leaves little more than the entropy of the gaps.

    file     magic, bytes a word, words, then blocks of up to BLOCK_WORDS words in order
    block    number of changes, bytes a gap; if there are changes, the planes of the gaps and then
             those of the distances, least significant first
    plane    its length here, and its bytes: compressed if that is shorter than one a change

All numbers are little-endian. Whoever applies a delta must compare the result's checksum: a delta
applied to another base gives a wrong file without an error. Needs numpy only.
"""

from __future__ import annotations

import struct
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

SUFFIX = ".delta"
MAGIC = b"libra-d1"
HEAD = struct.Struct("<8sBQ")
BLOCK = struct.Struct("<IB")
PLANE = struct.Struct("<I")
BLOCK_WORDS = 2**22
"""Words compared or rebuilt at a time, which take some 100 MB of memory for a file."""
PACE_SHARE = 1 / 8
"""Share of the time allowed for a delta after which its pace is trusted to predict its end."""
FILES = 4
"""How many files are rebuilt at a time."""
SAMPLE = 2**16
"""How many bytes of a plane are compressed to see whether that is worth it: compressing noise would
take most of the time."""

Words: TypeAlias = NDArray[np.unsignedinteger[Any]]


class Damaged(Exception):
    """A delta is damaged or does not belong to this base."""


def encode(
    base: Path, new: Path, delta: Path, *, word_bytes: int, limit: int, within_s: float
) -> bool:
    """Write to ``delta`` how to make ``new`` from ``base``.

    Returns:
        False, with a useless file at ``delta``, if that takes more than ``limit`` bytes, would take
        longer than ``within_s`` seconds at the pace so far, or the two files differ in size or are
        not whole words.
    """
    started = time.monotonic()
    size = new.stat().st_size
    if base.stat().st_size != size or size % word_bytes:
        return False
    old_words, new_words = (_words(path, word_bytes) for path in (base, new))
    with delta.open("wb") as out:
        out.write(HEAD.pack(MAGIC, word_bytes, len(new_words)))
        for block in _blocks(len(new_words)):
            for part in _encoded(old_words[block], new_words[block]):
                out.write(part)
            spent_s = time.monotonic() - started
            is_slow = spent_s > PACE_SHARE * within_s
            if out.tell() > limit or (is_slow and spent_s * len(new_words) > within_s * block.stop):
                return False
    return True


def rebuild(base: Path, delta: Path, new: Path) -> None:
    """Apply ``delta`` to ``base`` and write the result to ``new``.

    Raises:
        Damaged: the two do not belong together.
        OSError: a file cannot be read or written.
    """
    with delta.open("rb") as source, new.open("wb") as out:
        magic, word_bytes, count = HEAD.unpack(_exactly(source, HEAD.size))
        if magic != MAGIC or word_bytes * count != base.stat().st_size:
            raise Damaged(f"{delta.name} is no delta of {base}")
        words = _words(base, word_bytes)
        for block in _blocks(count):
            out.write(_decoded(source, words[block]))
        if source.read(1):
            raise Damaged(f"{delta.name} goes on after its end")


def _words(path: Path, word_bytes: int) -> Words:
    return np.memmap(path, dtype=f"<u{word_bytes}", mode="r")


def _blocks(count: int) -> Iterator[slice]:
    for first in range(0, count, BLOCK_WORDS):
        yield slice(first, min(first + BLOCK_WORDS, count))


def _encoded(old: Words, new: Words) -> Iterator[bytes]:
    positions = np.flatnonzero(old != new)
    if not len(positions):
        yield BLOCK.pack(0, 0)
        return
    gaps = np.diff(positions, prepend=-1)
    gaps = gaps.astype(np.min_scalar_type(gaps.max()).newbyteorder("<"))
    yield BLOCK.pack(len(positions), gaps.itemsize)
    for values in (gaps, _folded(new[positions] - old[positions])):
        planes = values.view(np.uint8).reshape(len(values), values.itemsize)
        for column in range(values.itemsize):
            yield from _packed(planes[:, column].tobytes())


def _decoded(source: BinaryIO, old: Words) -> Words:
    changes, gap_bytes = BLOCK.unpack(_exactly(source, BLOCK.size))
    new = np.array(old)
    if changes > len(old) or (changes and gap_bytes not in (1, 2, 4)):
        raise Damaged(f"a block of {len(old)} words has {changes} changes, {gap_bytes} bytes a gap")
    if changes:
        gaps = _values(source, changes, gap_bytes)
        positions = np.cumsum(gaps, dtype=np.int64) - 1
        if positions[-1] >= len(old):
            raise Damaged(f"a block of {len(old)} words has a change at {positions[-1]}")
        new[positions] += _unfolded(_values(source, changes, old.itemsize))
    return new


def _folded(distances: Words) -> Words:
    """Zigzag encoding: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..., so that near values are small."""
    sign = distances >> (8 * distances.itemsize - 1)
    return (distances << 1) ^ -sign


def _unfolded(folded: Words) -> Words:
    return (folded >> 1) ^ -(folded & 1)


def _values(source: BinaryIO, count: int, width: int) -> Words:
    planes: NDArray[np.uint8] = np.empty((count, width), dtype=np.uint8)
    for column in range(width):
        planes[:, column] = np.frombuffer(_unpacked(source, count), dtype=np.uint8)
    return planes.reshape(-1).view(f"<u{width}")


def _packed(plane: bytes) -> Iterator[bytes]:
    if len(_compressed(plane[:SAMPLE])) < 0.95 * min(len(plane), SAMPLE):
        short = _compressed(plane)
        plane = short if len(short) < len(plane) else plane
    yield PLANE.pack(len(plane))
    yield plane


def _compressed(plane: bytes) -> bytes:
    # The bytes are nearly independent: there are runs and frequent values to find, no repeated
    # strings, and the search for those would take most of the time.
    packer = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return packer.compress(plane) + packer.flush()


def _unpacked(source: BinaryIO, count: int) -> bytes:
    (length,) = PLANE.unpack(_exactly(source, PLANE.size))
    plane = _exactly(source, length)
    if length < count:
        plane = zlib.decompressobj().decompress(plane, count)
    if len(plane) != count:
        raise Damaged(f"{len(plane)} bytes in a plane of {count}")
    return plane


def _exactly(source: BinaryIO, count: int) -> bytes:
    data = source.read(count)
    if len(data) != count:
        raise Damaged(f"{source.name} ends too early")
    return data


def main() -> int:
    """Rebuild every file that has a delta; return 1, with a sentence on stderr, on failure."""
    base, draft = (Path(argument) for argument in sys.argv[1:])
    deltas = sorted(draft.glob(f"*{SUFFIX}"))
    names = [delta.name.removesuffix(SUFFIX) for delta in deltas]
    try:
        with ThreadPoolExecutor(FILES) as pool:
            list(pool.map(rebuild, [base / n for n in names], deltas, [draft / n for n in names]))
    except (Damaged, OSError, ValueError, zlib.error) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
