"""The images of a prompt, in the form that vLLM's engine core takes them.

Prompts come with every token of an image in them. So vLLM's own processor, which would write these
tokens, is passed over, and the core gets the very ids that the trainer trains on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.v1.core.sched import output

from libra_cli.node.model.images import ImageReader, Patches
from libra_cli.node.rollout.turn import TurnRefused

IMAGE = "image"
"""What vLLM calls the kind of these inputs."""


class PromptImages:
    """Makes vLLM's features of images, with the processor in a model's directory."""

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir
        # vLLM 0.32 sends workers no patches of an image that its prefix cache covers, and keeps the
        # request so: when a load, or want of memory, drops that cache, the image cannot be encoded.
        vars(output)["strip_covered_mm_data"] = _kept

    @cached_property
    def _reader(self) -> ImageReader:
        return ImageReader(self._model_dir)

    def features(self, images: Sequence[Sequence[Any]]) -> list[MultiModalFeatureSpec]:
        """The features of images, of each its first token, how many tokens, and its PNG file.

        Raises:
            TurnRefused: an image cannot be read, or is another number of tokens here.
        """
        return [self._feature(int(start), int(count), png) for start, count, png in images]

    def _feature(self, start: int, tokens: int, png: bytes) -> MultiModalFeatureSpec:
        try:
            patches = self._reader.read(png)
        except ValueError as error:
            raise TurnRefused(str(error)) from error
        if self._reader.tokens(patches) != tokens:
            raise TurnRefused(
                f"an image is {self._reader.tokens(patches)} tokens here, and {tokens} in the "
                "prompt: preprocessor_config.json differs between hosts"
            )
        name = hashlib.sha256(png).hexdigest()
        return MultiModalFeatureSpec(
            data=_item(patches),
            modality=IMAGE,
            identifier=name,
            mm_position=PlaceholderRange(offset=start, length=tokens),
            mm_hash=name,
        )


def _kept(
    features: list[MultiModalFeatureSpec], computed: int, *, uses_mrope: bool = False
) -> list[MultiModalFeatureSpec]:
    """Return all features of a request, however many of its tokens are computed."""
    return features


def _item(patches: Patches) -> Any:
    """One image's patches and grid, as the models of the Qwen-VL kind name them."""
    values = {"pixel_values": patches.values, "image_grid_thw": patches.grid[None]}
    sizes = patches.grid[None].prod(-1)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(IMAGE, sizes),
        "image_grid_thw": MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
    }
    return MultiModalKwargsItems.from_hf_inputs(values, fields)[IMAGE][0]
