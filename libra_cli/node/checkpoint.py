"""Checkpoints: model, optimizer, scheduler, random states and ledger position, whole or not at all.

Every host writes the part of its own ranks under the same name. A directory appears under its name
when everything in it is on disk; only the newest ``keep`` stay.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

LEDGER = "ledger.json"


def save(
    accelerator: Accelerator, directory: Path, *, step: int, ledger: dict[str, Any], keep: int
) -> Path:
    """Write the checkpoint of ``step``; every rank calls it. Returns its path."""
    final = directory / f"step-{step:06d}"
    staging = directory / f".step-{step:06d}.tmp"
    if accelerator.is_local_main_process:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=0o700, parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(staging))
    accelerator.wait_for_everyone()
    if accelerator.is_local_main_process:
        (staging / LEDGER).write_text(json.dumps({**ledger, "step": step}))
        _to_disk(staging)
        shutil.rmtree(final, ignore_errors=True)
        staging.rename(final)
        _forget(directory, keep)
    accelerator.wait_for_everyone()
    return final


def load(accelerator: Accelerator, path: Path) -> int:
    """Restore everything; every rank calls it. Returns the step it was written after."""
    accelerator.load_state(str(path))
    return int(json.loads((path / LEDGER).read_text())["step"])


def _to_disk(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _forget(directory: Path, keep: int) -> None:
    for old in sorted(directory.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
