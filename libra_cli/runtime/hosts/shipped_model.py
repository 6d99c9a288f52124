"""The small model that comes with libra, made as ``model.build`` says, so that no host has to.

Training it takes a core more than a minute, which was half of a first run. ``tests.shipped_model``
makes it anew; tests say when that is due.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from libra_cli.config.recipe import ModelBuild

ABOUT = "libra.json"


@dataclass(frozen=True, slots=True)
class ShippedModel:
    """A model directory, which the hosts' builder takes for one that it has cached."""

    name: str
    """The name that ``node.model.build`` gives it: a hash of the request and of the code."""
    files: Mapping[str, bytes]


def shipped_model(build: ModelBuild | None) -> ShippedModel | None:
    """Return the model that comes with libra, if it is the one that is to be built."""
    if build is None:
        return None
    place = files("libra_cli") / "models" / build.task
    about = json.loads((place / ABOUT).read_bytes())
    if build.model_dump(mode="json", exclude_none=True) != about["build"]:
        return None
    return ShippedModel(about["hash"], {file.name: file.read_bytes() for file in place.iterdir()})
