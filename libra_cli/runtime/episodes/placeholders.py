"""Writes images into prompts, token by token as the model's own processor does.

The chat template puts a mark for an image, one token of which stands for it; the processor repeats
that token, once for each patch of pixels that the vision tower makes one embedding of. How many
these are follows from the image's size alone, so that the controller needs neither pixels nor
transformers. ``tests/integration/test_vision.py`` compares with transformers' processor and with
vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from libra_cli.config.errors import LibraError
from libra_cli.config.vision import SEEING
from libra_cli.envs.png import size_of
from libra_cli.envs.protocol import Message
from libra_cli.runtime.episodes.templates import ChatTemplate, read_json

_BEFORE, _AFTER = "LIBRA0BEFORE", "LIBRA0AFTER"
_LONGEST_RATIO = 200
"""Times that the longer side of an image may be the shorter one, as in transformers."""


class ImagePlace(NamedTuple):
    """An image, and where its tokens are in a list of ids."""

    start: int
    tokens: int
    png: bytes


class ImagePlaceholders:
    """The marks of images in the prompts of one model."""

    def __init__(self, model_dir: Path, template: ChatTemplate) -> None:
        """Read the sizes of patches, and find the template's mark.

        Raises:
            LibraError: the model is of no family whose images are known, or lacks its processor.
        """
        config = read_json(model_dir / "config.json")
        if config.get("model_type") not in SEEING:
            raise LibraError(
                f"{model_dir} is of the family {config.get('model_type')}, whose images libra does "
                "not know",
                hint=f"model.path: a model of {', '.join(sorted(SEEING))}, or model.images: false",
            )
        processor = read_json(model_dir / "preprocessor_config.json")
        try:
            self.token = int(config["image_token_id"])
            """The id of the token that stands for a part of an image."""
            self._unit = int(processor["patch_size"]) * int(processor["merge_size"])
            self._fewest = int(processor["size"]["shortest_edge"])
            self._most = int(processor["size"]["longest_edge"])
        except (KeyError, TypeError, ValueError) as error:
            raise LibraError(
                f"{model_dir}: its processor of images is not understood: {error!r}",
                hint="preprocessor_config.json has patch_size, merge_size and size with "
                "shortest_edge and longest_edge",
            ) from error
        self._mark = _mark_of(template, model_dir)

    def written(self, message: Message) -> Message:
        """The message with the marks of its images in its text."""
        images = message.get("images", ())
        rest = {key: value for key, value in message.items() if key != "images"}
        return cast("Message", {**rest, "content": self._mark * len(images) + message["content"]})

    def expanded(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Repeat the token of each image of ``messages`` in the ids of their texts.

        Raises:
            LibraError: a text writes that token itself, or an image cannot be shown.
        """
        images = [image for message in messages for image in message.get("images", ())]
        if ids.count(self.token) != len(images):
            raise LibraError(
                f"{ids.count(self.token)} marks of images were written for {len(images)} images: a "
                "message spells the mark out",
                hint="give an environment's images as a message's images, not in its text",
            )
        counts = iter([self.tokens_of(image) for image in images])
        return [one for token in ids for one in [token] * (self._times(token, counts))]

    def _times(self, token: int, counts: Iterator[int]) -> int:
        return next(counts) if token == self.token else 1

    def places(self, ids: Sequence[int], messages: Sequence[Message]) -> list[ImagePlace]:
        """Where the images of ``messages`` are in the ids that ``expanded`` has made of them."""
        found, at = list[ImagePlace](), 0
        for image in (image for message in messages for image in message.get("images", ())):
            start, tokens = ids.index(self.token, at), self.tokens_of(image)
            found.append(ImagePlace(start, tokens, image))
            at = start + tokens
        return found

    def tokens_of(self, png: bytes) -> int:
        """How many tokens an image is.

        Raises:
            LibraError: it is too narrow for the model's processor.
        """
        width, height = size_of(png)
        if max(width, height) > _LONGEST_RATIO * min(width, height):
            raise LibraError(f"an image of {width} x {height} is too narrow to be shown")
        sides = [round(side / self._unit) * self._unit for side in (width, height)]
        area = sides[0] * sides[1]
        if area > self._most:
            shrink = math.sqrt(width * height / self._most)
            units = [max(1, math.floor(side / shrink / self._unit)) for side in (width, height)]
        elif area < self._fewest:
            grow = math.sqrt(self._fewest / (width * height))
            units = [math.ceil(side * grow / self._unit) for side in (width, height)]
        else:
            units = [side // self._unit for side in sides]
        return units[0] * units[1]


def _mark_of(template: ChatTemplate, model_dir: Path) -> str:
    """What the template writes for an image among parts of a message."""
    parts = [{"type": "text", "text": _BEFORE}, {"type": "image"}, {"type": "text", "text": _AFTER}]
    whole = template.render([{"role": "user", "content": parts}])
    mark = whole.partition(_BEFORE)[2].partition(_AFTER)[0]
    alike = template.render([{"role": "user", "content": f"{_BEFORE}{mark}{_AFTER}"}])
    if not mark or alike != whole:
        raise LibraError(
            f"{model_dir}: the chat template writes no images",
            hint="take the template of the model's publisher, in chat_template.jinja",
        )
    return mark
