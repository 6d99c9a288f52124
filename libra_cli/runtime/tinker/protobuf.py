"""Reads and writes protocol buffers, of which Tinker's wire has a few messages.

A message is a sequence of fields, each with a number and either an integer or bytes; what the bytes
are, a string, packed numbers or another message, is known by whoever reads them. The encoding
(protobuf.dev/programming-guides/encoding) is so short that the controller needs no package for it.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import TypeAlias

Fields: TypeAlias = dict[int, list[int | bytes]]
"""The values of a message by the numbers of their fields, in the order in which they came."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def read_fields(message: bytes) -> Fields:
    """Return the fields of a message; numbers of fixed width are left as bytes.

    Raises:
        ValueError: these bytes are no message.
    """
    found: Fields = defaultdict(list)
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        value: int | bytes
        match key & 7:
            case 0:
                value, at = _read_varint(message, at)
                found[key >> 3].append(value)
                continue
            case 1:
                length = 8
            case 2:
                length, at = _read_varint(message, at)
            case 5:
                length = 4
            case kind:
                raise ValueError(f"a field of the unknown kind {kind}")
        if at + length > len(message):
            raise ValueError("a field that ends after its message")
        found[key >> 3].append(message[at : at + length])
        at += length
    return found


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number without an end")


def part(fields: Fields, number: int) -> bytes:
    """Return the last value of a field of bytes, empty if there is none; raises ValueError if it is
    a number."""
    value = fields[number][-1] if fields.get(number) else b""
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} is a number")
    return value


def parts(fields: Fields, number: int) -> list[bytes]:
    """Return all values of a field of bytes; raises ValueError if one is a number."""
    return [part({number: [value]}, number) for value in fields.get(number, [])]


def whole(fields: Fields, number: int) -> int:
    """Return the last value of an integer, 0 if there is none; raises ValueError if it is bytes."""
    value = fields[number][-1] if fields.get(number) else 0
    if not isinstance(value, int):
        raise ValueError(f"field {number} is no integer")
    return value


def double(data: bytes) -> float:
    """Return a number of 64 bits, 0 for no bytes; raises ValueError for any other length."""
    if len(data) not in (0, 8):
        raise ValueError("a double has 8 bytes")
    return float(struct.unpack("<d", data)[0]) if data else 0.0


def integer_field(number: int, value: int) -> bytes:
    """Write an integer that is not negative."""
    return _varint(number << 3 | VARINT) + _varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    """Write bytes, which may be a message or the UTF-8 of a string."""
    return _varint(number << 3 | BYTES) + _varint(len(value)) + value


def double_field(number: int, value: float) -> bytes:
    """Write a number of 64 bits."""
    return _varint(number << 3 | FIXED64) + struct.pack("<d", value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
