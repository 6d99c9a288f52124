"""``libra tinker`` in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.live import LIBRA, START_S


@dataclass(frozen=True)
class ServedTinker:
    """What it prints, and the directory that it was started in."""

    environment: Mapping[str, str]
    base_model: str
    here: Path


@contextmanager
def tinker_service(here: Path, recipe: Path, *options: str) -> Iterator[ServedTinker]:
    """Serve a recipe, with ``here`` as home too; afterwards it is stopped by Ctrl-C."""
    log = here / "log"
    with (
        log.open("w") as told_to_user,
        subprocess.Popen(
            [*LIBRA, "tinker", str(recipe), *options],
            cwd=here,
            env={**os.environ, "HOME": str(here), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=told_to_user,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline().strip() for _ in range(3)]
            told = dict(line.removeprefix("export ").split("=", 1) for line in lines[:2] if line)
            assert len(told) == 2, log.read_text()
            yield ServedTinker(told, lines[2].removeprefix("base model: "), here)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=START_S) == 0
        finally:
            process.kill()
