"""The way in to the agent: a socket in the run directory, which only its owner can enter.

Everybody here works from within that directory, because the path of a socket may have 107 bytes at
most and a run directory may need more.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from libra_cli.node.agent.proc import Marker

SOCKET = "agent.sock"
LOG = "agent.log"
START_S = 20.0
CHUNK = 64 * 1024


def connect() -> socket.socket | None:
    """A line to the agent, or None if there is none."""
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(SOCKET)
    except OSError:
        line.close()
        return None
    return line


def summon(run_dir: Path) -> socket.socket | None:
    """Start an agent that outlives this process and its terminal; a line to it, or None."""
    marker = Marker.of(run_dir)
    with open(LOG, "ab") as log:
        agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "libra_cli.node.agent.main", "serve", str(run_dir)],
            env={**os.environ, **marker.environment("agent")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (line := connect()) is not None:
            return line
        if agent.poll():  # 0 means that another agent was faster
            return None
        time.sleep(0.02)
    return None


def bridge(line: socket.socket) -> None:
    """Join standard input and output to the agent until either side ends."""
    threading.Thread(target=_carry_in, args=(line,), daemon=True).start()
    while data := line.recv(CHUNK):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _carry_in(line: socket.socket) -> None:
    while data := os.read(0, CHUNK):
        line.sendall(data)
    line.shutdown(socket.SHUT_WR)
