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

from libra_cli.node.agent.lease.link import start_ours
from libra_cli.node.processes.stop import SOCKET

START_S = 25.0
"""More than an agent takes to end (``stop.LAST_GRACE_S``), and less than a controller waits."""
AGAIN_S = 0.5
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

    One whose lease is over keeps any other from starting until it has stopped everything, and that
    is also the one that is started here, by a signal: so it is tried again. None if no agent
    answers within ``START_S``, or one has failed by itself.
    """
    deadline = time.monotonic() + START_S
    agent = _start(run_dir)
    while time.monotonic() < deadline:
        if (connection := connect()) is not None:
            return connection
        code = agent.poll()
        if code is not None and code > 0:
            return None
        if code is not None:  # another agent is there: it was faster, or is about to end
            time.sleep(AGAIN_S)
            agent = _start(run_dir)
        time.sleep(0.02)
    return None


def _start(run_dir: Path) -> subprocess.Popen[bytes]:
    return start_ours(["libra_cli.node.agent.main", "serve", str(run_dir)], "agent", run_dir)


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
