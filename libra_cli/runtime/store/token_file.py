"""The tokens of trajectories that have ended: ``tokens.bin``, beside the database.

A row of a trajectory says where its tokens lie (``tokens_at``); what nobody ever asks for is never
read. The file only grows. Every trajectory is a frame: its length, its CRC-32 (both little-endian
u32), and, compressed by zlib, the msgpack array of its branches:

    number, [version, start, end, ...] of its spans, token ids, log-probabilities

Log-probabilities are of the tokens in spans alone. Numbers are little-endian int32 and float32,
taken apart by byte: first all lowest bytes, then the next. Most upper bytes of token ids are zero
and most exponents alike, which is what a compressor needs side by side (byte shuffle, as in HDF5:
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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgpack

from libra_cli.config.errors import StateError
from libra_cli.core.types import BranchTokens, VersionSpan

TOKENS = "tokens.bin"
OLD_TOKENS = "token_ids_json"
"""The column of ``trajectories`` in which an older libra kept them."""
_FRAME = struct.Struct("<II")
LEVEL = 1
"""Of zlib: higher ones take longer and save a few percent of bytes that hardly repeat."""


class TokenFile:
    """Writes the file. It is opened when there is something to write."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / TOKENS
        self._file: int | None = None
        self._end = 0

    def append(self, trajectories: Iterable[Sequence[BranchTokens]]) -> list[int]:
        """Write some trajectories; returns where each begins. All are in the file, or none.

        Raises:
            OSError: the file cannot be written.
        """
        data, places = bytearray(), []
        if self._file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
            self._end = os.fstat(self._file).st_size
        for branches in trajectories:
            places.append(self._end + len(data))
            body = packed(branches)
            data += _FRAME.pack(len(body), zlib.crc32(body)) + body
        at, rest = self._end, memoryview(data)
        while rest:
            written = os.pwrite(self._file, rest, at)
            at, rest = at + written, rest[written:]
        self._end = at
        return places

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def packed(branches: Sequence[BranchTokens]) -> bytes:
    """The body of a frame."""
    told = [
        (
            one.number,
            [number for s in one.spans for number in (s.version, s.start, s.end)],
            _apart(one.token_ids),
            _apart(array("f", _in_spans(one))),
        )
        for one in branches
    ]
    return zlib.compress(msgpack.packb(told), LEVEL)


def read_tokens(run_dir: Path, place: int) -> tuple[BranchTokens, ...]:
    """The branches of the trajectory at a place; none if the file is not there.

    Raises:
        StateError: the file is damaged there.
    """
    path = run_dir / TOKENS
    try:
        with path.open("rb") as file:
            file.seek(place)
            length, checksum = _FRAME.unpack(file.read(_FRAME.size))
            body = file.read(length)
        if zlib.crc32(body) != checksum:
            raise ValueError("its checksum differs")
        return tuple(_branch(*one) for one in msgpack.unpackb(zlib.decompress(body)))
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
    token_ids, known = _together("i", ids), _together("f", said)
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


def _apart(numbers: array[Any]) -> bytes:
    """Bytes by their place in a number; all numbers have four."""
    data = numbers.tobytes()
    return b"".join(data[place::4] for place in range(4))


def _together(typecode: str, data: bytes) -> array[Any]:
    count, rest = divmod(len(data), 4)
    if rest:
        raise ValueError(f"{len(data)} bytes are no numbers of 4")
    numbers = bytearray(len(data))
    for place in range(4):
        numbers[place::4] = data[place * count : (place + 1) * count]
    return array(typecode, bytes(numbers))
