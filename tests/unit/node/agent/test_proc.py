"""How exactly one process is signalled."""

from __future__ import annotations

import errno
import os
import signal
import subprocess

import pytest

from libra_cli.node.agent import proc


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
        assert process.wait(10.0) == -signal.SIGKILL
