"""What a copy of a model from a host leaves on this machine when it breaks off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libra_cli.config.errors import HostLost
from libra_cli.runtime.hosts.transport import CommandResult
from libra_cli.runtime.trainer.model_export import fetch_model

FILES = ("config.json", "model-00001.safetensors", "model-00002.safetensors")


class CutTransport:
    """A host that is lost in the middle of a file."""

    target = "n1"

    def __init__(self, lost_at: str) -> None:
        self._lost_at = lost_at

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        return CommandResult(0, "\n".join(FILES).encode(), b"")

    async def fetch(self, path: str, target: Path) -> None:
        half = path.endswith(self._lost_at)
        await asyncio.to_thread(target.write_text, "ha" if half else "whole")
        if half:
            raise HostLost("n1: the connection broke")


def copy(to: Path, *, lost_at: str) -> None:
    host: Any = SimpleNamespace(transport=CutTransport(lost_at))
    asyncio.run(fetch_model(host, "/export/step-000010-e0", to))


def test_a_copy_that_breaks_off_leaves_whole_files_alone(tmp_path: Path) -> None:
    with pytest.raises(HostLost):
        copy(tmp_path, lost_at="00001.safetensors")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.json": "whole"}
    copy(tmp_path, lost_at="nothing")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        FILES, "whole"
    )
