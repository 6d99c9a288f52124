"""The number formats in which gradients go from a worker to the trainer.

A worker computes and adds up in float32. What it sends may be rounded to bfloat16 (to the nearest,
ties to even): each number by at most 1 part in 256, whatever its size, with no bias. The trainer
adds in float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number in each format that ``training.worker_gradients`` can name."""


def to_float32(data: bytes, dtype: str) -> NDArray[np.float32]:
    """Decode little-endian numbers of ``dtype``, which is ``float32`` or else means bfloat16."""
    if dtype == "float32":
        return np.frombuffer(data, dtype="<f4")
    wide = np.frombuffer(data, dtype="<u2").astype("<u4") << np.uint32(16)
    return wide.view("<f4")
