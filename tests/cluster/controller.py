"""A controller at work, as a user starts it; it can be killed, frozen and started again."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import yaml

from tests.live import CHECKOUT, LIBRA
from tests.netns import MORTAL

START_S = 60.0


class ControllerEnded(Exception):
    """The controller is gone; what it has said last."""


class Controller:
    """``libra run`` and its run directory."""

    def __init__(
        self, directory: Path, home: Path, recipe: dict[str, Any], command: Sequence[str]
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._command = command
        self.recipe = directory / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(recipe))
        self.log = directory / "libra.log"
        self._environment = {
            **os.environ,
            "HOME": str(home),
            "PYTHONPATH": str(CHECKOUT),
            "TERM": "dumb",
        }
        self._process: subprocess.Popen[str] | None = None
        self._run_dir: Path | None = None

    @property
    def run_dir(self) -> Path:
        """The run directory; waits for it."""
        if self._run_dir is None:
            found = self.wait("run directory", self._databases, timeout_s=START_S)
            self._run_dir = found[0].parent
        return self._run_dir

    @property
    def run_id(self) -> str:
        """The run's marker; empty before there is a run directory."""
        if self._run_dir is None and not self._databases():
            return ""
        return self.run_dir.name

    def _databases(self) -> list[Path]:
        return sorted(self.directory.glob("runs/*/libra.db"))

    @property
    def process(self) -> subprocess.Popen[str]:
        """The newest controller."""
        assert self._process is not None
        return self._process

    @property
    def ended(self) -> bool:
        """Whether the newest controller is gone."""
        return self.process.poll() is not None

    def start(self, *arguments: str) -> None:
        """Start it, or another one."""
        with self.log.open("a") as output:
            self._process = subprocess.Popen(
                [*MORTAL, *self._command, "run", str(self.recipe), *arguments],
                cwd=self.directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def resume(self) -> None:
        """Go on with the run after its controller died."""
        self.start("--resume", str(self.run_dir))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the controller."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(START_S)

    def stop(self, timeout_s: float) -> int:
        """Ctrl-C; its exit status."""
        self.kill(signal.SIGINT)
        return self.process.wait(timeout_s)

    def end(self) -> None:
        """Whatever it is doing, it is gone afterwards."""
        if self._process is not None and not self.ended:
            self.kill(signal.SIGCONT)
            self.kill()

    def libra(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Another command, from another terminal."""
        return subprocess.run(
            [*LIBRA, *arguments],
            cwd=self.directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the journal, read as any other program could."""
        uri = f"file:{self.run_dir}/libra.db?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=10)) as database:
            return database.execute(sql).fetchall()

    def step(self) -> int:
        """The newest step in the journal."""
        ((step,),) = self.query("SELECT coalesce(max(step), 0) FROM steps")
        return int(step)

    def wait(self, what: str, condition: Callable[[], Any], *, timeout_s: float) -> Any:
        """What a condition says once it is true.

        Raises:
            ControllerEnded: the controller was gone first.
            TimeoutError: it was not true in time.
        """
        give_up = time.monotonic() + timeout_s
        while not (found := condition()):
            if self.ended:
                raise ControllerEnded(f"while waiting for {what}:\n{self.told()}")
            if time.monotonic() > give_up:
                raise TimeoutError(f"no {what} in {timeout_s:.0f} s:\n{self.told()}")
            time.sleep(0.1)
        return found

    def wait_step(self, step: int, *, timeout_s: float) -> None:
        """Wait until that step is in the journal."""
        self.wait(f"step {step}", lambda: self.step() >= step, timeout_s=timeout_s)

    def told(self, size: int = 3000) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-size:]
