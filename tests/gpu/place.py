"""Where the checks of one machine work: their files, what earlier ones left, and one server."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.gpu.expected import NoServer
from tests.gpu.model import Size
from tests.gpu.served import Server
from tests.vllm_server import bench_of

START_S = 900.0
"""Seconds that a server may take: a cold cache on a slow disk."""
SHARE = 0.4
"""Of a GPU's memory that the server takes, so that a trainer of the check has room beside it."""


@dataclass
class Place:
    """``base`` has the files of all checks; ``gpus`` is 0 on a machine without."""

    base: Path
    size: Size
    gpus: int
    _open: ExitStack = field(default_factory=ExitStack)
    _server: Server | None = None

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def model(self) -> Path:
        return self.base / "model"

    def note(self, name: str, values: Any) -> None:
        """Leave something for checks to come."""
        (self.base / f"{name}.json").write_text(json.dumps(values))

    def noted(self, name: str) -> Any:
        """What an earlier check has left.

        Raises:
            RuntimeError: it has left nothing.
        """
        file = self.base / f"{name}.json"
        if not file.exists():
            raise RuntimeError(f"an earlier check has not left {file.name}; begin with --again")
        return json.loads(file.read_text())

    @property
    def versions(self) -> list[Path]:
        """The directories that the trainer has published."""
        return [self.base / "versions" / name for name in self.noted("versions")]

    def last_version(self) -> Path:
        """The last version as a model's directory of its own."""
        target = self.base / "last"
        if not target.exists():
            draft = self.base / "last.draft"
            shutil.copytree(self.model, draft, ignore=shutil.ignore_patterns("*.safetensors*"))
            tensors = dict[str, Tensor]()
            for file in sorted(self.versions[-1].glob("*.safetensors")):
                tensors |= load_file(file)
            save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
            draft.rename(target)
        return target

    def server(self) -> Server:
        """The server of this process, started with the model if there is none."""
        return self._server or self.start(self.model)[0]

    def start(
        self, model: Path, ranks: int = 1, rollout: Mapping[str, Any] | None = None
    ) -> tuple[Server, float]:
        """Start a server in place of the one before; returns it and the seconds that it took.

        ``rollout`` are more keys of that section of its recipe. Raises NoServer.
        """
        self.stop()
        require(model)
        began = time.monotonic()
        try:
            bench = self._open.enter_context(
                bench_of(
                    model,
                    self.base / "host",
                    dtype="bfloat16",
                    ranks=ranks,
                    gpus=ranks if self.gpus else 0,
                    rollout={
                        "gpu_memory": SHARE,
                        "buckets": [{"name": "all", "max_num_seqs": self.size.seats}],
                        **(rollout or {}),
                    },
                    start_s=START_S,
                )
            )
        except Exception as error:  # whatever it is, there is no server to check with
            raise NoServer(f"{type(error).__name__}: {error}") from error
        self._server = Server(bench)
        return self._server, time.monotonic() - began

    def stop(self) -> None:
        """Stop the server, if there is one."""
        self._server = None
        self._open.close()


def require(model: Path) -> None:
    """Raises RuntimeError unless the model's directory is there."""
    if not (model / "config.json").exists():
        raise RuntimeError("the check of the trainer has made no model; make that one first")
