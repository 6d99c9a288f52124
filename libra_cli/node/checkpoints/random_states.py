"""The random states of a rank as plain values, which JSON carries exactly."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return those of this process: of Python, numpy, torch and, if there is one, its GPU."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return _plain(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators of Python, NumPy and torch, and CUDA's if it was saved and is there."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def older_states(data: bytes) -> list[dict[str, Any]]:
    """Return those of an older libra's ``rng.pt``, a pickle that may hold arrays and no more."""
    arrays: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    made = np.ndarray.__reduce__(np.zeros(1))[0]
    arrays += [(made, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    with torch.serialization.safe_globals(arrays):
        states = torch.load(io.BytesIO(data), weights_only=True)
    return [_plain(one["python"], one["numpy"], one["torch"], one["cuda"]) for one in states]


def _plain(python: Any, numpy: Any, cpu: Any, cuda: Any) -> dict[str, Any]:
    kind, keys, *rest = numpy
    return {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _text(cpu),
        "cuda": None if cuda is None else _text(cuda),
    }


def _text(tensor: Any) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> Any:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
