"""How exactly one process is signalled."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from libra_cli.node.processes import proc
from libra_cli.node.processes.proc import Marker, ProcessIdentity

DEADLINE_S = 10.0


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM])
def test_a_process_is_signalled_where_the_kernel_or_a_container_gives_no_handles(
    monkeypatch, refusal
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with subprocess.Popen(["sleep", "60"]) as process:
        status = proc.status(process.pid)
        assert status is not None
        proc.send(status.identity, signal.SIGKILL)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_signal_to_a_recycled_pid_goes_nowhere() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        status = proc.status(process.pid)
        assert status is not None
        earlier = ProcessIdentity(process.pid, status.identity.started - 1)
        proc.send(earlier, signal.SIGKILL)
        assert not earlier.alive
        assert process.poll() is None
        proc.send(status.identity, signal.SIGKILL)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_command_with_blanks_and_parentheses_does_not_confuse_the_reader(tmp_path) -> None:
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "100"]) as process:
        status = proc.status(process.pid)
        process.kill()
    assert status is not None
    assert status.identity.pid == process.pid
    assert status.session == os.getsid(0)
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    age_s = uptime - status.identity.started / os.sysconf("SC_CLK_TCK")
    assert -1 < age_s < DEADLINE_S


@pytest.mark.parametrize(
    ("other", "ours"),
    [
        ({}, True),
        ({"LIBRA_RUN": "r-2"}, False),
        ({"LIBRA_NODE": "n2"}, False),
        ({"LIBRA_RUN": "", "LIBRA_NODE": "", "LIBRA_PROCESS": ""}, False),
    ],
)
def test_a_process_is_ours_by_its_run_and_its_node(other, ours) -> None:
    marker = Marker(f"r-{os.getpid()}", "n1")
    environment = {**os.environ, **marker.environment("server-0"), **other}
    with subprocess.Popen(["sleep", "100"], env=environment) as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/environ").read_bytes())
            named = {one.pid: name for one, name in marker.marked_processes().items()}
            assert named == ({process.pid: "server-0"} if ours else {})
        finally:
            process.kill()


def until(condition: Callable[[], object]) -> None:
    """A process runs for an instant before Linux shows its environment."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
