"""A server that computes nothing, and ends as vLLM does once a GPU of it is lost.

``LOST_GPUS`` is the directory of a fake nvidia-smi (``tests.fake_gpus``).
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from tests.load.server import AtOnceEngine


class LosingEngine(AtOnceEngine):
    """Looks before every step whether its GPUs are there."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Refuse to start on a GPU that is lost."""
        super().__init__(arguments)
        self._look()

    def step(self) -> list[tuple[str, Any]]:
        """End every turn."""
        self._look()
        return super().step()

    @staticmethod
    def _look() -> None:
        directory = Path(os.environ["LOST_GPUS"])
        for name in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
            if (directory / f"lost-{name[-1]}").exists():
                raise RuntimeError("CUDA error: unspecified launch failure")


if __name__ == "__main__":
    engine = types.ModuleType("libra_cli.node.rollout.engine")
    engine.VllmEngine = LosingEngine  # type: ignore[attr-defined]
    sys.modules[engine.__name__] = engine
    from libra_cli.node.rollout import server

    server.main()
