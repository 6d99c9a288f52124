"""The files of a model's weights in its Hugging Face directory, and what their headers tell."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """Return the files that transformers and vLLM load: those of the index, else all there are.

    A directory may hold the same weights twice, under other names (``consolidated.safetensors``).
    """
    index = directory / INDEX
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    files: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    return [directory / name for name in sorted({*files.values()})]


def shapes_in(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its name in the files; their headers alone are read.

    Raises:
        OSError, ValueError, SafetensorError: a file cannot be read.
    """
    shapes = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def tensors_in(
    directory: Path, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all files, one after the other; of those whose name is ``wanted``
    alone."""
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in filter(wanted, file.keys()):
                yield name, file.get_tensor(name)
