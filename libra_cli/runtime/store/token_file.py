"""The tokens of trajectories that have ended: ``tokens.bin``, beside the database.

A row of a trajectory says where its tokens lie (``tokens_at``); what nobody ever asks for is never
read. The file only grows. Every trajectory is a frame: its length, its CRC-32 (both little-endian
u32), and, compressed by zlib, the msgpack array of its branches:

    number, [version, start, end, ...] of its spans, token ids, log-probabilities

Log-probabilities are of the tokens in spans alone. So are log-ratios, once a step has trained the
trajectory: they are another frame, which the row of what it was weighed by names
(``log_ratios_at``), an array with one vector for each branch. Numbers are little-endian int32,
float32 and, of log-ratios, float16. They are taken apart by byte: first all lowest bytes, then the
next. Most upper bytes of token ids are zero and most exponents alike, which is what a compressor
needs side by side (byte shuffle, as in HDF5:
https://docs.hdfgroup.org/documentation/hdf5/latest/group___s_h_u_f_f_l_e.html).

What was written for a row that never came to the database (a controller that was killed, a disk
that was full) is passed over: no row says that it is there.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from libra_cli.config.errors import StateError
from libra_cli.core.types import BranchTokens, VersionSpan

TOKENS = "tokens.bin"
OLD_TOKENS = "token_ids_json"
"""The column of ``trajectories`` in which an older libra kept them."""
_FRAME = struct.Struct("<II")
T = TypeVar("T")
LEVEL = 1
"""Level of zlib: higher ones take longer and save a few percent of bytes that hardly repeat."""


class TokenFile:
    """Writes the file. It is opened when there is something to write."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / TOKENS
        self._file: int | None = None
        self._end = 0

    def append(self, bodies: Iterable[bytes]) -> list[int]:
        """Write some frames; returns where each begins. All are in the file, or none.

        Raises:
            OSError: the file cannot be written.
        """
        data, places = bytearray(), []
        if self._file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
            self._end = os.fstat(self._file).st_size
        for body in bodies:
            places.append(self._end + len(data))
            data += _FRAME.pack(len(body), zlib.crc32(body)) + body
        at, rest = self._end, memoryview(data)
        while rest:
            written = os.pwrite(self._file, rest, at)
            at, rest = at + written, rest[written:]
        self._end = at
        return places

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def packed(branches: Sequence[BranchTokens]) -> bytes:
    """Return the body of a trajectory's frame: its branches as compressed msgpack."""
    told = [
        (
            one.number,
            [number for s in one.spans for number in (s.version, s.start, s.end)],
            _apart(one.token_ids.tobytes(), 4),
            _apart(array("f", _in_spans(one)).tobytes(), 4),
        )
        for one in branches
    ]
    return zlib.compress(msgpack.packb(told), LEVEL)


def packed_log_ratios(branches: Sequence[bytes]) -> bytes:
    """The body of the frame of a trajectory's log-ratios: of each branch its float16 values."""
    return zlib.compress(msgpack.packb([_apart(values, 2) for values in branches]), LEVEL)


def read_tokens(run_dir: Path, place: int) -> tuple[BranchTokens, ...]:
    """The branches of the trajectory at a place; none if the file is not there.

    Raises:
        StateError: the file is damaged there.
    """
    return _read(run_dir, place, lambda one: _branch(*one))


def read_log_ratios(run_dir: Path, place: int) -> tuple[tuple[float, ...], ...]:
    """The log-ratios at a place, in nats: of each branch those of its generated tokens, NaN where
    one was left out of the loss; none if the file is not there.

    Raises:
        StateError: the file is damaged there.
    """

    def numbers(values: bytes) -> tuple[float, ...]:
        data = _together(values, 2)
        return struct.unpack(f"<{len(data) // 2}e", data)

    return _read(run_dir, place, numbers)


def _read(run_dir: Path, place: int, branch: Callable[[Any], T]) -> tuple[T, ...]:
    """The branches of the frame at a place."""
    path = run_dir / TOKENS
    try:
        with path.open("rb") as file:
            file.seek(place)
            length, checksum = _FRAME.unpack(file.read(_FRAME.size))
            body = file.read(length)
        if zlib.crc32(body) != checksum:
            raise ValueError("its checksum differs")
        return tuple(branch(one) for one in msgpack.unpackb(zlib.decompress(body)))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, struct.error, zlib.error) as error:
        raise StateError(f"{path} is damaged at byte {place}: {error}") from error


def old_tokens(ids_json: str, branches_json: str, spans_json: str) -> tuple[BranchTokens, ...]:
    """What an older libra kept as text in the row: token ids and versions."""
    if not ids_json:
        return ()
    others = json.loads(branches_json)
    number = next(n for n in range(len(others) + 1) if n not in {one[0] for one in others})
    told = [*others, (number, json.loads(spans_json), json.loads(ids_json))]
    return tuple(
        _branch_tokens(number, array("i", ids), [VersionSpan(*one) for one in spans], None)
        for number, spans, ids in told
    )


def _in_spans(branch: BranchTokens) -> Iterable[float]:
    for span in branch.spans:
        yield from branch.logprobs[span.start : span.end]


def _branch(number: int, flat: list[int], ids: bytes, said: bytes) -> BranchTokens:
    spans = tuple(VersionSpan(*flat[at : at + 3]) for at in range(0, len(flat), 3))
    token_ids, known = array("i", _together(ids, 4)), array("f", _together(said, 4))
    return _branch_tokens(number, token_ids, spans, known)


def _branch_tokens(
    number: int, token_ids: array[int], spans: Sequence[VersionSpan], known: array[Any] | None
) -> BranchTokens:
    """A branch whose generated tokens have these log-probabilities."""
    mask = array("b", bytes(len(token_ids)))
    logprobs = array("f", bytes(0 if known is None else 4 * len(token_ids)))
    at = 0
    for span in spans:
        count = span.end - span.start
        mask[span.start : span.end] = array("b", b"\1" * count)
        if known is not None:
            logprobs[span.start : span.end] = known[at : at + count]
        at += count
    return BranchTokens(number, token_ids, mask, logprobs, tuple(spans))


def _apart(data: bytes, width: int) -> bytes:
    """Reorder numbers of ``width`` bytes: all first bytes, then all second ones, and so on."""
    return b"".join(data[place::width] for place in range(width))


def _together(data: bytes, width: int) -> bytes:
    count, rest = divmod(len(data), width)
    if rest:
        raise ValueError(f"{len(data)} bytes are no numbers of {width}")
    numbers = bytearray(len(data))
    for place in range(width):
        numbers[place::width] = data[place * count : (place + 1) * count]
    return bytes(numbers)
