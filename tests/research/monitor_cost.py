# ruff: noqa: T201
"""What monitors cost the controller: CPU seconds a step, by monitor, beside none.

    python -m tests.research.monitor_cost [STEPS [MONITOR ...]]

Each is told, in a process of its own, the records of a run of 128 trajectories and some 330 turns a
step, a step every half second, after some steps to warm up. ``loop`` is the CPU of the thread that
tells them, which in a run is the event loop; ``process`` is that of all threads of the process and
``others`` of the processes that it has started (W&B's).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from libra_cli.core.records import Record, StepRecord, TrajectoryRecord
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.monitors.dispatch import Monitors
from libra_cli.runtime.monitors.protocol import MonitoredRun
from tests import sample_run

WARM = 4
PAUSE_S = 0.5
TOKENS = 1000
CHOICES = (
    "none",
    "tensorboard",
    "wandb",
    "trackio",
    "mlflow",
    "prometheus",
    "opentelemetry",
    "all",
)


def arguments(directory: Path, port: int) -> dict[str, dict[str, Any]]:
    return {
        "tensorboard": {},
        "wandb": {},
        "trackio": {},
        "mlflow": {"tracking_uri": f"file:{directory}/mlflow"},
        "prometheus": {"port": 0},
        "opentelemetry": {"endpoint": f"http://127.0.0.1:{port}"},
    }


def life(steps: int) -> list[Record]:
    """Records in order; of trajectories their beginning too, and ``TOKENS`` tokens of each."""
    tokens = (sample_run.branch([70] * TOKENS),)
    told: list[Record] = []
    for _, record in sample_run.records(steps=steps):
        if isinstance(record, TrajectoryRecord) and record.state == "finished":
            told.append(replace(record, state="running", ended_at=None, reward=None))
            record = replace(record, tokens=tokens)
        told.append(record)
    return told


def cpu_of_children() -> float:
    """CPU seconds of living processes below this one."""
    parents: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks = int(fields[11]) + int(fields[12])
        parents[int(path.parent.name)] = (int(fields[1]), ticks / os.sysconf("SC_CLK_TCK"))
    below, seconds = {os.getpid()}, 0.0
    for process in sorted(parents):
        if parents[process][0] in below:
            below.add(process)
            seconds += parents[process][1]
    return seconds


def wait_until_begun() -> None:
    """Until nothing is imported any more, so that this process computes next to nothing."""
    before = -1.0
    while time.process_time() - before > 0.05:
        before = time.process_time()
        time.sleep(3)


def measure(choice: str, steps: int, directory: Path, port: int) -> str:
    """A line of the table."""
    (directory / "model").mkdir(parents=True)
    save_tokenizer(build_tokenizer(), directory / "model", max_len=512)
    known = arguments(directory, port)
    names = {"none": [], "all": list(known)}.get(choice, [choice])
    notes: list[str] = []
    run = MonitoredRun("cost", directory, {}, notes.append)
    loop = process = others = warm_s = 0.0
    done = 0
    began = time.process_time()
    with Monitors({name: known[name] for name in names}, run, samples=4) as monitors:
        for record in life(WARM + steps):
            before = time.thread_time()
            monitors.on(record)
            loop += time.thread_time() - before
            if isinstance(record, StepRecord):
                time.sleep(PAUSE_S)
                done += 1
                if done == WARM:
                    wait_until_begun()
                    warm_s = time.process_time() - began
                    loop, process, others = 0.0, time.process_time(), cpu_of_children()
        process = time.process_time() - process
        others = cpu_of_children() - others
    dropped = [note for note in notes if note.startswith("monitor ")]
    told = " ".join(f"{1000 * one / steps:8.2f}" for one in (loop, process, others))
    return f"{choice:14} {told} {warm_s:8.2f}  {dropped or ''}"


def main() -> None:
    """The table."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(f"ms a step over {steps} steps, and CPU seconds to begin with {WARM} steps")
    print(f"{'monitor':14} {'loop':>8} {'process':>8} {'others':>8} {'begin s':>8}")
    for choice in sys.argv[2:] or CHOICES:
        with tempfile.TemporaryDirectory() as place:
            environment = os.environ | {
                "WANDB_MODE": "offline",
                "TRACKIO_DIR": f"{place}/trackio",
                "MLFLOW_ALLOW_FILE_STORE": "true",
            }
            with Collecting() as port:
                code = (
                    "from tests.research.monitor_cost import *;"
                    f"print(measure({choice!r}, {steps}, Path({place!r}) / 'run', {port}))"
                )
                command = [sys.executable, "-c", code]
                done = subprocess.run(
                    command, env=environment, check=True, capture_output=True, text=True
                )
                print(done.stdout.splitlines()[-1], flush=True)


class Collecting:
    """Takes spans and says thank you, in this process."""

    def __enter__(self) -> int:
        self._server = HTTPServer(("127.0.0.1", 0), _Thanks)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self._server.server_port

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Thanks(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    main()
