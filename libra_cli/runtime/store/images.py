"""The images that trajectories were shown, in ``images/`` of a run's directory.

An image is a PNG file called by its SHA-256, so one that is shown often is kept once. Which image
stands where is a line of ``places.jsonl``: group, member, attempt, first token, how many tokens,
width, height, the name. A controller that goes on where another was killed reads it again.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from libra_cli.config.errors import EnvironmentBroken, StateError
from libra_cli.core.types import TrajectoryId
from libra_cli.envs.png import size_of
from libra_cli.runtime.store.run_directory import append_whole

IMAGES = "images"
PLACES = "places.jsonl"


class KeptImage(NamedTuple):
    """An image that stands for ``tokens`` tokens of a trajectory, from ``start`` on."""

    start: int
    tokens: int
    width: int
    height: int
    name: str
    """The SHA-256 of its file, in hexadecimal digits."""


class ShownImage(NamedTuple):
    """An image with its file, as servers and the trainer get it."""

    start: int
    tokens: int
    png: bytes


class ImageStore:
    """Keeps the images of a run. It belongs to one event loop."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / IMAGES
        self._places = read_places(run_dir)

    def add(self, trajectory: TrajectoryId, image: ShownImage) -> None:
        """Keep an image, and where it stands; nothing happens if it stands there already.

        Raises:
            EnvironmentBroken: another stands there, of an episode that was to be the same again.
        """
        name = hashlib.sha256(image.png).hexdigest()
        kept = KeptImage(image.start, image.tokens, *size_of(image.png), name)
        before = [one for one in self._places[trajectory] if one.start == image.start]
        if before == [kept]:
            return
        if before:
            raise EnvironmentBroken(f"token {image.start}: it shows another image than before")
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._directory / f"{name}.png"
        if not file.exists():
            draft = file.with_suffix(".draft")
            draft.write_bytes(image.png)
            draft.replace(file)
        append_whole(self._directory / PLACES, json.dumps([*trajectory, *kept]) + "\n")
        self._places[trajectory].append(kept)

    def of(self, trajectory: TrajectoryId) -> tuple[ShownImage, ...]:
        """The images of a trajectory, in order.

        Raises:
            StateError: a file cannot be read.
        """
        if trajectory not in self._places:
            return ()
        return tuple(
            ShownImage(one.start, one.tokens, self._read(one.name))
            for one in self._places[trajectory]
        )

    def _read(self, name: str) -> bytes:
        try:
            return (self._directory / f"{name}.png").read_bytes()
        except OSError as error:
            raise StateError(
                f"an image that a trajectory was shown cannot be read: {error}",
                hint="files in images/ of a run's directory are needed until the run has ended",
            ) from error


def read_places(run_dir: Path) -> defaultdict[TrajectoryId, list[KeptImage]]:
    """Which images stand where in each trajectory; a line that was cut by a crash is left out."""
    found: defaultdict[TrajectoryId, list[KeptImage]] = defaultdict(list)
    path = run_dir / IMAGES / PLACES
    if not path.is_file():
        return found
    for line in path.read_text(encoding="ascii").splitlines():
        try:
            group, member, attempt, *place = json.loads(line)
            found[TrajectoryId(group, member, attempt)].append(KeptImage(*place))
        except (ValueError, TypeError):
            continue
    return found
