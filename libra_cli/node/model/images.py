"""Images for a model of the Qwen3-VL kind: pixels for its vision tower, and places in a row.

Servers and the trainer make patches of the very same bytes by the same code, transformers'
processor on PIL, so that what differs between them is what the two models compute.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libra_cli.config.errors import TrainerError

REMEMBERED = 256
"""Images whose patches a process keeps: each turn of a trajectory brings all before it again."""


class Patches(NamedTuple):
    """What the vision tower is given of an image."""

    values: Tensor
    """``[patches, numbers of one]``, float32."""
    grid: Tensor
    """``[3]``, int64: how many patches in time, down and across."""


class ImageReader:
    """Makes patches of PNG files, as the processor in a model's directory says."""

    def __init__(self, model_dir: Path | str) -> None:
        # Only here: the class imports PIL, which a host without images need not have.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(model_dir)
        self.merge = int(self._processor.merge_size)
        """Patches across and down that become one token."""
        self.read = lru_cache(REMEMBERED)(self._read)

    def _read(self, png: bytes) -> Patches:
        """Raises ValueError, whatever is wrong with the file."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
                pixels = image.convert("RGB")
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"an image cannot be read: {error}") from error
        found = self._processor(images=[pixels], return_tensors="pt")
        return Patches(found["pixel_values"], found["image_grid_thw"][0])

    def tokens(self, patches: Patches) -> int:
        """How many tokens these patches become."""
        return int(patches.grid.prod()) // self.merge**2

    def sides(self, patches: Patches) -> tuple[int, int]:
        """How many tokens down and across."""
        _, down, across = patches.grid.tolist()
        return down // self.merge, across // self.merge


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of a row of T tokens."""

    values: Tensor
    """``[patches, numbers of one]``: those of all its images, one after the other."""
    grids: Tensor
    """``[images, 3]``: the patches of each in time, down and across."""
    mask: Tensor
    """``[1, T]``, bool: whether a token stands for a part of an image."""


def positions_of(length: int, images: Sequence[tuple[int, tuple[int, int]]]) -> NDArray[np.int64]:
    """``[3, length]``: positions in time, down and across of the tokens of a sequence (M-RoPE).

    ``images`` are the first token of each and how many tokens it is down and across. Those of an
    image have one position in time; what follows begins after its longer side.
    """
    positions: NDArray[np.int64] = np.zeros((3, length), dtype=np.int64)
    at = position = 0
    for start, (down, across) in images:
        positions[:, at:start] = position + np.arange(start - at)
        position += start - at
        at = start + down * across
        positions[:, start:at] = position
        positions[1:, start:at] += np.indices((down, across)).reshape(2, -1)
        position += max(down, across)
    positions[:, at:] = position + np.arange(length - at)
    return positions


class ImagePlaces:
    """Tells a model which tokens stand for images, since one may also be generated as text is."""

    def __init__(self, model: nn.Module) -> None:
        self.mask: Tensor | None = None
        """``[1, T]``, bool, of the row that is computed."""
        inner: Any = getattr(model, "model", None)
        if hasattr(inner, "get_placeholder_mask"):
            inner.get_placeholder_mask = self._told

    def _told(self, *_: Any, **__: Any) -> tuple[Tensor, None]:
        if self.mask is None:
            raise TrainerError("a row has images, and nobody has said where")
        return self.mask[..., None], None


def freeze_towers(model: nn.Module) -> None:
    """Leave what a model sees with as it is: the language model alone is trained."""
    inner: Any = getattr(model, "model", None)
    tower = getattr(inner, "visual", None)
    if tower is not None:
        tower.requires_grad_(False)


def row_images(
    patches: Sequence[Patches],
    places: Sequence[tuple[int, int]],
    length: int,
    device: torch.device,
) -> RowImages | None:
    """The images of a row of ``length`` tokens; ``places`` are the first token of each and their
    number. None if there are no images."""
    if not patches:
        return None
    mask = torch.zeros(1, length, dtype=torch.bool)
    for start, tokens in places:
        mask[0, start : start + tokens] = True
    return RowImages(
        torch.cat([one.values for one in patches]).to(device),
        torch.stack([one.grid for one in patches]).to(device),
        mask.to(device),
    )
