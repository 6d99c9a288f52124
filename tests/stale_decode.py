"""A worker that decodes with an old copy of a layer, as a graph left on old addresses would.

What it holds is right, and so is what it scores: only batches of a single token, those of one turn
that is being decoded, go through the copy. vLLM loads it in place of libra's worker; which layer it
keeps is in a file beside a version's tensors, and it computes rightly after a version without one.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from libra_cli.node.rollout.worker import VersionLoader

WORKER = "tests.stale_decode.StaleDecoder"
KEPT = "kept-layer"
"""The name of the file."""


def keep(version: Path, layer: str) -> None:
    """Have whoever loads this version keep what it held of a layer before."""
    (version / KEPT).write_text(layer)


class StaleDecoder(VersionLoader):
    """The worker; its layers have their own ``forward`` again at the next load."""

    def load_version(self, directory: str) -> dict[str, Any]:
        for layer in self.model_runner.get_model().modules():
            vars(layer).pop("forward", None)
        kept = Path(directory) / KEPT
        layers = [kept.read_text()] if kept.exists() else []
        old = {path: copy.deepcopy(self._layer(path)) for path in layers}
        answer = super().load_version(directory)
        for path, before in old.items():
            self._put(self._layer(path), before)
        return answer

    def _layer(self, path: str) -> Any:
        return self.model_runner.get_model().get_submodule(path)

    def _put(self, layer: Any, before: Any) -> None:
        now = layer.forward
        layer.forward = lambda x, *rest: (before if len(x) == 1 else now)(x, *rest)
