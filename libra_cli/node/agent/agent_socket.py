"""The agent's Unix socket in the run directory, which only the directory's owner can enter.

These functions work in that directory as the current one, because the path of a socket may have 107
bytes at most and the path of a run directory may be longer.
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
    """Connect to the agent; None if there is no agent."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(SOCKET)
    except OSError:
        connection.close()
        return None
    return connection


def spawn(run_dir: Path) -> socket.socket | None:
    """Start an agent that outlives this process and its terminal, and connect to it.

    None if no agent answers within ``START_S``.
    """
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
        if (connection := connect()) is not None:
            return connection
        if agent.poll():  # 0 means that another agent was faster
            return None
        time.sleep(0.02)
    return None


def bridge(connection: socket.socket) -> None:
    """Join standard input and output to the agent until either side ends."""
    threading.Thread(target=_copy_stdin, args=(connection,), daemon=True).start()
    while data := connection.recv(CHUNK):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _copy_stdin(connection: socket.socket) -> None:
    while data := os.read(0, CHUNK):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
