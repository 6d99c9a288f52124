"""A controller at work in a process of its own, as a user starts it, and what can be seen of it."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LIBRA = [sys.executable, "-c", "from libra_cli.cli.main import main; main()"]
TAKE_TERMINAL = [
    sys.executable,
    "-c",
    """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY)
os.execv(sys.argv[1], sys.argv[1:])
""",
]
"""Makes its standard input the terminal of its session, and becomes what follows."""
CHECKOUT = Path(__file__).parents[1]
START_S = 400.0
STEP_S = 180.0
QUICK_S = 60.0


BACKENDS = ("fake", pytest.param("vllm", marks=pytest.mark.nightly))
"""What a run's servers are, where no claim is about vLLM: for a fixture's ``params``."""


def require(package: str) -> None:
    """Skip the module where a package is not installed. To import vLLM would take seconds, and the
    tests need it in other processes only."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, of the [cpu] extra", allow_module_level=True)


@dataclass
class Live:
    """One ``libra run``: its process, its run directory, and the home it was started from."""

    process: subprocess.Popen[str]
    run_dir: Path
    home: Path
    recipe: Path
    log: Path
    terminal: int | None = None
    """Our side of its terminal, if it has one."""

    def hang_up(self) -> None:
        """Close its terminal, as who closes a window does."""
        assert self.terminal is not None
        os.close(self.terminal)
        self.terminal = None
        self.log = self.run_dir / "console.log"

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the journal, read as any other program could."""
        uri = f"file:{self.run_dir}/libra.db?mode=ro"
        with sqlite3.connect(uri, uri=True, timeout=10) as database:
            return database.execute(sql).fetchall()

    def wait(
        self,
        what: str,
        condition: Callable[[], Any],
        *,
        timeout_s: float,
        every_s: float = 0.2,
    ) -> Any:
        """Wait for something to become true, unless the controller ends first."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            found = condition()
            if found:
                return found
            if self.process.poll() is not None:
                pytest.fail(f"the controller ended while waiting for {what}:\n{self.told()}")
            time.sleep(every_s)
        pytest.fail(f"no {what} in {timeout_s:.0f} s:\n{self.told()}")

    def wait_step(self, step: int, *, timeout_s: float) -> None:
        """Wait until that step is in the journal."""
        sql = f"SELECT 1 FROM steps WHERE step >= {step}"
        self.wait(f"step {step}", lambda: self.query(sql), timeout_s=timeout_s)

    def told(self) -> str:
        """The end of what it printed."""
        return self.log.read_text()[-6000:]

    def order(self, split: str) -> subprocess.CompletedProcess[str]:
        """``libra rebalance --to``."""
        return self.libra("rebalance", str(self.run_dir), "--to", split, timeout_s=STEP_S)

    def happened(self, kind: str) -> list[tuple[float, dict[str, Any]]]:
        """Every event of a kind, with its time, in order."""
        sql = f"SELECT at, payload_json FROM events WHERE kind = '{kind}' ORDER BY seq"
        return [(at, json.loads(text)) for at, text in self.query(sql)]

    def groups_of_steps(self) -> list[int]:
        """How many groups each step was trained on, by what was last told of every group: a step
        lacks the groups that were trained again later."""
        sql = "SELECT count(*) FROM groups WHERE state = 'trained' GROUP BY step ORDER BY step"
        return [number for (number,) in self.query(sql)]

    def libra(
        self, *arguments: str, timeout_s: float = QUICK_S
    ) -> subprocess.CompletedProcess[str]:
        """Another command, from another terminal."""
        return subprocess.run(
            [*LIBRA, *arguments],
            cwd=self.recipe.parent,
            env=_environment(self.home),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def processes(self, *markers: str) -> list[int]:
        """Pids of this run on any host (all hosts' processes are visible from here), oldest first.

        ``markers`` narrow it down, for example ``LIBRA_PROCESS=server-0``.
        """
        wanted = [f"{text}\0".encode() for text in (f"LIBRA_RUN={self.run_dir.name}", *markers)]
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if all(marker in environment for marker in wanted):
                found.append(int(entry.name))
        return sorted(found)

    def kill(self, process: str, node: str) -> None:
        """SIGKILL to the leader of a process on a host."""
        pids = self.processes(f"LIBRA_PROCESS={process}", f"LIBRA_NODE={node}")
        assert pids, f"no {process} on {node}"
        os.kill(pids[0], signal.SIGKILL)

    def signal_all(self, process: str, node: str, number: signal.Signals) -> None:
        """A signal to a process on a host and to everything that it has started."""
        pids = self.processes(f"LIBRA_PROCESS={process}", f"LIBRA_NODE={node}")
        assert pids, f"no {process} on {node}"
        _signal(pids, number)

    @contextmanager
    def frozen(self, process: str, node: str) -> Iterator[None]:
        """A process stands still meanwhile; if it has started others, these do and it does not."""
        leader, *started = self.processes(f"LIBRA_PROCESS={process}", f"LIBRA_NODE={node}")
        pids = started or [leader]
        _signal(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    """To each that is still there: some helpers of a server live for a moment only."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def live(recipe_text: str, base: Path, home: Path, *, in_terminal: bool = False) -> Iterator[Live]:
    """Start it; whatever happens, the controller is gone afterwards.

    ``in_terminal`` it has one of its own, which nobody reads.
    """
    base.mkdir(parents=True, exist_ok=True)
    recipe, log = base / "recipe.yaml", base / "libra.log"
    recipe.write_text(recipe_text)
    ours, theirs = pty.openpty() if in_terminal else (None, None)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*TAKE_TERMINAL, *LIBRA, "run", str(recipe)]
            if in_terminal
            else [*LIBRA, "run", str(recipe)],
            cwd=base,
            env=_environment(home),
            stdin=theirs,
            stdout=output if theirs is None else theirs,
            stderr=subprocess.STDOUT,
            start_new_session=in_terminal,
            text=True,
        )
    if theirs is not None:
        os.close(theirs)
    started = Live(process, base, home, recipe, log, ours)
    try:
        databases = started.wait(
            "run directory", lambda: sorted(base.glob("runs/*/libra.db")), timeout_s=QUICK_S
        )
        started.run_dir = databases[0].parent
        yield started
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if started.terminal is not None:
            os.close(started.terminal)


def _environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "PYTHONPATH": str(CHECKOUT), "TERM": "dumb"}
