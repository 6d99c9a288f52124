"""Pixels as a PNG file, for environments that show images; needs nothing but numpy."""

from __future__ import annotations

import struct
import zlib
from typing import Any

PNG = b"\x89PNG\r\n\x1a\n"
"""The first bytes of a PNG file."""
_RGB_OF_EIGHT_BITS = bytes((8, 2, 0, 0, 0))


def png_of(pixels: Any) -> bytes:
    """Return the bytes of a PNG file of ``[height, width, 3]`` uint8 pixels.

    Raises:
        ValueError: the pixels have another shape or type.
    """
    import numpy as np  # only here: what reads sizes alone starts without it

    array = np.asarray(pixels)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise ValueError(
            f"pixels are [height, width, 3] of uint8, not {list(array.shape)} of {array.dtype}"
        )
    height, width, _ = array.shape
    # Each row begins with the number of its filter: 0, none.
    rows = np.concatenate((np.zeros((height, 1), np.uint8), array.reshape(height, -1)), axis=1)
    parts = (
        (b"IHDR", struct.pack(">II", width, height) + _RGB_OF_EIGHT_BITS),
        (b"IDAT", zlib.compress(rows.tobytes())),
        (b"IEND", b""),
    )
    chunks = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    ]
    return PNG + b"".join(chunks)


def size_of(png: bytes) -> tuple[int, int]:
    """Return width and height in pixels, which the first chunk of a PNG file has.

    Raises:
        ValueError: it is cut before them, has no pixels, or is no PNG file.
    """
    if len(png) < 24 or not png.startswith(PNG):
        raise ValueError("an image is no whole PNG file")
    width, height = struct.unpack(">II", png[16:24])
    if not width or not height:
        raise ValueError(f"an image has {width} x {height} pixels")
    return width, height
